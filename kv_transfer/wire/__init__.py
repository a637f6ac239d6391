"""What is on the wire, pure: no I/O, no clock, no thread.

frames        headers of all messages
greetings     the first message of each side
layout_field  the layout in a greeting, as earlier releases refuse it
field_checks  checks of fields; header_seal: the checksum of a header
"""
