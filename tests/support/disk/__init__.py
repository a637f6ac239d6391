"""Disks for prefixes.

faulty_files    a file system that fails, lies, is short, or loses what was not synced
played_disk     a disk whose jobs are done when a test says so
written_blocks  blocks with numbers for hashes, written to files and read again
"""
