"""A card to measure on, and its stand-in that only records which kernels are needed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from engine.runner.gpu.cuda_driver import Device, DeviceProperties, Memory, load_driver
from engine.runner.gpu.launcher import Kernel, KernelSpec

Bound = Callable[[int], None]

SHARED_BYTES = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
    120: 99 << 10,
}  # fmt: skip
"""Shared memory that a program may have, by compute capability."""


def _key(spec: KernelSpec) -> str:
    """Return what tells a kernel's configuration from every other."""
    return repr(
        (spec.function.__name__, dict(spec.types), dict(spec.constants), spec.num_warps,
         spec.num_stages, spec.is_programmatic, dict(spec.options))
    )  # fmt: skip


class Card:
    """One card with one stream."""

    is_real = True

    def __init__(self) -> None:
        self.device = Device(load_driver(), 0)
        self.stream = self.device.stream()
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, spec: KernelSpec) -> Kernel:
        """Return the kernel; equal ones are loaded once."""
        key = _key(spec)
        if key not in self._kernels:
            self._kernels[key] = Kernel(self.device, spec)
        return self._kernels[key]

    def milliseconds(self, work: Callable[[], None], repeats: int = 5, rounds: int = 3) -> float:
        """Return the median time of one call of `work`, which launches on the stream."""
        work()
        found = []
        for _ in range(rounds):
            first, last = self.device.event(timed=True), self.device.event(timed=True)
            first.record(self.stream)
            for _ in range(repeats):
                work()
            last.record(self.stream)
            last.wait()
            found.append(last.milliseconds_since(first) / repeats)
        return statistics.median(found)

    def graph_milliseconds(
        self, launches: Sequence[Bound], repeats: int = 5, rounds: int = 3
    ) -> float:
        """Return the median time of all launches, recorded as one graph."""

        def launch() -> None:
            for one in launches:
                one(self.stream)

        graph = self.device.capture(self.stream, launch)
        try:
            return self.milliseconds(lambda: graph.launch(self.stream), repeats, rounds)
        finally:
            self.device.synchronize(self.stream)
            graph.close()

    def floats(self, address: int, count: int) -> np.ndarray:
        """Return bfloat16 values as float32, after all work ended."""
        self.device.synchronize(self.stream)
        bits = np.frombuffer(self.device.download(address, 2 * count), np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)


class SpecRecorder:
    """Takes the place of a card while a stage is planned: nothing is allocated or launched."""

    is_real = False
    stream = 0

    def __init__(self, capability: int = 90) -> None:
        self.device: Any = NoDevice(capability)
        self._keys: set[str] = set()
        self.specs: list[KernelSpec] = []

    def kernel(self, spec: KernelSpec) -> Any:
        key = _key(spec)
        if key not in self._keys:
            self._keys.add(key)
            self.specs.append(spec)
        return self

    def bind(self, *_: Any) -> Bound:
        return lambda stream: None


class _NoEvent:
    def close(self) -> None:
        pass


class NoDevice:
    def __init__(self, capability: int) -> None:
        self._pinned: list[np.ndarray] = []
        self.properties = DeviceProperties(
            "none", capability, 132, SHARED_BYTES.get(capability, 99 << 10), 80 << 30
        )

    def allocate(self, num_bytes: int) -> Memory:
        return Memory(0, num_bytes, lambda: None)

    def allocate_pinned(self, num_bytes: int) -> Memory:
        array = np.zeros(num_bytes, np.uint8)
        self._pinned.append(array)
        return Memory(0, num_bytes, lambda: None, array.ctypes.data)

    def event(self) -> Any:
        return _NoEvent()

    def room_for(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, to: int, data: bytes) -> None:
        pass

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        pass

    def synchronize(self, stream: int) -> None:
        pass

    def synchronize_all(self) -> None:
        pass

    def download(self, source: int, num_bytes: int) -> bytearray:
        return bytearray(num_bytes)
