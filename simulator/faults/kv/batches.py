"""Reads or writes between two nodes: `kv_transfer.lanes.rdma.batch_queue`, performed on events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.batch_queue import Batch, BatchQueue, QueuedPart

Item = TypeVar("Item")
OnDone = Callable[[bool], None]
Begin = Callable[[OnDone], None]
"""Begins a read or a write, and calls the function when it is over."""


class Batches(Generic[Item]):
    """Stands in for `PeerBatches`: a batch is moved when all its reads or writes are.

    `on_ready` is called with each item, in order; or once with an error, and then never again.
    """

    def __init__(self, on_ready: Callable[[Item | HandoffFailed], None], batch_bytes: int) -> None:
        self._on_ready = on_ready
        self._queue: BatchQueue[Begin, Item] = BatchQueue(batch_bytes)
        self._num_left: dict[Batch[Begin, Item], int] = {}
        self._failed: set[Batch[Begin, Item]] = set()
        self._is_going_on = False

    def add(self, begin: Begin, *, num_ranges: int, num_bytes: int) -> None:
        """Queue a read or a write."""
        self._queue.put(QueuedPart(begin, num_ranges, num_bytes))
        self._go_on()

    def tell_after(self, item: Item) -> None:
        """Call `on_ready` with `item` when all that is queued before it is moved."""
        if self._queue.tell_after(item):
            self._on_ready(item)
        else:
            self._go_on()

    def stop(self) -> None:
        """Drop the queue and report nothing more; reads and writes in progress continue."""
        self._queue.stop()

    def _go_on(self) -> None:
        if self._is_going_on:  # The loop below does it.
            return
        self._is_going_on = True
        self._fill()
        for items in self._moved():
            self._fill()
            for item in items:
                if not self._queue.is_stopped:
                    self._on_ready(item)
            self._queue.told()
            self._fill()
        self._is_going_on = False

    def _moved(self) -> Iterator[list[Item]]:
        """Yield the items of the batches that are over, in order, until one has failed."""
        while not self._queue.is_stopped and (first := self._queue.first) is not None:
            if first in self._failed:
                self._queue.stop()
                self._on_ready(HandoffFailed("it was not moved"))
            elif self._num_left[first]:
                return
            else:
                del self._num_left[first]
                yield self._queue.moved()

    def _fill(self) -> None:
        """Begin batches up to the number that may be in progress."""
        while (batch := self._queue.next_batch()) is not None:
            self._num_left[batch] = len(batch.parts)
            for begin in batch.parts:
                begin(partial(self._on_done, batch))

    def _on_done(self, batch: Batch[Begin, Item], is_moved: bool) -> None:
        if is_moved:
            self._num_left[batch] -= 1
        else:
            self._failed.add(batch)
        self._go_on()
