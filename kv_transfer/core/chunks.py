"""Pieces gathered into chunks (one DATA frame each), and the record of which pieces are done.

A *piece* here is one block in one layer, keys and values together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some blocks of one layer, ordered so that adjacent blocks of the source pool are adjacent."""

    layer: int
    ordinals: tuple[int, ...]
    source_blocks: tuple[int, ...]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first source block, count) of each range of adjacent source blocks."""
        return runs_of(self.source_blocks)

    def joined(self, others: Sequence[Chunk]) -> Chunk:
        """Return this chunk and others of its layer as one."""
        chunks = (self, *others)
        return Chunk(
            self.layer,
            tuple(chain.from_iterable(chunk.ordinals for chunk in chunks)),
            tuple(chain.from_iterable(chunk.source_blocks for chunk in chunks)),
        )


def runs_of(blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (first block, count) of each longest run of ascending adjacent `blocks`, in order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def split_chunks(
    layer: int, ordinals: Sequence[int], source_blocks: Sequence[int], *, max_blocks: int
) -> list[Chunk]:
    """Return chunks of at most `max_blocks` that cover every (ordinal, source block) pair once."""
    if not ordinals:
        return []
    pairs = sorted(zip(source_blocks, ordinals, strict=True))
    blocks, ordered = zip(*pairs, strict=True)
    return [
        Chunk(layer, ordered[start : start + max_blocks], blocks[start : start + max_blocks])
        for start in range(0, len(pairs), max_blocks)
    ]


class PieceSet:
    """The set of done pieces out of `num_layers * num_blocks`; adding one again changes nothing."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._is_done = bytearray(num_layers * num_blocks)
        self.count = 0

    def has(self, layer: int, ordinal: int) -> bool:
        return bool(self._is_done[layer * self._num_blocks + ordinal])

    def add(self, layer: int, ordinal: int) -> bool:
        """Add a piece; return whether it is new."""
        index = layer * self._num_blocks + ordinal
        if self._is_done[index]:
            return False
        self._is_done[index] = 1
        self.count += 1
        return True

    def discard(self, layer: int, ordinal: int) -> None:
        """Remove a piece, if it is there."""
        index = layer * self._num_blocks + ordinal
        self.count -= self._is_done[index]
        self._is_done[index] = 0

    @property
    def is_full(self) -> bool:
        return self.count == len(self._is_done)


class PushedPieces:
    """The pieces of a transfer that were pushed, with the source block of each."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        # Source block + 1; 0 is not pushed.
        self._sources = array("I", [0]) * (num_layers * num_blocks)
        self.count = 0

    def add(self, layer: int, ordinal: int, source_block: int) -> bool:
        """Add a piece; return whether it is new."""
        index = layer * self._num_blocks + ordinal
        if self._sources[index]:
            return False
        self._sources[index] = source_block + 1
        self.count += 1
        return True

    def source_of(self, layer: int, ordinal: int) -> int | None:
        """Return the source block of a piece; None if there is no such piece, or not yet."""
        if layer >= self._num_layers or ordinal >= self._num_blocks:
            return None
        block = self._sources[layer * self._num_blocks + ordinal]
        return block - 1 if block else None


def add_to_digest(digest: int, piece_sum: int) -> int:
    """Return the digest with one more piece in it: a sum, so that pieces may come in any order."""
    return (digest + piece_sum) % (1 << 64)


class ArrivedSums:
    """The digest of the pieces in a pool; of a piece that came again the last sum counts."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        # Eight bytes each, allocated with the first sum: most pairs verify otherwise.
        self._sums = array("Q")
        self.digest = 0

    def put(self, layer: int, ordinal: int, piece_sum: int) -> None:
        if not self._sums:
            self._sums.frombytes(bytes(8 * self._num_layers * self._num_blocks))
        index = layer * self._num_blocks + ordinal
        self.digest = add_to_digest(self.digest, piece_sum - self._sums[index])
        self._sums[index] = piece_sum
