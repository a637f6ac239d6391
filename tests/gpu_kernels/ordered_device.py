"""A device that knows what events order: two streams may touch the same bytes only in an order.

Work runs when it is queued. Each stream has a clock, and so has the host: an event takes the clock
of the stream that it is recorded on, and gives it to the stream or the host that waits for it; the
host's clock is that of all that it queues. What a launch has really touched, and what is copied or
filled, is compared with what touched the same bytes before, by cells of 16 bytes. If nothing orders
the two, no run has to show it: the card may do them at once.

All threads of the host count as one. Of the host's own accesses those are known that this package
makes of pinned memory (`watch_the_host`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.cache.card_pool import GpuCardPool
from engine.runner.gpu.cache.pinned import PinnedBuffers
from engine.runner.gpu.drawing.card_draw import CardDraw
from engine.runner.gpu.drawing.card_logprobs import CardLogprobs
from engine.runner.gpu.drawing.left_rows import LeftRows
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.steps.decode_step import DecodeSteps
from engine.runner.gpu.steps.staging import Staging
from tests.gpu_kernels.checked_launch import MemoryFault, Touched
from tests.gpu_kernels.known_memory import Range, known

HOST = -1
_CELL_BYTES = 16

Clock = dict[int, int]
Ranges = Iterable[tuple[int, int]]
"""Addresses and numbers of bytes."""


class _Work(NamedTuple):
    """What was done at a time of a stream's clock."""

    name: str
    stream: int
    time: int

    def __str__(self) -> str:
        return f"{self.name} on " + ("the host" if self.stream == HOST else f"stream {self.stream}")


@dataclass(slots=True)
class _Cells:
    """Who wrote each cell of an allocation last, and who of each stream has read it since."""

    memory: Range
    writers: np.ndarray
    readers: dict[int, np.ndarray] = field(default_factory=dict)


class OrderedEvent:
    """The clock of a stream when it was recorded."""

    def __init__(self, device: OrderedDevice) -> None:
        self._device = device
        self._clock: Clock = {}

    def record(self, stream: int) -> None:
        self._clock = self._device.clock_of(stream)

    def delay(self, stream: int) -> None:
        self._device.join(stream, self._clock)

    def wait(self) -> None:
        self._device.join(HOST, self._clock)

    def is_reached(self) -> bool:
        self.wait()
        return True

    def close(self) -> None:
        pass


