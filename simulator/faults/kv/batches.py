"""What is moved from or to one node, in order: `kv_transfer.lanes.rdma.peer_batches`, on events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.peer_batches import MAX_BATCHES_UNDER_WAY

Item = TypeVar("Item")
OnDone = Callable[[bool], None]
Begin = Callable[[OnDone], None]
"""Begins a read or a write, and has the function called when it is over."""


@dataclass(eq=False, slots=True)
class _Batch:
    begin: Begin
    has_begun: bool = False
    is_moved: bool | None = None


class Batches(Generic[Item]):
    """Batches, of which two are under way, and items to tell when all before them are moved.

    `on_ready` is called with each item, in order; or once with an error, and then never again.
    """

    def __init__(self, on_ready: Callable[[Item | HandoffFailed], None]) -> None:
        self._on_ready = on_ready
        self._queue: deque[_Batch | tuple[Item]] = deque()
        self._is_going_on = False

    def add(self, begin: Begin) -> None:
        """Queue a batch."""
        self._queue.append(_Batch(begin))
        self._go_on()

    def tell_after(self, item: Item) -> None:
        """Have `on_ready` called with `item` when all that is queued before is moved."""
        self._queue.append((item,))
        self._go_on()

    def stop(self) -> None:
        """Forget what is queued, and tell nothing any more; what is under way continues."""
        self._queue.clear()
        self._on_ready = _told_nothing

    def _go_on(self) -> None:
        if self._is_going_on:  # The loop below does it.
            return
        self._is_going_on = True
        while self._queue and self._takes_first():
            pass
        self._is_going_on = False

    def _takes_first(self) -> bool:
        """Take the first of the queue if it is over; begin what may be under way."""
        first = self._queue[0]
        if not isinstance(first, _Batch):
            self._queue.popleft()
            self._on_ready(first[0])
            return True
        if first.is_moved is False:
            on_ready = self._on_ready
            self.stop()
            on_ready(HandoffFailed("it was not moved"))
            return False
        if first.is_moved:
            self._queue.popleft()
            return True
        batches = [one for one in self._queue if isinstance(one, _Batch)]
        for batch in batches[:MAX_BATCHES_UNDER_WAY]:
            if not batch.has_begun:
                batch.has_begun = True
                batch.begin(lambda is_moved, batch=batch: self._on_done(batch, is_moved))  # type: ignore[misc]
        return False

    def _on_done(self, batch: _Batch, is_moved: bool) -> None:
        batch.is_moved = is_moved
        self._go_on()


def _told_nothing(_: object) -> None:
    pass
