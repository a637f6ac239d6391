"""The lane between nodes of one host: the receiver copies out of the sender's pool.

shared_pool   a pool that other processes can read: made here, found and checked there
huge_pages    mapping that memory with large pages
shm_lane      both ends of the lane

Decisions:

On the shared-memory lane the decode node reads, and no other process writes into its pool. If the
decode node's pool were shared, a prefill process that is stopped between its check and its copy
could write into a block with a new owner, and no key could be revoked. The prefill node's pool is
shared instead (read-only, by `memfd`). There is still one copy and no socket for the bytes, but the
copy is made by the only side that knows whether the lease still holds.
"""
