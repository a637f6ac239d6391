"""The running sequences, by arrival, and what a step reads of all of them at once."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import overload

import numpy as np

from engine.core.sequences.seats import Ints
from engine.core.sequences.sequence import Sequence


class Running(Items[Sequence]):
    """Sequences sorted by arrival.

    Most steps run the same ones as the step before, so their ids and seats are collected once.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._by_id: dict[int, Sequence] | None = None
        self._rows: Ints | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...
    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._sequences[index]

    @property
    def by_id(self) -> Mapping[int, Sequence]:
        """The sequences by their ids, in the same order; it never changes, but is replaced."""
        if self._by_id is None:
            self._by_id = {sequence.sequence_id: sequence for sequence in self._sequences}
        return self._by_id

    @property
    def rows(self) -> Ints:
        """The seats of the sequences, in the same order; never changed either."""
        if self._rows is None:
            self._rows = np.array([sequence.seat for sequence in self._sequences], np.int64)
        return self._rows

    def add(self, sequence: Sequence) -> None:
        """Insert a seated sequence by its arrival."""
        insort(self._sequences, sequence, key=_by_arrival)
        self._forget()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; `ValueError` if it does not run."""
        self._sequences.remove(sequence)
        self._forget()

    def _forget(self) -> None:
        self._by_id = self._rows = None


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival
