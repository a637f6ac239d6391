"""Blocks of prefixes in files. Works on threads of its own; no step and no event loop waits for it.

disk_threads  one thread that writes, one that reads
block_folder  the folders of the nodes of a host, and the files in them
block_file    what a file holds, and whether it is what was written
file_calls    the calls of the system

Decisions:

The file of a block is `PATH/node-0/FINGERPRINT/HASH.kv`, and `HASH.new` while it is written. The
process that writes below `node-0` holds `PATH/node-0/.lock`.

A file is complete or absent. It is written under another name, synced and renamed. The rename is
not synced: a power cut that loses it loses a hit. Each block has its XXH3-64, over its header too,
because disks and file systems lie; a file whose sum is wrong is removed.

Each node owns a folder, which it alone writes, removes from and bounds, so two nodes need no common
count and no order among them. It is the first whose lock nobody holds: the kernel releases the lock
of a killed process, so a node that restarts finds what it had, whatever its name and port. Nodes of
one fingerprint read each other's files; what vanishes meanwhile is a miss. Files of other models in
a node's folder count against its bound and go first.

Only files of this user count: others could make a model answer with their text. Blocks are not
encrypted. The key of KV transfers is one of CURVE connections and encrypts no files; disks are
encrypted below the file system.
"""
