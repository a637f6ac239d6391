"""The slots of a ring: lent in the order in which they are asked for, pure.

A request waits until there are enough, behind all requests before it: one for many slots is not put
off for ever by others for few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kv_transfer.shared.block_arrays import Blocks

OnSlots = Callable[[Blocks], None]


class Slots:
    """Slots `first` to `first + count - 1`. One thread owns it."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._is_free = np.ones(count, bool)
        self._num_free = count
        self._waiting: deque[tuple[int, OnSlots]] = deque()
        self._is_lending = False

    @property
    def count(self) -> int:
        return self._is_free.size

    @property
    def num_lent(self) -> int:
        return self.count - self._num_free

    @property
    def num_waiting(self) -> int:
        """The requests that wait."""
        return len(self._waiting)

    def ask(self, count: int, on_slots: OnSlots) -> None:
        """Call `on_slots` with so many slots, ascending, at once or when there are enough.

        Raises `ValueError` for more than there are at all.
        """
        if count > self.count:
            raise ValueError(f"{count} slots: there are {self.count}")
        self._waiting.append((count, on_slots))
        self._lend()

    def give_back(self, slots: Blocks) -> None:
        """Take slots back that nobody reads or writes any more; they may be lent at once.

        Raises `ValueError` for one that was not lent.
        """
        places = slots - np.uint32(self._first)
        if places.size and (places.max() >= self.count or self._is_free[places].any()):
            raise ValueError(f"slots {slots.tolist()} were not lent")
        self._is_free[places] = True
        self._num_free += places.size
        self._lend()

    def _lend(self) -> None:
        if self._is_lending:  # Called out of an `on_slots`: the loop below goes on.
            return
        self._is_lending = True
        try:
            while self._waiting and self._waiting[0][0] <= self._num_free:
                count, on_slots = self._waiting.popleft()
                places = np.flatnonzero(self._is_free)[:count]
                self._is_free[places] = False
                self._num_free -= count
                on_slots((places + self._first).astype(np.uint32))
        finally:
            self._is_lending = False
