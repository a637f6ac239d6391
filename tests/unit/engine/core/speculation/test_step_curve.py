"""The curve of step times: what steps teach it, and drafts on a GPU that was measured badly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.runner_contract import StepCosts
from engine.core.speculation.draft_length import DraftLength
from engine.core.speculation.step_curve import StepCurve
from engine.core.step.step_batch import EMPTY_BATCH, StepBatch
from simulator.step_cost import StepCost
from tests.support.engine.speculation_views import powers

GPU = StepCost()
CONTEXT = 1000


def gpu_s(num_sequences: int, num_drafts: int = 0) -> float:
    """Seconds of a step of the replay's 8B model."""
    ones = np.ones(num_sequences, np.int64)
    columns = (ones, CONTEXT * ones, (1 + num_drafts) * ones, num_drafts * ones, ones)
    return GPU.step_s(StepBatch(EMPTY_BATCH.seats, *columns, EMPTY_BATCH.__getitem__))


def measured(most_rows: int) -> StepCosts:
    rows = tuple(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if n <= most_rows)
    return StepCosts(rows, tuple(gpu_s(n) for n in rows))


MEASURED = {
    "64 rows": measured(64),
    "all": measured(2048),
    "flat": StepCosts((1, 64), (0.012, 0.012)),
    "a hundredth": StepCosts((1, 64), (0.00012, 0.00013)),
    "a hundred times too steep": StepCosts((1, 2, 64), (0.012, 0.02, 0.6)),
    "one row": StepCosts((1,), (0.012,)),
}


def serve(
    costs: StepCosts, num_sequences: int, acceptance: float, num_steps: int
) -> tuple[float, list[int]]:
    """Return tokens per second, and the drafts per step, of sequences that all draft alike."""
    drawn = random.Random(0)
    length = DraftLength(costs, 5)
    spent_s, num_tokens = 0.0, 0.0
    num_drafts: list[int] = []
    for _ in range(num_steps):
        (drafts,) = set(length.lengths([powers(acceptance, 5)] * num_sequences, is_drafted=True))
        took_s = gpu_s(num_sequences, drafts) * drawn.uniform(0.97, 1.03)
        spent_s += took_s
        num_tokens += num_sequences * (1 + sum(acceptance**j for j in range(1, drafts + 1)))
        length.observe(num_sequences * (1 + drafts), took_s)
        num_drafts.append(drafts)
    return num_tokens / spent_s, num_drafts


@pytest.mark.parametrize("name", MEASURED)
def test_a_wide_batch_that_accepts_little_does_not_draft(name: str) -> None:
    rate, num_drafts = serve(MEASURED[name], 256, 0.05, 2000)
    assert rate >= 0.98 * 256 / gpu_s(256)
    assert sum(1 for n in num_drafts[:1000] if n) <= 12
    if name == "all":
        assert not any(num_drafts)


@pytest.mark.parametrize("name", ["64 rows", "all", "flat", "a hundredth"])
def test_a_narrow_batch_that_accepts_much_goes_on_to_draft(name: str) -> None:
    rate, num_drafts = serve(MEASURED[name], 8, 0.8, 2000)
    best = max(8 * (1 + sum(0.8**j for j in range(1, n + 1))) / gpu_s(8, n) for n in range(6))
    assert rate >= 0.98 * best
    assert num_drafts[-1] == 5


def test_too_steep_a_measurement_is_corrected_by_the_steps_that_run() -> None:
    length = DraftLength(MEASURED["a hundred times too steep"], 5)
    for _ in range(100):
        for rows in (1, 100, 256):
            length.observe(rows, gpu_s(rows))
    for rows in (1, 100, 200, 256, 512):
        assert length.cost_s(rows) == pytest.approx(gpu_s(rows), rel=0.35)


def test_a_single_stall_moves_the_curve_little() -> None:
    length = DraftLength(measured(2048), 5)
    for _ in range(20):
        length.observe(64, gpu_s(64))
    length.observe(64, 100 * gpu_s(64))
    assert length.cost_s(64) <= 1.13 * gpu_s(64)


def test_what_was_measured_holds_until_steps_say_otherwise() -> None:
    length = DraftLength(measured(2048), 5)
    for _ in range(40):
        length.observe(8, 1.5 * gpu_s(8))
    assert length.cost_s(8) == pytest.approx(1.5 * gpu_s(8), rel=0.05)
    assert length.cost_s(1024) == pytest.approx(gpu_s(1024))


def test_what_was_taught_long_ago_is_forgotten() -> None:
    length = DraftLength(measured(2048), 5)
    for _ in range(40):
        length.observe(1024, 3 * gpu_s(1024))
    assert length.cost_s(1024) == pytest.approx(3 * gpu_s(1024), rel=0.05)
    for _ in range(1100):
        length.observe(256, gpu_s(256))
    assert length.cost_s(1024) == pytest.approx(gpu_s(1024), rel=0.05)


def test_the_drafts_that_a_step_made_are_no_cost_of_its_rows() -> None:
    costs = StepCosts((1, 8, 64), (0.01, 0.01, 0.02), draft_s=0.001)
    length = DraftLength(costs, 5)
    for _ in range(50):
        length.observe(8, 0.03, num_proposals=20)
    assert length.cost_s(8) == pytest.approx(0.01)
    length.observe(8, 0.01, num_proposals=20)  # less than the drafts alone: says nothing
    assert length.cost_s(8) == pytest.approx(0.01)


def test_without_steps_the_curve_is_the_measurement() -> None:
    curve = StepCurve(StepCosts((2, 4, 8), (1.0, 3.0, 2.0)))
    assert curve.rows[:3] == (2, 4, 8)
    assert curve.step_s[:3] == (1.0, 3.0, 3.0)
    assert set(curve.step_s[3:]) == {3.0}
    assert not curve.observe(4, 0.0)
    assert not curve.observe(0, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 70000), st.floats(1e-6, 100.0, allow_nan=False)), max_size=80)
)
def test_the_curve_never_falls_and_stays_positive(steps: list[tuple[int, float]]) -> None:
    curve = StepCurve(measured(64))
    for rows, step_s in steps:
        curve.observe(rows, step_s)
        assert all(0 < a <= b for a, b in zip(curve.step_s, curve.step_s[1:], strict=False))
        assert len(curve.step_s) == len(curve.rows)
