"""Step times from measured points: right on the points, close between them, never noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from common.measured_profile import ChunkTime, DecodeTime, MeasuredProfile, TransferTime
from simulator.profiles.measured_steps import MeasuredSteps, StepTable, transfer_line
from simulator.step_cost import StepCost
from tools.generate_profiles import FILES, profile_of

ROOFLINE = StepCost(
    overhead_s=2e-3, weights_s=5e-3, token_s=25e-6, context_s=50e-9, pair_s=1.5e-9, block_copy_s=0
)
WHOLE = profile_of(*FILES["8b_h100"])


def measured(
    rows: Sequence[int] = (1, 4, 16, 64, 128, 192, 256), contexts: Sequence[int] = (128, 1024, 8192)
) -> MeasuredProfile:
    """What `ROOFLINE` would be measured as."""
    decodes = tuple(
        DecodeTime(rows=n, context=c, step_s=ROOFLINE.seconds(n, n * c))
        for n, c in product(rows, contexts)
    )
    chunks = tuple(
        ChunkTime(tokens=n, context=c, step_s=ROOFLINE.seconds(n, 0, n * c + n * (n + 1) // 2))
        for n, c in product((16, 64, 128, 192, 256, 1024, 4096), (0, 1024, 8192))
    )
    return replace(WHOLE, decodes=decodes, chunks=chunks)


STEPS = MeasuredSteps(measured(), block_copy_s=1e-4)


def test_each_point_takes_what_was_measured() -> None:
    for point in measured().decodes:
        found = STEPS.seconds(point.rows, point.rows * point.context)
        assert found == pytest.approx(point.step_s)
    for chunk in measured().chunks:
        pairs = chunk.tokens * chunk.context + chunk.tokens * (chunk.tokens + 1) // 2
        assert STEPS.seconds(0, 0, chunk.tokens, pairs) == pytest.approx(chunk.step_s)
    assert STEPS.unevenness == 0.0


@pytest.mark.parametrize("rows", [2, 10, 100, 300])
@pytest.mark.parametrize("context", [60, 500, 3000, 20_000])
def test_a_decode_between_and_beyond_points_is_close(rows: int, context: int) -> None:
    wanted_s = ROOFLINE.seconds(rows, rows * context)
    assert STEPS.seconds(rows, rows * context) == pytest.approx(wanted_s, rel=0.03)


@pytest.mark.parametrize(("rows", "num_tokens"), [(1, 500), (8, 100), (64, 2000), (200, 3000)])
def test_a_step_of_decodes_and_a_chunk_is_close(rows: int, num_tokens: int) -> None:
    context, pairs = rows * 2000, num_tokens * 600
    wanted_s = ROOFLINE.seconds(rows + num_tokens, context, pairs)
    assert STEPS.seconds(rows, context, num_tokens, pairs) == pytest.approx(wanted_s, rel=0.04)


def test_drawing_counts_in_a_step_with_a_chunk() -> None:
    """A row draws a token, a token of a prompt does not."""
    slower = tuple(replace(one, step_s=one.step_s + 1e-4 * one.rows) for one in measured().decodes)
    steps = MeasuredSteps(replace(measured(), decodes=slower), block_copy_s=0.0)
    both_s = STEPS.seconds(64, 6400, 1024, 600_000)
    assert steps.seconds(64, 6400, 1024, 600_000) == pytest.approx(both_s + 64e-4, rel=0.02)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_runs_of_decodes_end_where_single_steps_do(rows: int) -> None:
    """Bit by bit, also where a run passes a measured context, and beyond the last one."""
    for steps, context in product((STEPS, MeasuredSteps(measured((4,)), 0.0)), (100, 1000, 9000)):
        total = rows * context + rows // 2
        ends_s = steps.ends_of_decodes(7.0, rows, total, 90)
        now_s = 7.0
        for number, end_s in enumerate(ends_s):
            step_s = steps.seconds(rows, total + rows * number) + steps.beside.of_step(rows)
            now_s += step_s
            assert end_s == now_s
        assert len(ends_s) == 90


def test_a_time_that_is_longer_than_that_of_a_larger_step_is_noise() -> None:
    noisy = [
        replace(one, step_s=one.step_s * 3) if (one.rows, one.context) == (4, 1024) else one
        for one in measured().decodes
    ]
    steps = MeasuredSteps(replace(measured(), decodes=tuple(noisy)), block_copy_s=0.0)
    assert steps.unevenness == pytest.approx(0.64, abs=0.05)
    assert steps.seconds(4, 4 * 1024) == pytest.approx(STEPS.seconds(4, 4 * 1024), rel=0.15)


@pytest.mark.parametrize(("rows", "contexts"), [((1,), (128,)), ((1,), (128, 512)), ((1, 2), (9,))])
def test_few_points_still_give_times(rows: Sequence[int], contexts: Sequence[int]) -> None:
    steps = MeasuredSteps(measured(rows, contexts), block_copy_s=0.0)
    assert 0 < steps.seconds(1, 100) <= steps.seconds(8, 800)


def test_lines_with_one_context_rise_as_those_of_fewer_rows() -> None:
    table = StepTable([(1, 0, 1.0), (1, 1000, 2.0), (2, 0, 1.5)])
    assert table.seconds(2, 1000) == pytest.approx(1.5 + 2 * 1.0)


def test_pairs_per_token_say_when_attention_costs_as_much() -> None:
    assert STEPS.pairs_per_token == pytest.approx(ROOFLINE.pairs_per_token, rel=0.1)
    flat = MeasuredSteps(
        replace(measured(), chunks=(ChunkTime(tokens=16, context=0, step_s=0.1),)), block_copy_s=0.0
    )
    assert flat.pairs_per_token == 0


def test_a_transport_has_a_rate_and_a_latency_without_its_noise() -> None:
    points = [(1 << 20, 0.9), (1 << 22, 0.02), (1 << 24, 0.05)]
    transfers = tuple(
        TransferTime(transport="zmq", num_bytes=size, seconds=took_s) for size, took_s in points
    )
    rate, latency_s = transfer_line(replace(WHOLE, transfers=transfers), "zmq")
    assert rate == pytest.approx(3 * (1 << 22) / 0.03)
    assert 0 <= latency_s < 0.02
    with pytest.raises(ValueError, match="no transfer over shm"):
        transfer_line(replace(WHOLE, transfers=transfers), "shm")
