"""The thread that writes to one peer, or reads from it, in batches: `batch_queue` performed.

A batch begins before anything else is done. A peer that dies blocks its own thread until the
engine's timeout, and no other.

The engine waits by polling, which keeps a processor busy. So the thread sleeps for the first half
of the time that a batch will probably take; ranges queued by then begin before the wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.batch_queue import MAX_BATCH_RANGES, Batch, BatchQueue, QueuedPart
from kv_transfer.lanes.rdma.slabs import Ranges

logger = logging.getLogger("pdserve.kv_transfer")

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


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A batch of the engine; `id` is 0 where nothing is moved."""

    id: int
    num_bytes: int
    at_s: float


class PeerBatches(Generic[Item]):
    """Writes to the engine `peer_name`, or reads from it. Its methods are called on one thread.

    `on_ready` is called, on its own thread or out of `tell_after`, with each item whose ranges are
    moved, in order; or once with the error of a failed batch, and then never again.

    Raises `HandoffFailed` where its thread does not start.
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
        self._queue: BatchQueue[Ranges, Item] = BatchQueue(batch_bytes)
        self._changed = threading.Condition()  # It guards the queue.
        # Of the last two batches, because a single delayed one does not predict the next.
        self._s_per_byte: deque[float] = deque(maxlen=2)
        self._done_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="pdserve-rdma", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise HandoffFailed(f"RDMA with {peer_name}: {error}") from error

    def add(self, ranges: Ranges) -> None:
        """Queue ranges to be moved."""
        with self._changed:
            for start in range(0, len(ranges), MAX_BATCH_RANGES):
                part = ranges[start : start + MAX_BATCH_RANGES]
                self._queue.put(QueuedPart(part, len(part), int(part[:, 2].sum())))
            self._changed.notify()

    def tell_after(self, item: Item) -> None:
        """Call `on_ready` with `item` when all ranges queued before it are moved."""
        with self._changed:
            is_told_now = self._queue.tell_after(item)
            self._changed.notify()
        if is_told_now:
            self._on_ready(self, item)

    def stop(self) -> None:
        """Drop what is queued; batches in flight continue. Returns at once."""
        with self._changed:
            self._queue.stop()
            self._changed.notify()

    def end(self) -> None:
        """Accept no more ranges, and end when the queued ones are moved. Returns at once."""
        with self._changed:
            self._queue.end()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- its thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        under_way: deque[_Submitted] = deque()
        try:
            self._move_all(under_way)
        except HandoffFailed as error:
            self._give_up(error)
        except Exception as bug:
            logger.exception("RDMA with %s failed", self._peer_name)
            self._give_up(HandoffFailed(f"RDMA with {self._peer_name} failed: {bug}"))
        for submitted in under_way:
            self._is_moved(submitted)  # This frees it.

    def _give_up(self, error: HandoffFailed) -> None:
        with self._changed:
            was_stopped = self._queue.is_stopped
        self.stop()
        if not was_stopped:
            self._on_ready(self, error)

    def _move_all(self, under_way: deque[_Submitted]) -> None:
        """Work until it is stopped. Raises `HandoffFailed` when a batch fails."""
        if not self._engine.can_reach(self._peer_name):
            raise HandoffFailed(f"{self._peer_name} is unreachable")
        while self._wait_for_work():
            self._fill(under_way)
            if not under_way:
                continue  # It was stopped meanwhile.
            self._sleep_for(under_way[0])
            self._fill(under_way)
            first = under_way.popleft()
            if not self._is_moved(first):
                what = f"{self._way} {self._peer_name}, of {first.num_bytes} bytes,"
                raise HandoffFailed(f"{what} failed")
            with self._changed:
                items = self._queue.moved()
            self._fill(under_way)
            self._tell(items)  # While the next ones are on the wire.

    def _wait_for_work(self) -> bool:
        """Wait until a batch is under way or can be begun; return False when none will be."""
        with self._changed:
            while self._queue.first is None and self._queue.is_empty:
                if self._queue.is_over:
                    return False
                self._changed.wait()
            return True

    def _fill(self, under_way: deque[_Submitted]) -> None:
        """Begin as many batches as may be in flight."""
        while True:
            with self._changed:
                batch = self._queue.next_batch()
            if batch is None:
                return
            under_way.append(self._submit(batch))

    def _submit(self, batch: Batch[Ranges, Item]) -> _Submitted:
        number, at_s = 0, 0.0
        if batch.parts:
            at_s = time.monotonic()
            number = self._begin(self._peer_name, np.concatenate(batch.parts))
            if not number:
                raise HandoffFailed(f"{self._way} {self._peer_name} could not be started")
        return _Submitted(number, batch.num_bytes, at_s)

    def _tell(self, items: Sequence[Item]) -> None:
        for item in items:
            with self._changed:
                if self._queue.is_stopped:
                    break
            self._on_ready(self, item)
        with self._changed:
            self._queue.told()

    def _sleep_for(self, batch: _Submitted) -> None:
        """Sleep a part of the time that the batch will probably take.

        It is estimated with the higher speed of the last two batches.
        """
        if batch.id:
            span_s = batch.num_bytes * min(self._s_per_byte, default=0.0)
            sleep_s = self._began_at_s(batch) + SLEPT_SHARE * span_s - time.monotonic()
            time.sleep(min(max(0.0, sleep_s), MAX_SLEEP_S))

    def _is_moved(self, batch: _Submitted) -> bool:
        if not batch.id:
            return True
        is_moved = self._engine.wait(batch.id)
        now_s = time.monotonic()
        if self._done_at_s is not None:  # The first one also makes the connection.
            self._s_per_byte.append((now_s - self._began_at_s(batch)) / batch.num_bytes)
        self._done_at_s = now_s
        return is_moved

    def _began_at_s(self, batch: _Submitted) -> float:
        """Return when the batch had the wire for itself: after the end of the one before."""
        return max(batch.at_s, self._done_at_s or 0.0)
