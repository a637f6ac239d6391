"""Checks of a history: after turns of nodes, and at the end of every request.

nodes        what a node holds: its books after each turn, its blocks and files at the end
ends         how each request may end, as it follows from what is broken and when: pure
fault_times  when faults and changes begin and end: pure
violation    the error of all checks
"""
