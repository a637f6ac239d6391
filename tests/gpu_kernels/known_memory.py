"""Memory that kernels may touch in the interpreter: what was allocated, and the tensors in it.

A card's memory is taken in large pieces: a step's buffers are one allocation, and so is all that is
sent to it. To read a neighbour's bytes is as wrong as to read those of nobody, so the parts have
names here. Memory that was not taken from a played device is unknown, and nothing is said of it.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory

_GIVEN_BACK = "memory that was given back"


class Range(NamedTuple):
    """Bytes from `start` up to `end`."""

    start: int
    end: int
    name: str


class KnownMemory:
    """Allocations that do not overlap, each with the parts that it was divided into."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._whole: dict[int, Range] = {}
        self._parts: dict[int, list[Range]] = {}
        self._lock = threading.Lock()
        self._gone: deque[Sequence[tuple[int, int]]] = deque()

    def add(self, address: int, num_bytes: int, name: str = "memory") -> None:
        """Memory is there; what lay in its place before is gone."""
        with self._lock:
            self._forget_what_is_gone()
            self._remove(address, num_bytes)
            bisect.insort(self._starts, address)
            self._whole[address] = Range(address, address + num_bytes, name)
            self._parts[address] = []

    def give_back(self, address: int, num_bytes: int) -> None:
        """Nobody may touch this memory any more."""
        self.add(address, num_bytes, _GIVEN_BACK)

    def remove(self, address: int, num_bytes: int) -> None:
        """What lies there is unknown from now on."""
        with self._lock:
            self._remove(address, num_bytes)

    def forget(self, taken: Sequence[tuple[int, int]]) -> None:
        """A device is gone with this memory. Garbage collection calls it, at any time."""
        self._gone.append(taken)

    def _forget_what_is_gone(self) -> None:
        while self._gone:
            for address, num_bytes in self._gone.popleft():
                self._remove(address, num_bytes)

    def _remove(self, address: int, num_bytes: int) -> None:
        place = max(bisect.bisect_right(self._starts, address) - 1, 0)
        end = address + max(num_bytes, 1)
        while place < len(self._starts) and self._starts[place] < end:
            start = self._starts[place]
            if start == address or self._whole[start].end > address:
                del self._starts[place], self._whole[start], self._parts[start]
            else:
                place += 1

    def divide(self, parts: Mapping[str, tuple[int, int]]) -> None:
        """Name parts of an allocation: the address and the bytes of each."""
        with self._lock:
            for name, (address, num_bytes) in parts.items():
                whole = self._around(address)
                if whole is not None:
                    part = Range(address, address + num_bytes, name)
                    self._parts[whole.start].append(part)

    def _around(self, address: int) -> Range | None:
        place = bisect.bisect_right(self._starts, address)
        if not place:
            return None
        found = self._whole[self._starts[place - 1]]
        return found if address < found.end or address == found.start else None

    def at(self, address: int) -> Range | None:
        """Return the part around an address, or the allocation; None: it is unknown."""
        with self._lock:
            self._forget_what_is_gone()
            whole = self._around(address)
            if whole is None:
                return None
            if whole.name == _GIVEN_BACK:
                return whole._replace(end=whole.start)
            for part in self._parts[whole.start]:
                if part.start <= address < part.end:
                    return part
            return whole

    def whole_at(self, address: int) -> Range | None:
        """Return the allocation around an address; None: it is unknown."""
        with self._lock:
            self._forget_what_is_gone()
            return self._around(address)

    def require(self, address: int, num_bytes: int, what: str) -> None:
        """Raise `AssertionError` unless bytes lie in the allocation around the first one."""
        whole = self.whole_at(address)
        if whole is not None and num_bytes:
            is_inside = address + num_bytes <= whole.end and whole.name != _GIVEN_BACK
            assert is_inside, f"{what}: {num_bytes} bytes at {address - whole.start} of {whole}"

    def parts(self, names: frozenset[str]) -> list[Range]:
        """Return all parts that have one of these names, or are such a part `of` something."""
        with self._lock:
            self._forget_what_is_gone()
            return [
                part
                for found in self._parts.values()
                for part in found
                if part.name.partition(" of ")[0] in names
            ]


known = KnownMemory()


def _name_the_parts() -> None:
    """Let buffers of steps and what is sent tell their parts from now on."""
    plain_step, plain_staging = StepMemory.__init__, Staging.__init__

    def of_step(self: Any, device: Any, sizes: Mapping[str, int]) -> None:
        plain_step(self, device, sizes)
        known.divide({name: (self[name], size) for name, size in sizes.items()})

    def of_staging(self: Any, device: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        plain_staging(self, device, shapes)
        side = self._sides[0].arrays
        known.divide({name: (self[name], side[name].nbytes) for name in shapes})

    StepMemory.__init__ = of_step  # type: ignore[method-assign]
    Staging.__init__ = of_staging  # type: ignore[method-assign]


_name_the_parts()
