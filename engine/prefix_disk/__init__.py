"""Blocks of prefixes in files. Works on threads of its own; no step and no event loop waits for it.

disk_threads  one thread that writes, one that reads
block_folder  the folders of the nodes of a host, and the files in them
block_file    what a file holds, and whether it is what was written
block_seal    blocks that are encrypted in their files
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

A lock is that of a file, so a node owns a folder as long as `.lock` in it is the file that it has
locked, and no link leads there. It looks before each file that it writes or removes, and with each
look at the disk. A node whose folder was removed, replaced or moved away (`rm -rf` under a live
node) writes nothing until it has taken one as at its start; one that is back in its place is still
its own. A file that is being written at that moment may come to lie in a folder that another node
has just taken there: one block, which that node counts after its next start. Where a file, a link
or somebody else's folder has the place of `node-0`, the node takes the next one.

Only files of this user count: others could make a model answer with their text. Where another user
may write to `PATH`, nothing in it is written or seen; a file that another user owns or may write is
not read, and removed. With
`--prefix-disk-encryption` blocks are sealed by AES-256-GCM with a key that follows from the KV key,
so nodes of one cluster read each other's files. It is asked for, and does not come with a KV key:
it needs a package that nodes do without, and `up` has another key in each run. The name of the key
is part of the folder's name, so what is sealed with another key is that of another model: it counts
against the bound, goes first, and is not taken for broken.
"""
