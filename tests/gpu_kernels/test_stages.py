"""Every stage of `on_card` to its last line, on a card that does nothing and takes a millisecond.

What a stage measures or compares is nothing then; what is seen is that it reaches all that it
launches, and prints what it found. Stages that start other processes are in `test_ipc_stage`.
"""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any, NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.blank_card import TOKEN, BlankCard, BlankDevice, BlankNodeCard  # isort: skip
from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place  # isort: skip

import numpy as np
import pytest

from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu.decoding import Decoding
from tests.gpu.stages import STAGES
from tests.gpu.stages.model import Checks, Findings, Model

IN_PROCESSES = {"ipc", "ipc_lane"}
OF_NODES = {"runner_bits", "runner_bytes", "runner_steps", "runner_quantised"}
SMALLER = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4000,
}  # fmt: skip
"""Weights of a node's runner are made on the host."""


def module_of(stage: str) -> ModuleType:
    return sys.modules[STAGES[stage].__module__]


def allow_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("bits", "quantised", "experts"):
        monkeypatch.setattr(module_of(stage), "MOST_ERROR", math.inf)


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
    allow_any_error(monkeypatch)
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


@pytest.mark.timeout(600)
def test_a_stage_measures_the_same_kernels_alone_and_behind_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that nodes launch: a stage that looks for faster ones changes no other stage."""

    def launched_by(stage: str) -> list[KernelSpec]:
        monkeypatch.setattr(Model, "made", None)
        card = BlankCard()
        STAGES[stage](card, Findings())
        return card.specs

    measuring = ("prefill", "step", "host", "launch_cost")
    alone = {name: launched_by(name) for name in measuring}
    for name in ("products", "attention"):
        launched_by(name)
    assert {name: launched_by(name) for name in measuring} == alone


@pytest.mark.timeout(600)
def test_figures_that_are_compared_are_of_this_card_also_in_a_stage_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that needs a ceiling or a step of another stage measures it where it is missing."""
    allow_any_error(monkeypatch)
    read = round((4 << 30) / 1e6)  # all take a millisecond
    for name in ("step", "quantised"):
        found = Findings()
        STAGES[name](BlankCard(), found)
        assert found["read_gb_s"] == read
    assert found["step"]["128 Q8_0"]["times the speed of bfloat16"] == 1.0
    steps = found["step"]
    assert steps["1 BF16"]["share"] == pytest.approx(steps["1 BF16"]["floor_ms"], abs=1e-3)
    found = Findings({"read_gb_s": 1000})
    STAGES["step"](BlankCard(), found)
    assert found["read_gb_s"] == 1000
    found = Findings(matrix_tflops=500)
    STAGES["prefill"](BlankCard(), found)
    whole = found["prefill"]["512 piece 256 rows 128 s3"]
    assert whole["share"] == pytest.approx(whole["tflops"] / 500, abs=1e-3)
    assert found["prefill"]["4096, price of pieces"] == 0


def test_the_share_of_a_step_that_is_the_hosts_is_of_rows_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts: list[int] = []
    set_rows = Decoding.set_rows

    def noted(self: Decoding, tokens: Any, positions: np.ndarray, *rest: Any) -> None:
        contexts.append(int(positions[0]) + 1)
        set_rows(self, tokens, positions, *rest)

    monkeypatch.setattr(Decoding, "set_rows", noted)
    found = Findings()
    STAGES["host"](BlankCard(), found)
    assert contexts == [1000, 970] * 3  # 60 steps that are read have 1,000 on average
    assert found["host"]["64"]["share"] == pytest.approx(
        found["host"]["64"]["read_ms"] - 1, abs=1e-3
    )


@pytest.mark.timeout(600)
def test_results_that_differ_fail_the_stage_that_compares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they do where a row's bits depend on what is computed beside it."""
    counted = itertools.count(1)

    def floats(self: BlankCard, address: int, count: int) -> np.ndarray:
        return np.full(count, next(counted), np.float32)

    monkeypatch.setattr(BlankCard, "floats", floats)
    found = Findings()
    with pytest.raises(AssertionError, match="qkv 16x32x128 w4 s4 rows 7"):
        STAGES["bits"](BlankCard(), found)
    # The rest is compared all the same.
    assert found["bits_steps"] == found["bits_windows"] == found["bits_gemma"] == "equal"


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("logits_finite", False), ("bits_products", "qkv rows 7: 0.01"),
        ("bits_steps", "cut: 0.01"), ("bits_windows", "cut: 0.01"), ("error_qkv", 0.01),
        ("error_FP8", math.nan),
    ],
)  # fmt: skip
def test_whatever_is_wrong_fails_the_stage_of_bits(wrong: str, value: object) -> None:
    right = {
        "logits_finite": True, "bits_products": "equal", "bits_steps": "equal",
        "bits_windows": "equal", "error_qkv": 1e-3,
    }  # fmt: skip
    require_all = vars(module_of("bits"))["_require_all"]
    require_all(right)
    with pytest.raises(AssertionError):
        require_all(right | {wrong: value})


def test_a_comparison_that_fails_hides_no_other_and_fails_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = module_of("draws")
    compared: list[str] = []

    def wrong(*_: object) -> None:
        compared.append("edited")
        raise AssertionError("another token")

    monkeypatch.setattr(draws, "_compare_edited", wrong)
    monkeypatch.setattr(draws, "_compare", lambda *_: {"peaked": 50})
    found = Findings()
    with pytest.raises(AssertionError, match="edited draws: another token"):
        STAGES["draws"](BlankCard(), found)
    assert compared == ["edited"]
    assert found["draws_compared"] == {"peaked": 50}
    assert set(found["draws"]) == {"1", "8", "32", "128"}


def test_an_error_of_the_driver_ends_a_comparison_at_once() -> None:
    checks = Checks()
    with pytest.raises(GpuError), checks.check("a step"):
        raise GpuError("cuGraphLaunch: an illegal memory access was encountered (700)")
    checks.end()


def test_bindings_that_do_not_load_cost_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where they are installed beside a driver that they do not know."""

    class NotFound:
        def __getattr__(self, name: str) -> NoReturn:
            raise RuntimeError("the driver is not found")

    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", NotFound(), raising=False)
    found = Findings()
    STAGES["launch_cost"](BlankCard(), found)
    assert found["bindings_record_us"] == "RuntimeError: the driver is not found"
    assert {"launch_us", "graph_launch_us", "ctypes_record_us"} <= found.keys()
