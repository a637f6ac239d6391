"""A device that answers late: what is queued runs when something waits for it, and no earlier.

Each stream has a queue, and nothing but events orders two of them, as with the driver's streams
that do not block: no other ones are made, so neither does the default stream, 0. By default only
what a waiting thread needs runs, which is the latest that a card may be: work of another stream
that should have been waited for has not run. With a seed, work that may run does so at any time.

The host runs ahead as it does of a card. So memory that the host writes or reads too early has
other bytes than on `InterpretedDevice`, whose work is done when it is queued. Memory that is given
back while work that has its address is queued is a fault, and so is work that is queued afterwards.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

from engine.runner.gpu.cuda_driver import GpuError, Memory
from engine.runner.gpu.launcher import KernelSpec

_LIMIT_S = 60.0
"""Only guards against waiting forever."""


@dataclass(eq=False, slots=True)
class Work:
    """A part of a stream's work, which begins when `after` has ended too."""

    stream: int
    run: Callable[[], None] | None
    addresses: tuple[int, ...] = ()
    after: Work | None = None
    is_done: bool = False
    num_looks: int = 0


class LateEvent:
    """The latest point of a stream that was recorded; none is reached at once."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._place: Work | None = None
        self._is_closed = False

    def _given(self) -> Work | None:
        if self._is_closed:
            raise GpuError("an event that was closed: invalid resource handle (400)")
        return self._place

    def record(self, stream: int) -> None:
        self._given()
        self._place = self._device.queue(None, stream)

    def delay(self, stream: int) -> None:
        place = self._given()
        if place is not None:
            self._device.queue(None, stream, after=place)

    def wait(self) -> None:
        place = self._given()
        if place is not None:
            self._device.finish(place)

    def is_reached(self) -> bool:
        place = self._given()
        return place is None or self._device.look(place)

    def close(self) -> None:
        self._given()
        self._is_closed = True


class LateGraph:
    """Work of a stream that is queued whenever the graph is launched."""

    def __init__(self, device: LateDevice, works: list[Work]) -> None:
        self._device, self._works = device, works
        self._is_closed = False

    def launch(self, stream: int) -> None:
        if self._is_closed:
            raise GpuError("cuGraphLaunch: invalid resource handle (400)")
        for work in self._works:
            self._device.queue(work.run, stream, work.addresses)
        self._device.on_graph()

    def close(self) -> None:
        """What was launched runs all the same."""
        self._is_closed = True


class LateDevice(InterpretedDevice):
    """A queue for each stream. With a seed, work that may run does so at any time."""

    def __init__(self, ordinal: int = 0, seed: int | None = None) -> None:
        super().__init__(ordinal)
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Work]] = {}
        self._last: dict[int, Work] = {}
        self._captured: tuple[int, list[Work]] | None = None
        self._random = None if seed is None else random.Random(seed)
        self._num_streams = 1
        self.num_queued = self.num_done = self.num_graphs = 0
        self._is_held = False
        self._error: BaseException | None = None
        self._given_back: list[tuple[int, int]] = []
        self.faults: list[str] = []
        """Memory that was given back, or used, at the wrong time."""
        self.call.on_mapped, self.call.on_unmapped = self.on_given, self.on_given_back

    # --- what is queued -------------------------------------------------------------------------

    def queue(
        self, run: Callable[[], None] | None, stream: int, addresses: tuple[int, ...] = (),
        after: Work | None = None,
    ) -> Work:  # fmt: skip
        """Run this behind all that is queued on the stream, with these addresses."""
        work = Work(stream, run, addresses, after)
        with self._changed:
            if self._captured is not None:
                captured, works = self._captured
                assert stream == captured, "another stream's work in a capture"
                works.append(work)
                return work
            for first, end in self._given_back:
                if any(first <= address < end for address in addresses):
                    self._fail("work is queued with memory that was given back")
            self._queues.setdefault(stream, deque()).append(work)
            self._last[stream] = work
            self.num_queued += 1
            self._changed.notify_all()
            self._wander()
        return work

    def on_graph(self) -> None:
        """Count a graph that was launched."""
        with self._changed:
            self.num_graphs += 1
            self._changed.notify_all()

    def on_given(self, address: int, num_bytes: int) -> None:
        """Memory is there, maybe where other memory was."""
        end = address + num_bytes
        with self._changed:
            self._given_back = [
                one for one in self._given_back if one[1] <= address or end <= one[0]
            ]

    def on_given_back(self, address: int, num_bytes: int) -> None:
        """Memory is no longer there: no work that is queued may have its addresses."""
        end = address + num_bytes
        with self._changed:
            pending = (work for works in self._queues.values() for work in works)
            if any(address <= one < end for work in pending for one in work.addresses):
                self._fail("memory is given back while work with it is queued")
            self._given_back.append((address, end))

    def _fail(self, fault: str) -> None:
        self.faults.append(fault)
        raise AssertionError(fault)

    # --- what runs ------------------------------------------------------------------------------

    def finish(self, work: Work) -> None:
        """Wait until this is done; raise what a part of the device's work has raised."""
        with self._changed:
            assert self._captured is None, "a wait in a capture"
            self._run_to(work)
            if self._error is not None:
                raise self._error

    def look(self, work: Work) -> bool:
        """Return whether this is done. It is late, but who looks again does not look for ever."""
        with self._changed:
            if work.is_done or self._is_held:
                return work.is_done
            work.num_looks += 1
            if work.num_looks > 1:
                self.finish(work)
            self._wander()
            return work.is_done

    def _run_to(self, work: Work) -> None:
        works = self._queues.get(work.stream)
        while works and not work.is_done:
            assert self._changed.wait_for(lambda: not self._is_held, _LIMIT_S), "still held"
            after = works[0].after
            if after is not None:
                self._run_to(after)
            if works and not work.is_done:
                self._run_first(works)

    def _run_first(self, works: deque[Work]) -> None:
        work = works[0]
        try:
            if work.run is not None:
                work.run()
        except BaseException as error:
            self._error = error
        works.popleft()
        work.is_done = True
        self.num_done += 1
        self._changed.notify_all()

    def _wander(self) -> None:
        """Run what may run, as the seed has it."""
        if self._random is None:
            return
        while not self._is_held and self._random.random() < 0.5:
            may_run = [
                works for works in self._queues.values()
                if works and (works[0].after is None or works[0].after.is_done)
            ]  # fmt: skip
            if not may_run:
                return
            self._run_first(self._random.choice(may_run))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin nothing that is queued, meanwhile."""
        with self._changed:
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def wait_for_graphs(self, count: int) -> None:
        """Wait until so many graphs were launched."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_graphs >= count, _LIMIT_S), "none came"

    # --- as a device ----------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Memory:
        return self._watched(super().allocate(num_bytes))

    def register(self, address: int, num_bytes: int) -> Memory:
        return self._watched(super().register(address, num_bytes))

    def _watched(self, memory: Memory) -> Memory:
        found = memory.address, memory.num_bytes
        self.on_given(*found)
        return Memory(*found, partial(self.on_given_back, *found), memory.host)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        run = partial(super().copy, to, source, num_bytes, stream)
        self.queue(run, stream, (to, source))

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self.queue(partial(super().fill, address, value, num_bytes, stream), stream, (address,))

    def stream(self, *, is_urgent: bool = False) -> int:
        self._num_streams += 1
        return self._num_streams

    def event(self) -> Any:
        return LateEvent(self)

    def capture(self, stream: int, work: Callable[[], None]) -> Any:
        works: list[Work] = []
        with self._changed:
            self._captured = stream, works
            try:
                work()
            finally:
                self._captured = None
        return LateGraph(self, works)

    def synchronize(self, stream: int) -> None:
        last = self._last.get(stream)
        if last is not None:
            self.finish(last)

    def synchronize_all(self) -> None:
        for last in list(self._last.values()):
            self.finish(last)


class LateKernel:
    """A kernel that is interpreted when the device has come to it."""

    def __init__(self, device: LateDevice, spec: KernelSpec) -> None:
        self._device, self._kernel = device, InterpretedKernel(spec)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[int], None]:
        run = self._kernel.bind(grid, *arguments)
        addresses = self._kernel.addresses(*arguments)

        def launch(stream: int) -> None:
            self._device.queue(lambda: run(stream), stream, addresses)

        return launch


class LateCard(InterpretedCard):
    """A card on a `LateDevice`."""

    def kernel(self, spec: KernelSpec) -> Any:
        super().kernel(spec)  # notes those that were not compiled
        device: Any = self.device
        return LateKernel(device, spec)
