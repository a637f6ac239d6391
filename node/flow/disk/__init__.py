"""Prefixes on disk: what a node reads where that pays, what it writes, and when it does neither.

prefix_disk  the jobs of a disk, and the attempts that wait for one
"""
