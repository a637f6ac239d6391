"""Blocks of KV, by number.

block_pool    free, cached, running, reserved, receiving or quarantined blocks
prefix_cache  which block holds the KV of which prefix
host_pool     ids of host memory blocks, for preempted sequences and prefixes
eviction      which prefix makes room first
leaving_blocks  which blocks host memory is to have before they are evicted
disk_index    which blocks are on disk, how many bytes, and which file makes room first
disk_jobs     what is to be done on disk, and what came of it
cache_copy    a copy between a device and host memory, as the runner sees it; one of a prefix

Decisions:

Block hashes are SHA-256 chains over the layout's fingerprint (which covers the weights) and all
tokens. A collision would answer one user with another's text, and the cost is far below a forward
pass.
"""
