"""Pieces of one landing that arrived with a wrong checksum, and are asked for again.

The header that named a piece has a checksum of its own, so the sum in it is what the sender read
when it sent the piece first. A piece that comes again must have that same sum: otherwise its
source has changed, and nothing says which content was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kv_transfer.shared.limits import (
    LEAST_BLOCKS_PER_FRAME,
    MAX_DAMAGED_HEADERS,
    MAX_REPEATS_PER_LANDING,
    MAX_REPEATS_PER_PIECE,
)
from kv_transfer.wire.frames import SUM_BYTES, Data


class DamagedPieces:
    """The pieces that arrived damaged, and how often each was requested again."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_headers = 0
        self._times_asked: dict[tuple[int, int], int] = {}
        self._sum_said: dict[tuple[int, int], bytes] = {}
        self._missing: set[tuple[int, int]] = set()

    def may_ask(self, layer: int, ordinals: Iterable[int]) -> bool:
        """Return whether these pieces may be asked for once more."""
        if self._num_requests >= MAX_REPEATS_PER_LANDING:
            return False
        times = (self._times_asked.get((layer, ordinal), 0) for ordinal in ordinals)
        return max(times, default=0) < MAX_REPEATS_PER_PIECE

    def may_lose_header(self) -> bool:
        """Count a header, or bytes, that its connection lost; return whether it may go on."""
        self._num_headers += 1
        return self._num_headers <= MAX_DAMAGED_HEADERS

    def ask(self, data: Data, ordinals: Iterable[int]) -> None:
        """Record that these blocks of `data` were damaged and are asked for."""
        self._num_requests += 1
        wanted = set(ordinals)
        for ordinal, said in _sums_of(data):
            if ordinal in wanted:
                piece = data.layer, ordinal
                self._times_asked[piece] = self._times_asked.get(piece, 0) + 1
                self._sum_said[piece] = said
                self._missing.add(piece)

    def changed(self, data: Data) -> int | None:
        """Return a block of `data` that was asked for and comes with another sum; None if none."""
        if not self._sum_said:
            return None
        for ordinal, said in _sums_of(data):
            if self._sum_said.get((data.layer, ordinal), said) != said:
                return ordinal
        return None

    def arrived(self, layer: int, ordinals: Iterable[int]) -> None:
        """Record that these pieces are in the pool with the right sum."""
        if self._missing:
            self._missing.difference_update((layer, ordinal) for ordinal in ordinals)

    def missing(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the layer and the ordinals of all that was asked for and has not arrived.

        In groups of as many as every release takes in one REPEAT.
        """
        by_layer: dict[int, list[int]] = {}
        for layer, ordinal in sorted(self._missing):
            by_layer.setdefault(layer, []).append(ordinal)
        return [
            (layer, tuple(ordinals[first : first + LEAST_BLOCKS_PER_FRAME]))
            for layer, ordinals in by_layer.items()
            for first in range(0, len(ordinals), LEAST_BLOCKS_PER_FRAME)
        ]


def _sums_of(data: Data) -> Iterator[tuple[int, bytes]]:
    """Yield each block of `data` with the sums of its pieces, one for each plane."""
    plane_bytes = SUM_BYTES * len(data.ordinals)
    for index, ordinal in enumerate(data.ordinals):
        places = range(SUM_BYTES * index, len(data.sums), plane_bytes)
        yield ordinal, b"".join(data.sums[at : at + SUM_BYTES] for at in places)
