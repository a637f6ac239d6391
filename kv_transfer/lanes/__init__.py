"""How the bytes get from pool to pool, and five ways for it.

lane         what a lane is
inline_lane  after the header, on the same connection: message parts out of a pool
ipc/         copied from card to card
shm/         copied out of the sender's pool, which is shared memory
rdma/        written into the receiver's registered pool, or read out of the sender's ring
card_pool    what is asked of a pool on a card
pool_memory  a pool or a ring, on the host or a device; what is sent from beside it
pieces       the pool's bytes, summed and copied: in one pass by fused_copy, a kernel, where it can

Decisions:

Checksums are computed when a block is sent, not when it is written. A sum over bytes that are still
in the cache is cheaper: with the copy that follows it, 0.15 ms instead of 0.19 for a chunk of 512
tokens of the demo model's layer (384 KiB), and 0.09 instead of 0.16 for 128 KiB. For 2 MiB (a layer
of an 8B model) it is 0.45 instead of 0.41 ms, because the chunk has left the cache anyway and is
then read once more (Intel Xeon, Sapphire Rapids, nothing else running). But it would be computed by
the step thread, 0.03 to 0.2 ms in each layer that everything else waits for, for blocks too that
are never sent, and the sum contains the block's place in its ticket, which is not known then. The
connector's thread has the time: it reads the bytes beside the next layer's computation.

The layout says how many planes and bytes a layer has, and every lane asks it. A cache of latents
has one plane, and layers of other models differ in size. A pool is memory at an address in the
shape of its layout, on the host or on a device: lanes need addresses, and only what copies or sums
with the processor needs bytes. A lane may complete a copy later, as a device does; then its frame
is acknowledged, its landing lands and its blocks are released after the copy. Sums may be late
too: a card's kernels share the card with steps, and of two processes in turns, so the connector's
thread must not wait for each.

Blocks that are kept in host memory are numbered behind those of the pool, so a push, a chunk and a
frame name blocks of both alike, and every chunk is in one of them. The lanes that read bytes with
the processor of the host send from both. `rdma` would have to pin all of that memory and open it to
writers, and a copy from card to card cannot read it: these lanes abort such a transfer, which its
receiver takes for a miss. Where a ring is read by RDMA such blocks are copied to its slots, as a
card's are.

A card's sum is its own, not XXH3, which goes through a piece from its beginning to its end: a piece
would be one program's work, and cards want hundreds. Here each word is mixed with its index and all
are added up, in any order. The block's place in its ticket is added on the host.
"""
