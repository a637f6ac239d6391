"""The lane by RDMA: the sender writes the receiver's pool, then sends the header.

slabs            pure: the pool divided into slabs; the addresses of a chunk's bytes in both pools
aliases          other addresses for the same memory, for slabs that were fenced
registered_pool  a receiver's pool: the keys and the present address of each slab, fences
rdma_lane        both ends of the lane: what is agreed on, targets of writes
peer_writer      the thread that writes to one peer, in batches
mooncake_engine  Mooncake's Transfer Engine: the only importer of it

Decisions:

A fence moves the memory. Deregistering a memory key and creating a new one for the same addresses
does not stop a writer of the Mooncake Transfer Engine, because its retry asks for the new key. The
pool of a node that is written by RDMA is therefore shared memory, and a fenced slab is registered
at another mapping of it, at addresses that no dead writer knows.

A fence waits for reports, not for an empty slab. Where many prompts are computed, there is always a
landing in each slab, so a fence that waits for none would never come. The slab is registered at
both addresses until every connected sender has reported that its writes to the old one are done.
The report needs no frame of its own: a sender on this lane answers each FAILED with an ABORT after
its writes, also a FAILED of no lease, and has done so since KV protocol version 4.
"""
