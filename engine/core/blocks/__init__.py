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

Both nodes of a handoff have its prompt, so pools of decode nodes would mostly hold copies of what
prefill nodes hold, and both would evict them at the same time. One of the two keeps it longer: the
other one evicts its copy before everything else. Which one it is follows from what both know of the
handoff, so nothing is said about it, and each keeps half. That costs transfers in place of
computing: where a pull would not be quicker, a prefill node gives nothing up. To let decode nodes
alone give up what they receive finds less than age alone: what they generated is of no use without
the prompt before it. `docs/figures.md` has the figures.
"""
