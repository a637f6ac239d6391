"""A device that answers late: what is queued runs on a thread of its own, when a test lets it.

The host runs ahead of it as it does of a card. So memory that the host writes or reads too early
has other bytes than on `InterpretedDevice`, whose work is done when it is queued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

from engine.runner.gpu.launcher import KernelSpec

_LIMIT_S = 60.0
"""Only guards against waiting forever."""


class LateEvent:
    """A point in the device's work; `wait` waits for the latest one."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._place = device, 0

    def record(self, stream: int) -> None:
        self._place = self._device.num_queued

    def delay(self, stream: int) -> None:
        pass  # all streams are one

    def wait(self) -> None:
        self._device.wait_for(self._place)

    def is_reached(self) -> bool:
        return self._device.num_done >= self._place

    def close(self) -> None:
        pass


class LateGraph:
    """Launches that are queued whenever the graph is launched."""

    def __init__(self, device: LateDevice, work: Callable[[], None]) -> None:
        self._device, self._work = device, work

    def launch(self, stream: int) -> None:
        self._work()
        self._device.on_graph()

    def close(self) -> None:
        pass


class LateDevice(InterpretedDevice):
    """One queue in the place of all streams."""

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self.num_queued = self.num_done = self.num_graphs = 0
        self._is_held = self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_all, name="late device", daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        """Run this behind all that is queued."""
        with self._changed:
            self._work.append(work)
            self.num_queued += 1
            self._changed.notify_all()

    def on_graph(self) -> None:
        """Count a graph that was launched."""
        with self._changed:
            self.num_graphs += 1
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin nothing that is queued, meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Begin nothing more that is queued. As work that is queued: nothing behind that."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        """Go on with what is queued."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def wait_for(self, place: int) -> None:
        """Wait until so much work is done; raise what a part of it raised."""
        self._wait(lambda: self.num_done >= place or self._error is not None)
        if self._error is not None:
            raise self._error

    def wait_for_graphs(self, count: int) -> None:
        """Wait until so many graphs were launched."""
        self._wait(lambda: self.num_graphs >= count)

    def _wait(self, is_reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_reached, _LIMIT_S), "the device has nothing more to do"

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._work and not self._is_held)
                )
                if self._is_closed:
                    return
                work = self._work.popleft()
            try:
                work()
            except BaseException as error:
                self._error = error
            with self._changed:
                self.num_done += 1
                self._changed.notify_all()

    def end(self) -> None:
        """End the thread, whatever is queued."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_LIMIT_S)

    # --- as a device ----------------------------------------------------------------------------

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self.queue(lambda: super(LateDevice, self).copy(to, source, num_bytes, stream))

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self.queue(lambda: super(LateDevice, self).fill(address, value, num_bytes, stream))

    def event(self) -> Any:
        return LateEvent(self)

    def capture(self, stream: int, work: Callable[[], None]) -> Any:
        return LateGraph(self, work)

    def synchronize(self, stream: int) -> None:
        self.wait_for(self.num_queued)


class LateKernel:
    """A kernel that is interpreted when the device has come to it."""

    def __init__(self, device: LateDevice, spec: KernelSpec) -> None:
        self._device, self._kernel = device, InterpretedKernel(spec)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[int], None]:
        run = self._kernel.bind(grid, *arguments)
        return lambda stream: self._device.queue(lambda: run(stream))


class LateCard(InterpretedCard):
    """A card on a `LateDevice`."""

    def kernel(self, spec: KernelSpec) -> Any:
        super().kernel(spec)  # notes those that were not compiled
        device: Any = self.device
        return LateKernel(device, spec)
