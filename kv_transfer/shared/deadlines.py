"""Times at which something is to be looked at, the earliest first."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key")

MANY_OUTDATED = 64
"""Entries beyond the keys, and once more their number, after which outdated ones are removed."""


def earliest_s(*times_s: float | None) -> float | None:
    """Return the earliest of these times; None: there is none."""
    earliest_s = None
    for at_s in times_s:
        if at_s is not None and (earliest_s is None or at_s < earliest_s):
            earliest_s = at_s
    return earliest_s


class Deadlines(Generic[Key]):
    """One time per key; setting, taking and removing cost the logarithm of their number.

    Memory is bounded by the number of keys.
    """

    def __init__(self) -> None:
        self._at_s: dict[Key, float] = {}
        # Entries that `_at_s` does not confirm are outdated. The number makes entries comparable.
        self._heap: list[tuple[float, int, Key]] = []
        self._num_pushed = 0

    @property
    def num_entries(self) -> int:
        """Entries that take memory: one for each key, and those that are outdated."""
        return len(self._heap)

    def set_no_later(self, key: Key, at_s: float) -> None:
        """Look at `key` at this time, unless it is looked at earlier."""
        if at_s < self._at_s.get(key, float("inf")):
            self._at_s[key] = at_s
            self._num_pushed += 1
            heapq.heappush(self._heap, (at_s, self._num_pushed, key))
            if self.num_entries > 2 * len(self._at_s) + MANY_OUTDATED:
                self._heap = [entry for entry in self._heap if self._at_s.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._at_s.pop(key, None)

    def take_due(self, now_s: float) -> list[Key]:
        """Remove and return the keys whose time has come, the earliest first."""
        due: list[Key] = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            _, _, key = heapq.heappop(self._heap)
            del self._at_s[key]
            due.append(key)
        return due

    def next_s(self) -> float | None:
        """Return the earliest time."""
        heap = self._heap
        while heap:
            at_s, _, key = heap[0]
            if self._at_s.get(key) == at_s:
                return at_s
            heapq.heappop(heap)
        return None
