"""Where keys and values are: the cache, its copies, and the blocks that were swapped out.

contract       what the runner needs of a cache
kv_cache       the KV cache in one allocation
kv_formats     what it stores of a number
layers_out     reports a step's layers as they become readable
device_copies  copies KV between a device and host memory beside running steps
host_pool      swapped-out blocks in host memory
"""
