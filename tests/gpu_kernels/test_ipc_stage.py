"""The stages `ipc` and `ipc_lane` to their last line, with their other process, without a card."""

from __future__ import annotations

import sys

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.played_sender import SIZES, InterpretedStageCard  # isort: skip

import pytest

from tests.gpu import ipc_sender
from tests.gpu.stages import STAGES
from tests.gpu.stages.model import Findings


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(ipc_sender, name, size)
    stages = sys.modules[STAGES["ipc"].__module__]
    monkeypatch.setattr(stages, "_ROUNDS", 2)
    monkeypatch.setattr(stages, "SENDER", [sys.executable, "-m", "tests.gpu_kernels.played_sender"])


def test_a_cache_is_read_while_its_process_lives_and_afterwards() -> None:
    found = Findings()
    STAGES["ipc"](InterpretedStageCard(), found)
    assert found["ipc_is_right_when_killed"]
    assert found["ipc_is_right_after_death"]
    assert {
        f"ipc_kernel_{kind}_{count}_gb_s" for kind in ("summed", "copied") for count in (2, 8)
    } <= set(found)


def test_prompts_come_out_of_another_process_which_is_then_killed() -> None:
    found = Findings()
    STAGES["ipc_lane"](InterpretedStageCard(), found)
    assert found["ipc_lane_is_right"]
    assert found["ipc_lane_checksum_failures"] == {"ipc": 0}
    assert found["ipc_lane_killed"]
    assert found["ipc_lane_is_right_after_death"]
