"""Pieces gathered into chunks (one DATA frame each), and the record of which pieces are done.

A *piece* here is one block in one layer, keys and values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kv_transfer.shared.block_arrays import Blocks

BlockSums = npt.NDArray[np.uint64]
"""One sum for each piece: of its keys and its values together."""

MAX_SOURCE_BLOCKS = (1 << 32) - 1
"""Most blocks that `PushedPieces` can distinguish."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerChunk:
    """Some blocks of one layer in one memory, ordered so that its adjacent blocks are adjacent."""

    layer: int
    ordinals: Blocks
    source_blocks: Blocks

    def __len__(self) -> int:
        return self.ordinals.size

    def joined(self, others: Sequence[LayerChunk]) -> LayerChunk:
        """Return this chunk and others of its layer as one."""
        if not others:
            return self
        chunks = (self, *others)
        return LayerChunk(
            self.layer,
            np.concatenate([chunk.ordinals for chunk in chunks]),
            np.concatenate([chunk.source_blocks for chunk in chunks]),
        )


def split_chunks(
    layer: int,
    ordinals: Blocks,
    source_blocks: Blocks,
    *,
    max_blocks: int,
    num_pool_blocks: int = MAX_SOURCE_BLOCKS,
) -> list[LayerChunk]:
    """Return chunks of at most `max_blocks` that cover every (ordinal, source block) pair once.

    Source blocks from `num_pool_blocks` on are in another memory, and in chunks of their own.
    """
    order = np.argsort(source_blocks, kind="stable")
    ordinals, source_blocks = ordinals[order], source_blocks[order]
    num_in_pool = int(np.searchsorted(source_blocks, num_pool_blocks))
    return [
        LayerChunk(layer, ordinals[start:end], source_blocks[start:end])
        for first, last in pairwise((0, num_in_pool, ordinals.size))
        for start in range(first, last, max_blocks)
        for end in (min(start + max_blocks, last),)
    ]


class PieceSet:
    """The set of done pieces out of `num_layers * num_blocks`; adding one again changes nothing."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._is_done = np.zeros((num_layers, num_blocks), bool)
        self.count = 0

    def has_all(self, layer: int, ordinals: Blocks) -> bool:
        return bool(self._is_done[layer][ordinals].all())

    def add(self, layer: int, ordinals: Blocks) -> npt.NDArray[np.bool_]:
        """Add pieces, each named once; return which of them are new."""
        of_layer = self._is_done[layer]
        is_new: npt.NDArray[np.bool_] = ~of_layer[ordinals]
        of_layer[ordinals] = True
        self.count += int(np.count_nonzero(is_new))
        return is_new

    def discard(self, layer: int, ordinals: Blocks) -> None:
        """Remove pieces, each named once, as far as they are there."""
        of_layer = self._is_done[layer]
        self.count -= int(np.count_nonzero(of_layer[ordinals]))
        of_layer[ordinals] = False

    def has_first(self, num_blocks: int) -> bool:
        """Return whether all pieces of the first blocks are there."""
        first = self._is_done[:, :num_blocks]
        return self.count >= first.size and bool(first.all())


class PushedPieces:
    """The pieces of a transfer that were pushed, with the source block of each."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        # Source block + 1; 0 is not pushed.
        self._sources = np.zeros((num_layers, num_blocks), np.uint32)
        self.count = 0

    def add(self, layer: int, ordinals: Blocks, source_blocks: Blocks) -> npt.NDArray[np.intp]:
        """Add pieces; return the indices of the new ones. Of one named twice the first counts."""
        of_layer = self._sources[layer]
        first = _first_of_each(ordinals)
        new: npt.NDArray[np.intp] = first[of_layer[ordinals[first]] == 0]
        of_layer[ordinals[new]] = source_blocks[new] + 1
        self.count += new.size
        return new

    def source_of(self, layer: int, ordinal: int) -> int | None:
        """Return the source block of a piece; None if there is no such piece, or not yet."""
        num_layers, num_blocks = self._sources.shape
        if layer >= num_layers or ordinal >= num_blocks:
            return None
        block = int(self._sources[layer, ordinal])
        return block - 1 if block else None


def _first_of_each(ordinals: Blocks) -> npt.NDArray[np.intp]:
    """Return the index of each ordinal where it is named first."""
    if (ordinals[1:] > ordinals[:-1]).all():
        return np.arange(ordinals.size)
    return np.sort(np.unique(ordinals, return_index=True)[1])


def add_to_digest(digest: int, sums: BlockSums) -> int:
    """Return the digest with more pieces in it: a sum, so that pieces may come in any order."""
    return (digest + int(sums.sum())) % (1 << 64)


class ArrivedSums:
    """The digest of the pieces in a pool; a piece that came again must have its first sum."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._shape = num_layers, num_blocks
        # Allocated with the first sum: most pairs verify otherwise.
        self._sums: BlockSums | None = None
        self._pieces = PieceSet(num_layers, num_blocks)
        self.digest = 0

    def put(self, layer: int, ordinals: Blocks, sums: BlockSums) -> Blocks:
        """Add the sums of pieces, each named once; return which of them had another sum before."""
        if self._sums is None:
            self._sums = np.zeros(self._shape, np.uint64)
        of_layer = self._sums[layer]
        is_new = self._pieces.add(layer, ordinals)
        of_layer[ordinals[is_new]] = sums[is_new]
        self.digest = add_to_digest(self.digest, sums[is_new])
        changed: Blocks = ordinals[of_layer[ordinals] != sums]
        return changed
