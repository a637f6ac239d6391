"""Every stage of `on_card` to its last line, on a card that does nothing and takes a millisecond.

What a stage measures or compares is nothing then; what is seen is that it reaches all that it
launches, and prints what it found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedGraph  # isort: skip

import numpy as np
import pytest

from tests.gpu.measuring import Bound, SpecRecorder
from tests.gpu.stages import STAGES
from tests.gpu.stages.model import Findings

IN_PROCESSES = {"ipc", "ipc_lane"}
"""Stages that start other processes, which open a card themselves."""
OF_NODES = {"runner_bits", "runner_steps", "runner_quantised"}
"""Stages that load a node's runner: see `test_runner_stage` and `test_quantised_runner`."""
EXACT = {"quantised"}
"""Stages that compare what a card computes with float64, and end where it is wrong."""


class BlankEvent:
    def record(self, stream: int) -> None: ...
    def delay(self, stream: int) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...

    def is_reached(self) -> bool:
        return True

    def milliseconds_since(self, earlier: BlankEvent) -> float:
        return 1.0


class BlankCard(SpecRecorder):
    """Takes the place of a card while a stage is run."""

    is_real = True

    def __init__(self) -> None:
        super().__init__()
        device: Any = self.device
        device.use = lambda: None
        device.event = lambda timed=False: BlankEvent()
        device.capture = lambda stream, work: InterpretedGraph(work)
        device.stream = lambda is_urgent=False: 1
        device.download = lambda _, num_bytes: b"\x3c" * num_bytes  # no 0 in any type
        device.copy = device.upload_array = lambda *_: None
        device.memory = lambda: (70 << 30, 80 << 30)

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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(STAGES.keys() - IN_PROCESSES - OF_NODES - EXACT))
def test_a_stage_reaches_its_end_and_tells_what_it_found(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for compare in ("_compare", "_compare_edited"):  # with the host's draws: not of such a card
        monkeypatch.setattr(sys.modules[STAGES["draws"].__module__], compare, lambda *_: {})
    found = Findings()
    STAGES[name](BlankCard(), found)
    assert found
    assert capsys.readouterr().out
