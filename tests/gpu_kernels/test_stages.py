"""Every stage of `on_card` to its last line, on a card that does nothing and takes a millisecond.

What a stage measures or compares is nothing then; what is seen is that it reaches all that it
launches, and prints what it found. Stages that start other processes are in `test_ipc_stage`.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.blank_card import TOKEN, BlankCard, BlankDevice, BlankNodeCard  # isort: skip
from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place  # isort: skip

import numpy as np
import pytest

from engine.runner.drawing.sampler import SampledRows, Sampler
from tests.gpu.stages import STAGES
from tests.gpu.stages.model import Findings

IN_PROCESSES = {"ipc", "ipc_lane"}
OF_NODES = {"runner_bits", "runner_bytes", "runner_steps", "runner_quantised"}
SMALLER = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4000,
}  # fmt: skip
"""Weights of a node's runner are made on the host."""


def module_of(stage: str) -> ModuleType:
    return sys.modules[STAGES[stage].__module__]


def reach_the_end(stage: str, capsys: pytest.CaptureFixture[str]) -> Findings:
    found = Findings()
    STAGES[stage](BlankCard(), found)
    assert found
    assert capsys.readouterr().out
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(STAGES.keys() - IN_PROCESSES - OF_NODES))
def test_a_stage_reaches_its_end_and_tells_what_it_found(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for compare in ("_compare", "_compare_edited"):  # with the host's draws: not of such a card
        monkeypatch.setattr(module_of("draws"), compare, lambda *_: {})
    monkeypatch.setattr(module_of("quantised"), "_MOST_ERROR", math.inf)
    reach_the_end(name, capsys)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(OF_NODES))
def test_a_stage_of_nodes_reaches_its_end_and_tells_what_it_found(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for steps that are begun ahead, which `test_runner_stage` has: they need real draws."""
    runner = module_of("runner_bits")
    monkeypatch.setattr(runner, "check_going_on", lambda *_: None)
    for key, size in SMALLER.items():
        monkeypatch.setitem(vars(runner)["LARGE"], key, size)

    def draw(self: Sampler, logits: np.ndarray, rows: SampledRows) -> tuple[np.ndarray, np.ndarray]:
        """Draw on the host what such a card draws."""
        return np.full(len(logits), TOKEN), np.ones(len(logits), np.bool_)

    monkeypatch.setattr(Sampler, "draw", draw)
    put_interpreter_in_place(monkeypatch, lambda: BlankDevice(90), BlankNodeCard)
    reach_the_end(name, capsys)