class OrderedDevice(InterpretedDevice):
    """Raises `MemoryFault` for accesses of the same bytes that nothing orders."""

    num_queued, num_done = 1, 0
    """There may always be something left to do."""

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._works: list[_Work] = []
        self._cells: dict[int, _Cells] = {}
        self._num_streams = 1
        self.faults: list[str] = []

    # --- clocks ---------------------------------------------------------------------------------

    def clock_of(self, stream: int) -> Clock:
        """Return what has ended when all has that is queued on a stream, or waited for."""
        with self._lock:
            return dict(self._clocks.get(stream, {}))

    def join(self, stream: int, clock: Clock) -> None:
        """Let the stream's later work, or the host's, be behind this."""
        with self._lock:
            own = self._clocks.setdefault(stream, {})
            for other, time in clock.items():
                own[other] = max(own.get(other, 0), time)

    def note(self, name: str, stream: int, loads: Ranges, stores: Ranges) -> None:
        """Compare work that is queued now with all that touched the same bytes before."""
        self.note_cells(name, stream, self._cells_of(loads), self._cells_of(stores))

    def note_cells(
        self, name: str, stream: int, loads: dict[int, np.ndarray], stores: dict[int, np.ndarray]
    ) -> None:
        """Do so for cells of allocations, by the addresses of these."""
        with self._lock:
            self.join(stream, self._clocks[HOST])
            clock = self._clocks[stream]
            clock[stream] = clock.get(stream, 0) + 1
            number = len(self._works)
            self._works.append(_Work(name, stream, clock[stream]))
            for start, cells in loads.items():
                self._check("reads", number, clock, self._cells[start].writers[cells])
            for start, cells in stores.items():
                own = self._cells[start]
                self._check("writes", number, clock, own.writers[cells])
                for readers in own.readers.values():
                    self._check("writes", number, clock, readers[cells])
            for start, cells in loads.items():
                own = self._cells[start]
                if stream not in own.readers:
                    own.readers[stream] = np.full(len(own.writers), -1)
                own.readers[stream][cells] = number
            for start, cells in stores.items():
                self._cells[start].writers[cells] = number

    def _check(self, what: str, number: int, clock: Clock, before: np.ndarray) -> None:
        for other in np.unique(before[before >= 0]).tolist():
            work = self._works[other]
            if work.time > clock.get(work.stream, 0):
                fault = f"{self._works[number]} {what} bytes of {work}, and nothing orders them"
                self.faults.append(fault)
                raise MemoryFault(fault)

    def _cells_of(self, ranges: Ranges) -> dict[int, np.ndarray]:
        """Return the cells of these ranges of bytes, by the address of their allocation."""
        found: dict[int, list[np.ndarray]] = {}
        for address, num_bytes in ranges:
            start = self._start_of(address)
            if start is not None and num_bytes:
                first, last = address - start, address - start + num_bytes - 1
                cells = np.arange(first // _CELL_BYTES, last // _CELL_BYTES + 1)
                found.setdefault(start, []).append(cells)
        return {start: np.unique(np.concatenate(cells)) for start, cells in found.items()}

    def cells_at(self, accesses: Sequence[tuple[np.ndarray, int]]) -> dict[int, np.ndarray]:
        """Return the cells of arrays of addresses, each array in one allocation."""
        marks: dict[int, np.ndarray] = {}
        for addresses, _ in accesses:
            start = self._start_of(int(addresses[0]))
            if start is None:
                continue
            if start not in marks:
                marks[start] = np.zeros(len(self._cells[start].writers), np.bool_)
            marks[start][(addresses - np.uint64(start)) // np.uint64(_CELL_BYTES)] = True
        return {start: np.flatnonzero(marked) for start, marked in marks.items()}

    def _start_of(self, address: int) -> int | None:
        """Return where the allocation around an address begins."""
        memory = known.whole_at(address)
        if memory is None:
            return None
        with self._lock:
            cells = self._cells.get(memory.start)
            if cells is None or cells.memory is not memory:  # it is new
                count = -(-(memory.end - memory.start) // _CELL_BYTES)
                self._cells[memory.start] = _Cells(memory, np.full(count, -1))
        return memory.start

    # --- as a device ----------------------------------------------------------------------------

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self.note("a copy", stream, [(source, num_bytes)], [(to, num_bytes)])
        super().copy(to, source, num_bytes, stream)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self.note("a fill", stream, [], [(address, num_bytes)])
        super().fill(address, value, num_bytes, stream)

    def upload(self, to: int, data: bytes) -> None:
        self.note("an upload", HOST, [], [(to, len(data))])
        super().upload(to, data)

    def upload_array(self, to: int, values: np.ndarray) -> None:
        self.note("an upload", HOST, [], [(to, values.nbytes)])
        super().upload_array(to, values)

    def download(self, source: int, num_bytes: int) -> bytearray:
        self.note("a download", HOST, [(source, num_bytes)], [])
        return super().download(source, num_bytes)

    def stream(self, *, is_urgent: bool = False) -> int:
        self._num_streams += 1
        return self._num_streams

    def event(self) -> Any:
        return OrderedEvent(self)

    def synchronize(self, stream: int) -> None:
        self.join(HOST, self.clock_of(stream))

    def synchronize_all(self) -> None:
        for stream in list(self._clocks):
            self.synchronize(stream)


class OrderedKernel(InterpretedKernel):
    """A kernel whose launches tell the device what they have touched."""

    def __init__(self, device: OrderedDevice, spec: KernelSpec) -> None:
        super().__init__(spec)
        self._device = device

    def _run(
        self, stream: int, grid: tuple[int, ...], addresses: dict[str, int], given: dict[str, Any],
        touched: Touched | None = None,
    ) -> None:  # fmt: skip
        found = touched or Touched([], [])
        super()._run(stream, grid, addresses, given, found)
        device = self._device
        loads, stores = device.cells_at(found.loads), device.cells_at(found.stores)
        device.note_cells(self._spec.function.__name__, stream, loads, stores)


class OrderedCard(InterpretedCard):
    """A card on an `OrderedDevice`."""

    def kernel(self, spec: KernelSpec) -> Any:
        super().kernel(spec)  # notes those that were not compiled
        device: Any = self.device
        return OrderedKernel(device, spec)


def watch_the_host(patch: pytest.MonkeyPatch) -> None:
    """Let the host's accesses of pinned memory be noted, where its device is an ordered one."""

    def after(owner: type, name: str, touched: Callable[..., Ranges], *, is_read: bool) -> None:
        plain = getattr(owner, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            result = plain(self, *given, **named)
            if isinstance(self._device, OrderedDevice):
                ranges = list(touched(self, result, *given))
                parts = (ranges, []) if is_read else ([], ranges)
                self._device.note(f"{owner.__name__}.{name}", HOST, *parts)
            return result

        patch.setattr(owner, name, call)

    def put(staging: Any, _: Any, name: str, first: int, end: int) -> Ranges:
        stride = staging._side.arrays[name].strides[0]
        start = staging._side.pinned.address + staging._offsets[name]
        return [(start + stride * first, stride * (end - first))]

    def record(of: Any, _: Any, row: int, num_top: int) -> Ranges:
        return [(of._pinned.address + of._read.strides[0] * row, of._read.strides[0])]

    def buffer(_: Any, taken: Any, *given: Any) -> Ranges:
        memory = (taken or given[0]).memory
        return [(memory.address, memory.num_bytes)]

    after(Staging, "_include", put, is_read=False)
    after(DecodeSteps, "tokens", lambda own, found: [(own._pinned.address, found.nbytes)],
          is_read=True)  # fmt: skip
    after(CardDraw, "_read_tokens", lambda own, found, _: [(own._read.address, found.nbytes)],
          is_read=True)  # fmt: skip
    after(LeftRows, "logits", lambda own, found, _: [(own._pinned.address, found.nbytes)],
          is_read=True)  # fmt: skip
    after(CardLogprobs, "of_row", record, is_read=True)
    # Who takes a buffer writes it, and who gives it back has read it.
    after(PinnedBuffers, "take", buffer, is_read=False)
    after(PinnedBuffers, "give_back", buffer, is_read=False)
    _watch_the_ring(patch)


def _watch_the_ring(patch: pytest.MonkeyPatch) -> None:
    """Note that the slots of a ring are the host's before blocks come in, and after any copy."""

    def use(pool: Any, slots: np.ndarray) -> None:
        ring = pool._ring
        if isinstance(pool._device, OrderedDevice) and pool._pinned_ring is not None:
            pieces = [
                (pool._pinned_ring.address + kind * ring.strides[0] + int(slot) * ring.strides[1],
                 ring.strides[1])
                for kind in range(2) for slot in slots
            ]  # fmt: skip
            pool._device.note("the ring's reader or writer", HOST, [], pieces)

    class Waited:
        def __init__(self, moved: Any, pool: Any, slots: np.ndarray) -> None:
            self._moved, self._pool, self._slots = moved, pool, slots

        def wait(self) -> None:
            self._moved.wait()
            use(self._pool, self._slots)

    begin_out, begin_in = GpuCardPool.begin_out, GpuCardPool.begin_in

    def out(self: Any, layer: int, blocks: np.ndarray, slots: np.ndarray) -> Any:
        return Waited(begin_out(self, layer, blocks, slots), self, slots)

    def into(self: Any, layer: int, slots: np.ndarray, blocks: np.ndarray) -> Any:
        use(self, slots)
        return Waited(begin_in(self, layer, slots, blocks), self, slots)

    patch.setattr(GpuCardPool, "begin_out", out)
    patch.setattr(GpuCardPool, "begin_in", into)
