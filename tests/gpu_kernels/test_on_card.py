"""The program that runs stages on a card, without one: its limits, and its last lines."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.blank_card import BlankCard  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.gpu.back_end import has_card
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.gpu.launcher import KernelSpec
from pdserve.local_cluster.child_process import ending_with_parent
from tests.gpu import card_process, on_card
from tests.gpu.stages import STAGES, UNASKED
from tests.gpu.stages.model import Findings
from tests.gpu.timed import Phases
from tests.gpu.wheels import LACKED, pinned
from tests.support.cluster.processes import is_alive

ROOT = Path(__file__).resolve().parents[2]
CARD: Any = SimpleNamespace(device=SimpleNamespace(properties=SimpleNamespace(name="a card")))


def quick(card: Any, found: Findings) -> None:
    found["quick"], found["all_quick"] = np.float32(0.5), [1, 2, 3]
    found["products"] = {"qkv": 1}


def slow(card: Any, found: Findings) -> None:
    found["slow"] = "begun"
    time.sleep(60)


def wrong(card: Any, found: Findings) -> NoReturn:
    raise ProcessLookupError("a launch failed")


def ends_in(lines: list[str]) -> list[str]:
    """Return how each phase ended, without its time."""
    return [line[3:].partition(" (")[0] for line in lines if line.startswith("== ")]


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
    assert lines[-1] == "5 passed, 2 failed: wrong, slow"
    assert ends_in(lines) == [
        "compile: ok", "open: ok", "wrong: FAILED", "open: ok", "slow: FAILED", "open: ok",
        "quick: ok",
    ]  # fmt: skip
    assert "ProcessLookupError: a launch failed" in lines
    assert json.loads(out.read_text()) == shown | {
        "all_quick": [1, 2, 3], "products": {"qkv": 1}, "failed": ["wrong", "slow"],
    }  # fmt: skip


def hung(card: Any, found: Findings) -> None:
    """Stand in for a call of the driver that does not return: no signal reaches the thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(60)


def crashed(card: Any, found: Findings) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def poisoned(card: Any, found: Findings) -> NoReturn:
    """Stand in for an error in a kernel: every later call of the process fails."""
    _POISONED.append(os.getpid())
    raise GpuError("cuStreamSynchronize: an illegal memory access was encountered (700)")


def after(card: Any, found: Findings) -> None:
    assert os.getpid() not in _POISONED
    found["after"] = 1


_POISONED: list[int] = []


@pytest.mark.parametrize(("stage", "told"), [
    (hung, "OutOfTime: not within 0 s"), (crashed, "its process ended with -9"),
    (poisoned, "an illegal memory access was encountered (700)"),
])  # fmt: skip
def test_what_goes_wrong_in_the_driver_ends_with_its_process(
    stage: Callable[[Any, Findings], None], told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stages = {"before": quick, "wrong": stage, "after": after}
    monkeypatch.setattr(on_card, "STAGES", stages)
    monkeypatch.setattr(on_card, "LIMITS_S", {"wrong": 0.05} if stage is hung else {})
    monkeypatch.setattr(on_card, "compiled", lambda chosen: {})
    monkeypatch.setattr(on_card, "Card", lambda: CARD)
    monkeypatch.setattr(card_process, "GRACE_S", 0.05)
    assert on_card.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ends_in(lines) == [
        "compile: ok", "open: ok", "before: ok", "wrong: FAILED", "open: ok", "after: ok",
    ]  # fmt: skip
    assert any(told in line for line in lines)
    assert json.loads(lines[-2]) == {"card": "a card", "quick": 0.5, "after": 1}
    assert multiprocessing.active_children() == []


def test_a_stage_whose_finding_cannot_be_sent_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsendable(card: Any, found: Findings) -> None:
        found["lock"] = threading.Lock()

    monkeypatch.setattr(on_card, "STAGES", {"unsendable": unsendable})
    monkeypatch.setattr(on_card, "compiled", lambda chosen: {})
    monkeypatch.setattr(on_card, "Card", lambda: CARD)
    assert on_card.main([]) == 1
    assert "cannot pickle" in capsys.readouterr().out


def test_one_that_is_terminated_in_a_stage_says_what_was_found_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """As the program that limits its time does."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.gpu_kernels.played_stages", "--out", str(out)]
    with subprocess.Popen(
        ending_with_parent(command), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pid = next(line for line in program.stdout if line.startswith("pid ")).split()[1]
        program.terminate()
        lines = program.stdout.read().splitlines()
    assert json.loads(lines[-2]) == {"card": "a card", "slow": "begun", "not run": ["quick"]}
    assert lines[-1] == "2 passed, 2 failed: slow, open"
    assert program.returncode == 1
    assert json.loads(out.read_text())["slow"] == "begun"
    assert not is_alive(int(pid))


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
    assert told.splitlines()[-2:] == ['{"not run": ["quick"]}', "1 passed, 1 failed: open"]


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


def test_processes_that_compile_end_by_a_signal_and_not_by_this_programs_handler() -> None:
    """Whose exception, raised in the pool's code, left the pool waiting for its process."""

    class Handlers:
        function = quick

        def compile(self, capability: int) -> NoReturn:
            raise ValueError([signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)])

    specs: Any = [Handlers()]
    with Phases(60, {}).interruptible():
        [told] = on_card.compile_all(specs, 1, 90)
    assert "[<Handlers.SIG_DFL: 0>, <Handlers.SIG_IGN: 1>]" in told


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
    assert done.stdout.splitlines()[-2:] == ['{"not run": ["ipc"]}', "1 passed, 1 failed: open"]
