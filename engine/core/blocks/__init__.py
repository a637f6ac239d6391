"""Blocks of KV, by number.

block_pool    free, cached, running, reserved, receiving or quarantined blocks
prefix_cache  which block holds the KV of which prefix
host_pool     ids of host memory blocks for preempted sequences
cache_copy    a copy between a device and host memory, as the runner sees it
"""
