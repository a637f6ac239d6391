"""Copies into the pool that were begun and are not over, by the lease that they are for."""

from __future__ import annotations

from collections import Counter


class PendingCopies:
    """A lease with such copies keeps its blocks, and does not land."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()

    def begin(self, token: int) -> None:
        self._count[token] += 1

    def end(self, token: int) -> None:
        """Record that a copy is over."""
        self._count[token] -= 1
        if not self._count[token]:
            del self._count[token]

    def has(self, token: int) -> bool:
        return token in self._count
