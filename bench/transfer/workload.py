"""The workload of every way of moving blocks: the same bytes, in the same two patterns."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.shared.block_arrays import runs_of

PATTERNS = ("adjacent", "scattered")
NUM_LAYERS = 8
MOVED_BYTES = 256 << 20
POOL_BYTES = 2 * MOVED_BYTES

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Some of a pool's blocks, all layers of them: half of the pool is moved."""

    layout: KVLayout
    num_moved: int

    @property
    def num_blocks(self) -> int:
        """The blocks of the pool."""
        return 2 * self.num_moved

    @property
    def num_pairs(self) -> int:
        """The pieces that are moved; one is the keys and values of a block in one layer."""
        return self.num_moved * self.layout.num_layers

    def source_blocks(self, pattern: str) -> Blocks:
        """Return the sender's blocks, block `i` for the receiver's block `i`.

        Scattered: in random order and with a gap beside each, so that no two are adjacent.
        """
        return self._blocks(pattern, seed=1)

    def target_blocks(self, pattern: str) -> Blocks:
        """Return the receiver's blocks; scattered ones are in another order than the sender's."""
        return self._blocks(pattern, seed=2)

    def _blocks(self, pattern: str, seed: int) -> Blocks:
        if pattern == "adjacent":
            return tuple(range(self.num_moved))
        order = np.random.default_rng(seed).permutation(self.num_moved)
        return tuple(int(block) for block in 2 * order)


def workload(piece_kib: int) -> Workload:
    """Return 256 MiB of blocks whose keys, in one layer, are `piece_kib` KiB: a power of two."""
    layout = KVLayout(
        model_digest="bench",
        num_layers=NUM_LAYERS,
        num_kv_heads=8,
        head_dim=64,
        block_size=piece_kib,
        dtype="bfloat16",
    )
    return Workload(layout, MOVED_BYTES // layout.block_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool for a workload, and what shares its memory with other processes, if anything does."""

    workload: Workload
    pool: Bytes
    shared: SharedPool | None = None


def private_memory(workload: Workload, seed: int) -> Memory:
    """Return memory that only this process sees, page-aligned like the pools of nodes."""
    whole = np.empty(POOL_BYTES + mmap.PAGESIZE, np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    return Memory(workload, _filled(whole[start : start + POOL_BYTES], workload, seed))


def shared_memory(workload: Workload, seed: int) -> Memory:
    """Return memory that decode nodes on the same host can map, like a prefill node's."""
    shared = SharedPool(POOL_BYTES, is_touched=True)
    return Memory(workload, _filled(shared.memory, workload, seed), shared)


def _filled(memory: npt.NDArray[np.uint8], workload: Workload, seed: int) -> Bytes:
    """Fill the memory with random bytes and return it as a pool."""
    rng = np.random.default_rng(seed)
    for part in np.split(memory.view(np.int64), POOL_BYTES >> 20):  # so that no second pool is made
        part[:] = rng.integers(0, 1 << 63, part.size)
    return memory.reshape(workload.layout.pool_shape(workload.num_blocks))


def ranges(pool: Bytes, blocks: Blocks) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of `blocks`, layer by layer, keys before values, as contiguous ranges."""
    for layer in pool:
        for kind in layer:
            for first, count in runs_of(blocks):
                yield kind[first : first + count].reshape(-1)


def digest(pool: Bytes, blocks: Blocks) -> int:
    """Return a digest of the blocks' bytes in order: equal on both sides when all arrived."""
    state = xxh3_64()
    for part in ranges(pool, blocks):
        state.update(part.data)
    value: int = state.intdigest()
    return value
