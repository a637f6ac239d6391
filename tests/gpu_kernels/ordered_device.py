"""A device that knows what events order: two streams may touch the same bytes only in an order.

Work runs when it is queued. Each stream has a clock, and so has the host: an event takes the clock
of the stream that it is recorded on, and gives it to the stream or the host that waits for it; the
host's clock is that of all that it queues. What a launch has really touched, and what is copied or
filled, is compared with what touched the same bytes before, by cells of 16 bytes. If nothing orders
the two, no run has to show it: the card may do them at once.

All threads of the host count as one. What the host stores into pinned memory and takes from it is
compared too, but not what it does with a ring, which is pinned where it lies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

import numpy as np

from engine.runner.gpu.cuda_driver import Memory
from engine.runner.gpu.launcher import KernelSpec
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


class _PinnedArray(np.ndarray):
    """The host's view of pinned memory: what the host stores there and takes from it is noted."""

    owner: OrderedDevice | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.owner = getattr(other, "owner", None)

    def _note(self, array: np.ndarray, *, is_read: bool) -> None:
        if self.owner is not None and array.size:
            first, end = np.lib.array_utils.byte_bounds(array)
            ranges = [(first, end - first)]
            self.owner.note("an access", HOST, *((ranges, []) if is_read else ([], ranges)))

    def __setitem__(self, key: Any, value: Any) -> None:
        target = super().__getitem__(key)
        self._note(target if isinstance(target, np.ndarray) else self, is_read=False)
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, int):
            self._note(super().__getitem__(slice(key, key + 1)), is_read=True)
        return found

    def copy(self, order: Any = "C") -> Any:
        self._note(self, is_read=True)
        return np.array(self.view(np.ndarray), order=order)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        for one in inputs:
            if isinstance(one, _PinnedArray):
                one._note(one, is_read=True)
        plain = [one.view(np.ndarray) if isinstance(one, _PinnedArray) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **named)


class _PinnedMemory(Memory):
    """Pinned memory whose view of the host is watched."""

    def __init__(self, device: OrderedDevice, plain: Memory) -> None:
        super().__init__(plain.address, plain.num_bytes, plain.close, plain.host)
        self._watching = device

    def host_bytes(self) -> np.ndarray:
        found = super().host_bytes().view(_PinnedArray)
        found.owner = self._watching
        return found


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

    def allocate_pinned(self, num_bytes: int) -> Memory:
        return _PinnedMemory(self, super().allocate_pinned(num_bytes))

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
