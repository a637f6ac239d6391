"""KV blocks in separate host memory: of swapped sequences, and of prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from common.errors import InternalError
from engine.core.blocks.cache_copy import CopyUnderWay
from engine.runner.cache.contract import Cache, HostMemory


class HostBlockArrays:
    """Memory for `num_blocks` whole blocks of a cache, all layers. One thread owns both.

    Blocks that no copy uses are read and written elsewhere too, by a disk and by transfers, as the
    host pool says: `bytes` is `[layers, planes, num_blocks, piece_bytes]`.

    `swap_out` and `swap_in` are for a cache in host memory, `begin_swap` for a mirrored one.
    """

    def __init__(
        self, cache: Cache, size_bytes: int, host_memory: HostMemory | None = None
    ) -> None:
        """Allocate as many blocks as fit; `host_memory` None: private memory."""
        self.num_blocks = size_bytes // cache.layout.block_bytes
        self._cache = cache
        # Pages of blocks that were never used are not touched, so they take no memory.
        num_bytes = self.num_blocks * cache.layout.block_bytes
        memory = host_memory(num_bytes, False) if host_memory and num_bytes else None
        if memory is None:
            memory = np.zeros(num_bytes, np.uint8)
        self.bytes = memory.reshape(cache.layout.pool_shape(self.num_blocks))

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy cache blocks to host blocks, pairwise; `InternalError` for bad ids."""
        self._check(block_ids, host_block_ids)
        _copy_blocks(self._cache.host_bytes, block_ids, self.bytes, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy host blocks to cache blocks, pairwise; `InternalError` for bad ids."""
        self._check(block_ids, host_block_ids)
        _copy_blocks(self.bytes, host_block_ids, self._cache.host_bytes, block_ids)

    def begin_swap(
        self, block_ids: Sequence[int], host_block_ids: Sequence[int], *, is_out: bool
    ) -> CopyUnderWay:
        """Begin to copy between a device and host blocks, pairwise; `InternalError` for bad ids."""
        self._check(block_ids, host_block_ids)
        return self._cache.begin_copy(block_ids, self.bytes, host_block_ids, is_out=is_out)

    def _check(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        if len(block_ids) != len(host_block_ids):
            raise InternalError(
                f"swapping {len(block_ids)} blocks and {len(host_block_ids)} host blocks: "
                "wanted as many of each"
            )
        for name, ids, limit in (
            ("block id", block_ids, self._cache.num_blocks),
            ("host block id", host_block_ids, self.num_blocks),
        ):
            for one in ids:
                if not 0 <= one < limit:
                    raise InternalError(f"{name} {one}: wanted 0 to {limit - 1}")


def _copy_blocks(
    source: np.ndarray, source_ids: Sequence[int], target: np.ndarray, target_ids: Sequence[int]
) -> None:
    """Copy blocks of `[layers, 2, blocks, piece_bytes]`; adjacent ones in one copy per layer."""
    for first, at, count in _runs(source_ids, target_ids):
        target[:, :, at : at + count] = source[:, :, first : first + count]


def _runs(first_ids: Sequence[int], second_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first id, second id, count) of the longest runs in which both ids rise by one."""
    start = 0
    for i in range(1, len(first_ids) + 1):
        if i < len(first_ids):
            follows = first_ids[i] == first_ids[i - 1] + 1
            if follows and second_ids[i] == second_ids[i - 1] + 1:
                continue
        yield first_ids[start], second_ids[start], i - start
        start = i
