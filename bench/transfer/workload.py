"""The workload of every way of moving blocks: the same bytes, in the same two patterns."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from common.kv_layout import KVLayout
from kv_transfer.core.chunks import runs_of
from kv_transfer.pieces import Pool
from kv_transfer.shm.shared_pool import SharedPool

# A piece, one block's keys or values in one layer, is 64 KiB; 8 layers of 256 blocks are 256 MiB.
LAYOUT = KVLayout(
    model_digest="bench",
    num_layers=8,
    num_kv_heads=8,
    head_dim=128,
    block_size=32,
    dtype="bfloat16",
)
NUM_MOVED = 256
NUM_BLOCKS = 2 * NUM_MOVED
MOVED_BYTES = NUM_MOVED * LAYOUT.block_bytes
POOL_BYTES = NUM_BLOCKS * LAYOUT.block_bytes

PATTERNS = ("adjacent", "scattered")

Blocks = tuple[int, ...]


def source_blocks(pattern: str) -> Blocks:
    """Return the sender's blocks, block `i` for the receiver's block `i`.

    Scattered: in random order and with a gap beside each, so that no two are adjacent.
    """
    return _blocks(pattern, seed=1)


def target_blocks(pattern: str) -> Blocks:
    """Return the receiver's blocks; scattered ones are in another order than the sender's."""
    return _blocks(pattern, seed=2)


def _blocks(pattern: str, seed: int) -> Blocks:
    if pattern == "adjacent":
        return tuple(range(NUM_MOVED))
    order = np.random.default_rng(seed).permutation(NUM_MOVED)
    return tuple(int(block) for block in 2 * order)


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool, and what shares its memory with other processes, if anything does."""

    pool: Pool
    shared: SharedPool | None = None


def private_memory(seed: int) -> Memory:
    """Return memory that only this process sees, page-aligned like the pools of nodes."""
    whole = np.empty(POOL_BYTES + mmap.PAGESIZE, np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    return Memory(_filled(whole[start : start + POOL_BYTES], seed))


def shared_memory(seed: int) -> Memory:
    """Return memory that decode nodes on the same host can map, like a prefill node's."""
    shared = SharedPool(POOL_BYTES, is_touched=True)
    return Memory(_filled(shared.memory, seed), shared)


def _filled(memory: npt.NDArray[np.uint8], seed: int) -> Pool:
    """Fill the memory with random bytes and return it as a pool."""
    rng = np.random.default_rng(seed)
    for part in np.split(memory.view(np.int64), POOL_BYTES >> 20):  # so that no second pool is made
        part[:] = rng.integers(0, 1 << 63, part.size)
    return memory.reshape(LAYOUT.num_layers, 2, NUM_BLOCKS, LAYOUT.piece_bytes)


def ranges(pool: Pool, blocks: Blocks) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of `blocks`, layer by layer, keys before values, as contiguous ranges."""
    for layer in range(LAYOUT.num_layers):
        for kind in (0, 1):
            for first, count in runs_of(blocks):
                yield pool[layer, kind, first : first + count].reshape(-1)


def digest(pool: Pool, blocks: Blocks) -> int:
    """Return a digest of the blocks' bytes in order: equal on both sides when all arrived."""
    state = xxh3_64()
    for part in ranges(pool, blocks):
        state.update(part.data)
    value: int = state.intdigest()
    return value
