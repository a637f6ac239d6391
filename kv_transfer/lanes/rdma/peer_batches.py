"""The thread that writes to one peer, or reads from it, in batches, of which two are in flight.

While one batch is waited for the next is on the wire already, so the wire does not idle. Ranges
that are queued meanwhile are gathered into the batch after that, which begins before anything else
is done. An item, for example the header of a frame, is told when all ranges queued before it are
moved. The queue is bounded by the window of the connection that fills it.

A peer that dies blocks its own thread until the engine's timeout, and no other.

The engine waits by polling, which keeps a processor busy. So the thread sleeps for the first half
of the time that a batch will probably take; ranges queued by then begin before the wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.slabs import Ranges

logger = logging.getLogger("pdserve.kv_transfer")

MAX_BATCHES_UNDER_WAY = 2
MAX_BATCH_RANGES = 1024
MAX_SLEEP_S = 0.5
SLEPT_SHARE = 0.5

Item = TypeVar("Item")


class Engine(Protocol):
    """The part of a transfer engine that the lane needs; see `MooncakeEngine`."""

    @property
    def name(self) -> str: ...
    def register(self, address: int, num_bytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...
    def can_reach(self, peer_name: str) -> bool: ...
    def submit(self, peer_name: str, ranges: Ranges) -> int: ...
    def submit_read(self, peer_name: str, ranges: Ranges) -> int: ...
    def wait(self, batch: int) -> bool: ...


@dataclass(slots=True)
class _Batch(Generic[Item]):
    """Ranges that are moved together, and the items to tell afterwards."""

    ranges: list[Ranges] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    num_ranges: int = 0
    num_bytes: int = 0
    id: int = 0
    submitted_at_s: float = 0.0

    def add(self, ranges: Ranges, num_bytes: int) -> None:
        self.ranges.append(ranges)
        self.num_ranges += len(ranges)
        self.num_bytes += num_bytes


class PeerBatches(Generic[Item]):
    """Writes to the engine `peer_name`, or reads from it. Its methods are called on one thread.

    `on_ready` is called, on its own thread or out of `tell_after`, with each item whose ranges are
    moved, in order; or once with the error of a failed batch, and then never again.
    """

    def __init__(
        self,
        engine: Engine,
        peer_name: str,
        on_ready: Callable[[PeerBatches[Item], Item | HandoffFailed], None],
        *,
        batch_bytes: int,
        is_reading: bool = False,
    ) -> None:
        self._engine = engine
        self._way = "a read from" if is_reading else "a write to"
        self._begin = engine.submit_read if is_reading else engine.submit
        self._peer_name = peer_name
        self._on_ready = on_ready
        self._batch_bytes = batch_bytes
        self._queue: deque[Ranges | Item] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_stopped = self._is_ending = False
        # Of the last two batches, because a single delayed one does not predict the next.
        self._s_per_byte: deque[float] = deque(maxlen=2)
        self._done_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="pdserve-rdma", daemon=True)
        self._thread.start()

    def add(self, ranges: Ranges) -> None:
        """Queue ranges to be moved."""
        for start in range(0, len(ranges), MAX_BATCH_RANGES):
            self._put(ranges[start : start + MAX_BATCH_RANGES])

    def tell_after(self, item: Item) -> None:
        """Have `on_ready` called with `item` when all ranges queued before are moved."""
        with self._changed:
            is_idle = not (self._queue or self._is_busy or self._is_stopped)
        if is_idle:
            self._on_ready(self, item)
        else:
            self._put(item)

    def stop(self) -> None:
        """Drop what is queued; batches in flight continue. Returns at once."""
        with self._changed:
            self._is_stopped = True
            self._queue.clear()
            self._changed.notify()

    def end(self) -> None:
        """Accept no more ranges, and end when the queued ones are moved. Returns at once."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: Ranges | Item) -> None:
        with self._changed:
            if not (self._is_stopped or self._is_ending):
                self._queue.append(item)
                self._changed.notify()

    # -- its thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        under_way: deque[_Batch[Item]] = deque()
        try:
            self._move_all(under_way)
        except HandoffFailed as error:
            self._give_up(error)
        except Exception as bug:
            logger.exception("RDMA with %s failed", self._peer_name)
            self._give_up(HandoffFailed(f"RDMA with {self._peer_name} failed: {bug}"))
        for batch in under_way:
            self._is_moved(batch)  # This frees it.

    def _give_up(self, error: HandoffFailed) -> None:
        with self._changed:
            was_stopped = self._is_stopped
        self.stop()
        if not was_stopped:
            self._on_ready(self, error)

    def _move_all(self, under_way: deque[_Batch[Item]]) -> None:
        """Work until it is stopped. Raises `HandoffFailed` when a batch fails."""
        if not self._engine.can_reach(self._peer_name):
            raise HandoffFailed(f"{self._peer_name} is unreachable")
        moved: _Batch[Item] | None = None
        while True:
            self._fill(under_way, may_wait=not moved)
            if moved:
                self._release(moved)  # While the next ones are on the wire.
            elif not under_way:
                return
            moved = None
            if under_way:
                self._sleep_for(under_way[0])
                self._fill(under_way, may_wait=False)
                moved = under_way.popleft()
                if not self._is_moved(moved):
                    what = f"{self._way} {self._peer_name}, of {moved.num_bytes} bytes,"
                    raise HandoffFailed(f"{what} failed")

    def _fill(self, under_way: deque[_Batch[Item]], *, may_wait: bool) -> None:
        """Begin as many batches as may be in flight; if there are none, wait for one if allowed."""
        while len(under_way) < MAX_BATCHES_UNDER_WAY:
            batch = self._take_batch(may_wait=may_wait and not under_way)
            if batch is None:
                return
            self._submit(batch)
            under_way.append(batch)

    def _take_batch(self, *, may_wait: bool) -> _Batch[Item] | None:
        """Return a batch of what is queued; None when there is nothing to do."""
        with self._changed:
            self._is_busy = not may_wait
            while may_wait and not (self._queue or self._is_stopped or self._is_ending):
                self._changed.wait()
            if not self._queue:
                return None
            self._is_busy = True
            batch: _Batch[Item] = _Batch()
            while self._queue:
                item = self._queue[0]
                if not isinstance(item, np.ndarray):
                    batch.items.append(item)
                else:
                    num_bytes = int(item[:, 2].sum())
                    is_too_much = batch.num_bytes + num_bytes > self._batch_bytes
                    is_too_many = batch.num_ranges + len(item) > MAX_BATCH_RANGES
                    if batch.ranges and (is_too_much or is_too_many):
                        break
                    batch.add(item, num_bytes)
                self._queue.popleft()
            return batch

    def _submit(self, batch: _Batch[Item]) -> None:
        if batch.ranges:
            batch.submitted_at_s = time.monotonic()
            batch.id = self._begin(self._peer_name, np.concatenate(batch.ranges))
            if not batch.id:
                raise HandoffFailed(f"{self._way} {self._peer_name} could not be started")

    def _release(self, batch: _Batch[Item]) -> None:
        for item in batch.items:
            with self._changed:
                if self._is_stopped:
                    return
            self._on_ready(self, item)

    def _sleep_for(self, batch: _Batch[Item]) -> None:
        """Sleep a part of the time that the batch will probably take.

        It is estimated with the higher speed of the last two batches.
        """
        if batch.id:
            span_s = batch.num_bytes * min(self._s_per_byte, default=0.0)
            sleep_s = self._began_at_s(batch) + SLEPT_SHARE * span_s - time.monotonic()
            time.sleep(min(max(0.0, sleep_s), MAX_SLEEP_S))

    def _is_moved(self, batch: _Batch[Item]) -> bool:
        if not batch.id:
            return True
        is_moved = self._engine.wait(batch.id)
        now_s = time.monotonic()
        if self._done_at_s is not None:  # The first one also makes the connection.
            self._s_per_byte.append((now_s - self._began_at_s(batch)) / batch.num_bytes)
        self._done_at_s = now_s
        return is_moved

    def _began_at_s(self, batch: _Batch[Item]) -> float:
        """Return when the batch had the wire for itself: after the end of the one before."""
        return max(batch.submitted_at_s, self._done_at_s or 0.0)
