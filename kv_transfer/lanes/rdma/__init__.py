"""The lane by RDMA: the sender writes the receiver's pool, then sends the header.

slabs            pure: the pool divided into slabs; the addresses of a chunk's bytes in both pools
aliases          other addresses for the same memory, for slabs that were fenced
registered_pool  a receiver's pool: the keys and the present address of each slab, fences
rdma_lane        both ends of the lane: what is agreed on, targets of writes
peer_writer      the thread that writes to one peer, in batches
mooncake_engine  Mooncake's Transfer Engine: the only importer of it
"""
