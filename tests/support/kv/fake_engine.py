"""A transfer engine in memory: what `MooncakeEngine` does to one process's own memory.

Registered memory has a key; a write is copied when it is waited for, unless the test holds it back,
and fails when a byte of it lies outside what is registered then, at either end.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

from kv_transfer.lanes.rdma.slabs import Ranges


class FakeEngine:
    """A fake of `MooncakeEngine`.

    `fails_after` more registrations succeed; None: all. `is_reachable` is the result of a probe.
    While `is_held`, a submitted batch completes only when `let_go` is released.
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
        self._ids = itertools.count(1)
        self._under_way: dict[int, Ranges] = {}
        self._held: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def register(self, address: int, num_bytes: int) -> None:
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
        del self.regions[address]

    def can_reach(self, peer_name: str) -> bool:
        return self.is_reachable

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        if not self.can_begin:
            return 0
        with self._lock:
            batch = next(self._ids)
            self._under_way[batch] = ranges
            if self.is_held:
                self._held.add(batch)
            self.batches.append(ranges)
            self.most_under_way = max(self.most_under_way, len(self._under_way))
        return batch

    def wait(self, batch: int) -> bool:
        if batch in self._held:
            assert self.let_go.acquire(timeout=20)
        with self._lock:
            ranges = self._under_way.pop(batch)  # Asked twice: a KeyError.
        for here, there, num_bytes in ranges.tolist():
            if not (self._is_registered(here, num_bytes) and self._is_registered(there, num_bytes)):
                return False
            ctypes.memmove(there, here, num_bytes)
        return True

    def _is_registered(self, address: int, num_bytes: int) -> bool:
        return any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.regions.items()
        )
