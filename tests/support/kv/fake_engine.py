"""A transfer engine in memory: what `MooncakeEngine` does to one process's own memory.

Registered memory has a key. What is written or read is copied when it is waited for, unless the
test holds it back, and fails when a byte of it lies outside what is registered then, at either end.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass

from kv_transfer.lanes.rdma.slabs import Ranges


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    ranges: Ranges
    is_read: bool


class FakeEngine:
    """A fake of `MooncakeEngine`. Any thread may use it.

    `fails_after` more registrations succeed; None: all. `is_reachable` is the result of a probe.
    While `is_held`, a submitted batch completes only when `let_go` is released. The next
    `num_to_lose` batches fail when they are waited for and stay under way: see `land_late`.
    """

    def __init__(self, name: str = "here:1") -> None:
        self.name = name
        self.regions: dict[int, int] = {}
        self.fails_after: int | None = None
        self.is_reachable = True
        self.can_begin = True
        self.batches: list[Ranges] = []
        self.let_go = threading.Semaphore(0)
        self.is_held = False
        self.most_under_way = 0
        self.num_to_lose = 0
        self._lost: list[_Batch] = []
        self._ids = itertools.count(1)
        self._under_way: dict[int, _Batch] = {}
        self._held: set[int] = set()
        self._lock = threading.RLock()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_lost(self) -> int:
        """The batches that may land late."""
        return len(self._lost)

    def register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            overlapping = [
                start
                for start, length in self.regions.items()
                if start < address + num_bytes and address < start + length
            ]
            if overlapping or self.fails_after == 0:
                raise OSError("cannot be registered")
            if self.fails_after is not None:
                self.fails_after -= 1
            self.regions[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.regions[address]

    def can_reach(self, peer_name: str) -> bool:
        return self.is_reachable

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        return self._submit(_Batch(ranges, is_read=False))

    def submit_read(self, peer_name: str, ranges: Ranges) -> int:
        return self._submit(_Batch(ranges, is_read=True))

    def _submit(self, batch: _Batch) -> int:
        if not self.can_begin:
            return 0
        with self._lock:
            number = next(self._ids)
            self._under_way[number] = batch
            if self.is_held:
                self._held.add(number)
            self.batches.append(batch.ranges)
            self.most_under_way = max(self.most_under_way, len(self._under_way))
        return number

    def wait(self, batch: int) -> bool:
        if batch in self._held:
            assert self.let_go.acquire(timeout=20)
        with self._lock:
            ended = self._under_way.pop(batch)  # Asked twice: a KeyError.
            if self.num_to_lose:
                self.num_to_lose -= 1
                self._lost.append(ended)
                return False
            return all(self._move(*one, is_read=ended.is_read) for one in ended.ranges.tolist())

    def land_late(self) -> int:
        """Let what was lost land, where there is a key for it; return the ranges that did."""
        with self._lock:
            lost, self._lost = self._lost, []
            landed = [
                self._move(*one, is_read=batch.is_read)
                for batch in lost
                for one in batch.ranges.tolist()
            ]
        return sum(landed)

    def _move(self, here: int, there: int, num_bytes: int, *, is_read: bool) -> bool:
        if not (self._is_registered(here, num_bytes) and self._is_registered(there, num_bytes)):
            return False
        ctypes.memmove(*((here, there) if is_read else (there, here)), num_bytes)
        return True

    def _is_registered(self, address: int, num_bytes: int) -> bool:
        return any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.regions.items()
        )
