"""The program that runs stages on a card, without one: its limits, and its last lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.blank_card import BlankCard  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.gpu.back_end import has_card
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu import on_card
from tests.gpu.stages import STAGES, UNASKED
from tests.gpu.stages.model import Findings
from tests.gpu.wheels import LACKED, pinned

ROOT = Path(__file__).resolve().parents[2]
CARD: Any = SimpleNamespace(device=SimpleNamespace(properties=SimpleNamespace(name="a card")))


def quick(card: Any, found: Findings) -> None:
    found["quick"], found["all_quick"] = np.float32(0.5), [1, 2, 3]


def slow(card: Any, found: Findings) -> None:
    found["slow"] = "begun"
    time.sleep(60)


def wrong(card: Any, found: Findings) -> NoReturn:
    raise ProcessLookupError("a launch failed")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages, of which one fails, one takes too long and one is run only when it is named."""
    stages = {"wrong": wrong, "slow": slow, "quick": quick, "sweep": wrong}
    monkeypatch.setattr(on_card, "STAGES", stages)
    monkeypatch.setattr(on_card, "LIMITS_S", {"slow": 0.05})
    monkeypatch.setattr(on_card, "compiled", lambda chosen: {"kernels": len(chosen)})


@pytest.mark.usefixtures("stages")
def test_stages_that_fail_or_take_too_long_do_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(on_card, "Card", lambda: CARD)
    out = tmp_path / "found.json"
    assert on_card.main(["--out", str(out)]) == 2
    lines = capsys.readouterr().out.splitlines()
    shown = {"card": "a card", "slow": "begun", "quick": 0.5}
    assert json.loads(lines[-2]) == shown
    assert lines[-1] == "3 passed, 2 failed"
    ends = [line.partition(" (")[0] for line in lines if line.startswith("== ")]
    assert ends == [
        "== compile: ok", "== open: ok", "== wrong: FAILED", "== slow: FAILED", "== quick: ok",
    ]  # fmt: skip
    assert json.loads(out.read_text()) == shown | {
        "all_quick": [1, 2, 3], "failed": ["wrong", "slow"],
    }  # fmt: skip


@pytest.mark.usefixtures("stages")
def test_without_a_card_no_stage_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_card() -> NoReturn:
        raise ConfigError("no NVIDIA driver")

    monkeypatch.setattr(on_card, "Card", no_card)
    assert on_card.main(["quick"]) == 1
    told = capsys.readouterr().out
    assert "ConfigError: no NVIDIA driver" in told
    assert told.splitlines()[-2:] == ["{}", "1 passed, 1 failed"]


def test_the_program_plans_opens_and_runs_stages_in_their_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_card, "Card", BlankCard)
    monkeypatch.setattr(on_card, "compile_all", lambda specs, num_processes, capability: [])
    assert on_card.main(["launch_cost", "price", "ceilings"]) == 0
    told = capsys.readouterr().out
    assert "plan of" not in told
    ends = [line.split()[1] for line in told.splitlines() if line.startswith("== ")]
    assert ends == ["compile:", "open:", "ceilings:", "price:", "launch_cost:"]
    assert {"card", "copy_gb_s", "price"} <= json.loads(told.splitlines()[-2]).keys()
    assert told.splitlines()[-1] == "5 passed, 0 failed"


def test_kernels_are_compiled_for_the_card_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def compile_all(specs: list[KernelSpec], num_processes: int, capability: int) -> list[str]:
        asked.append((len(specs), capability))
        return []

    monkeypatch.setattr(on_card, "compile_all", compile_all)
    for capability in (89, 120):
        monkeypatch.setattr(on_card, "capability_of_card", lambda found=capability: found)
        assert on_card.compiled({"step": STAGES["step"]})["capability"] == capability
    [(fewer, first), (more, second)] = asked
    assert (first, second) == (89, 120)
    assert fewer
    assert more


def test_every_stage_that_is_always_run_has_a_limit_within_the_whole() -> None:
    assert STAGES.keys() >= UNASKED
    assert on_card.LIMITS_S.keys() <= STAGES.keys()
    assert max(on_card.LIMITS_S.values()) < on_card.TOTAL_S < 480


def test_wheels_for_a_machine_without_a_network_are_pinned() -> None:
    found = pinned(LACKED)
    assert [one.partition("==")[0] for one in found] == list(LACKED)
    assert all(one.partition("==")[2] for one in found)


@pytest.mark.skipif(has_card(), reason="there is a card")
def test_on_this_machine_it_says_what_is_missing() -> None:
    without_interpreter = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.on_card", "ipc"],
        cwd=ROOT, env=without_interpreter, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "== compile: ok" in done.stdout
    assert "no NVIDIA driver" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["{}", "1 passed, 1 failed"]
