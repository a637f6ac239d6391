"""How the bytes get from pool to pool, and three ways for it.

lane         what a lane is
inline_lane  behind the header, on the same connection
shm/         copied out of the sender's pool, which is shared memory
rdma/        written into the receiver's registered pool
pool_memory  a pool: memory of the host or of a device, its addresses and aliases
pieces       the pool's bytes: checksums, and the one write
piece_rows   the same in one pass, where fused_copy can: a kernel that copies and hashes
gather       message parts out of a pool
"""
