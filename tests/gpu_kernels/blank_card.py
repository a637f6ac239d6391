"""A card that does nothing and takes a millisecond: what is launched on it is bound and forgotten.

Python on the way to a card runs as it does there, in seconds for a model of any size. What comes
back is the same byte everywhere, and of what the card writes into pinned memory `TOKEN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedGraph  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

import numpy as np

from engine.runner.gpu.cuda_driver import GpuError, Memory
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu.measuring import Bound, NoDevice, SpecRecorder

BYTE = 0x3C
"""No 0 in any type."""
TOKEN = 7
"""Every token that is drawn; as half of a float64 it is above 0."""


class BlankEvent:
    def record(self, stream: int) -> None: ...
    def delay(self, stream: int) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...

    def is_reached(self) -> bool:
        return True

    def milliseconds_since(self, earlier: BlankEvent) -> float:
        return 1.0


class BlankDevice(NoDevice):
    """Has what a card's driver has, but for memory that other processes map."""

    ordinal = 0
    allocated_bytes = most_allocated_bytes = 0

    def use(self) -> None: ...

    def call(self, name: str, *arguments: Any) -> NoReturn:
        raise GpuError(f"{name}: not supported (801)")

    def allocate_pinned(self, num_bytes: int) -> Memory:
        memory = super().allocate_pinned(num_bytes)
        memory.host_bytes()[: num_bytes // 4 * 4].view(np.int32)[:] = TOKEN
        return memory

    def register(self, address: int, num_bytes: int) -> Memory:
        return Memory(address, num_bytes, lambda: None, address)

    def event(self, *, timed: bool = False) -> BlankEvent:
        return BlankEvent()

    def stream(self, *, is_urgent: bool = False) -> int:
        return 1

    def capture(self, stream: int, work: Callable[[], None]) -> InterpretedGraph:
        return InterpretedGraph(work)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None: ...

    def upload_array(self, to: int, values: np.ndarray) -> None: ...

    def download(self, source: int, num_bytes: int) -> bytearray:
        return bytearray([BYTE]) * num_bytes

    def memory(self) -> tuple[int, int]:
        return 70 << 30, 80 << 30


class BlankCard(SpecRecorder):
    """Takes the place of the card of a stage that is run."""

    is_real = True

    def __init__(self) -> None:
        super().__init__()
        self.device = BlankDevice(90)

    def milliseconds(self, work: Callable[[], None], repeats: int = 5, rounds: int = 3) -> float:
        work()
        return 1.0

    def graph_milliseconds(
        self, launches: Sequence[Bound], repeats: int = 5, rounds: int = 3
    ) -> float:
        for launch in launches:
            launch(self.stream)
        return 1.0

    def floats(self, address: int, count: int) -> np.ndarray:
        return np.ones(count, np.float32)


class BlankNodeCard(InterpretedCard):
    """The card of a node's runner."""

    def kernel(self, spec: KernelSpec) -> Any:
        super().kernel(spec)  # notes those that were not compiled
        return BlankCard()
