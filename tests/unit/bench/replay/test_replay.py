"""Replays of the excerpts: no limit is broken, everybody is answered once, twice the same."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from bench.replay.figures import figures_of
from bench.replay.replay import Replay, ReplayResult, ReplaySetup, num_overruns
from bench.replay.rows import BY_NAME, ROWS, Row
from common.settings.config import SchedulingConfig
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest, read_trace
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import View

EXCERPTS = Path(__file__).parents[4] / "bench" / "traces"
SETUP = ReplaySetup(num_blocks=90, max_num_seqs=32, max_num_batched_tokens=1024, speed_up=6.0)


def replayed(
    requests: list[TraceRequest],
    setup: ReplaySetup = SETUP,
    row: Row = BY_NAME["none"],
    mode: str = "recompute",
) -> ReplayResult:
    return Replay(requests, setup, row, SchedulingConfig(preemption_mode=mode), StepCost()).run()


@pytest.fixture(scope="module")
def conversations() -> list[TraceRequest]:
    return read_trace(EXCERPTS / "azure_conv.csv", 40)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_everybody_is_answered_once_and_no_limit_is_broken(
    conversations: list[TraceRequest], row: Row
) -> None:
    result = replayed(conversations, row=row)
    assert [served.num_ends for served in result.served] == [1] * len(conversations)
    for served, request in zip(result.served, conversations, strict=True):
        assert served.num_tokens == request.num_output
        times = (served.arrived_at_s, served.began_at_s, served.first_at_s, served.last_at_s)
        assert list(times) == sorted(times)
    assert (result.num_overruns, result.num_starved, result.num_idle_waits) == (0, 0, 0)
    assert (result.num_refused, result.peak_pool_use <= 1) == (0, True)


def test_a_small_pool_preempts_and_what_was_lost_is_computed_again(
    conversations: list[TraceRequest],
) -> None:
    result = replayed(conversations)
    assert result.num_preemptions > 0
    assert result.num_recomputed_tokens > 0
    assert result.peak_pool_use > 0.95


def test_swapped_blocks_are_copied_and_not_computed_again(
    conversations: list[TraceRequest],
) -> None:
    result = replayed(conversations, mode="swap")
    assert result.num_preemptions > 0
    assert result.num_recomputed_tokens == 0
    assert [served.num_ends for served in result.served] == [1] * len(conversations)


@pytest.mark.parametrize("name", ["azure_code.csv", "mooncake_conversation.jsonl"])
def test_the_other_traces_keep_the_limits_too(name: str) -> None:
    requests = read_trace(EXCERPTS / name, 30)
    setup = replace(SETUP, num_blocks=1400, speed_up=1.0)
    result = replayed(requests, setup)
    answered = sum(served.num_ends for served in result.served)
    assert answered == len(requests) - result.num_refused
    assert (result.num_overruns, result.num_starved) == (0, 0)


def test_a_replay_is_the_same_twice_and_another_with_another_seed(
    conversations: list[TraceRequest],
) -> None:
    row = BY_NAME["token_ratio"]
    once, again = (replayed(conversations, row=row) for _ in range(2))
    other = replayed(conversations, replace(SETUP, seed=7), row)
    assert astuple(once) == astuple(again)
    assert figures_of(once) != figures_of(other)


def test_the_oracle_alone_knows_the_lengths(conversations: list[TraceRequest]) -> None:
    oracle, learned = (replayed(conversations, row=BY_NAME[name]) for name in ("oracle", "learned"))
    assert figures_of(oracle)["mean_e2e_s"] < figures_of(learned)["mean_e2e_s"]
    assert [s.num_tokens for s in oracle.served] == [r.num_output for r in conversations]


def test_an_oracle_of_all_lengths_preempts_nobody() -> None:
    # With half of a last block for each sequence, the sum of all was exceeded seven times.
    requests = read_trace(EXCERPTS / "azure_conv.csv", 120)
    setup = replace(SETUP, num_blocks=200, max_num_seqs=64)
    result = replayed(requests, setup, BY_NAME["oracle"])
    assert (result.num_preemptions, result.peak_pool_use > 0.95) == (0, True)


def test_a_candidate_is_charged_its_whole_output_where_the_row_says_so() -> None:
    config = SchedulingConfig()
    row = BY_NAME["SGLang-like"]
    view = View(num_known=64, num_held_blocks=1, max_new_tokens=640)
    reserve = row.reservation(row.config(config), 64).reserve(growth_columns([view]))
    # 0.7 of 640 for the one that runs, and all 640 for the candidate.
    assert (reserve.blocks, reserve.blocks_with(view), reserve.plus(view).blocks) == (7, 17, 14)


def test_equal_prompts_are_computed_once() -> None:
    apart = [TraceRequest(5.0 * i, 1024, 2, (2 * i, 2 * i + 1)) for i in range(3)]
    alike = [replace(request, hash_ids=(0, 1)) for request in apart]
    setup = replace(SETUP, speed_up=1.0)
    # At least one token of a prompt is computed, so its last block is no hit: 960 tokens are.
    saved_s = 2 * (960 * StepCost().token_s)
    difference_s = replayed(apart, setup).busy_s - replayed(alike, setup).busy_s
    assert difference_s == pytest.approx(saved_s, rel=0.05)


def test_the_clock_is_the_cost_model_s() -> None:
    """One request alone: a prompt in two chunks, then one step per token after the first."""
    cost = StepCost(
        overhead_s=1.0, weights_s=0.0, token_s=0.01, context_s=0.0, pair_s=0.0, block_copy_s=0.0
    )
    requests = [TraceRequest(0.0, 1500, 3), TraceRequest(100.0, 10, 1)]
    result = Replay(
        requests, replace(SETUP, speed_up=1.0), BY_NAME["none"], SchedulingConfig(), cost
    ).run()
    first, second = result.served
    assert first.began_at_s == 0.0
    assert first.first_at_s == pytest.approx(1 + 10.24 + 1 + 4.76)
    assert first.last_at_s == pytest.approx(17 + 2 * 1.01)
    assert first.longest_gap_s == pytest.approx(1.01)
    assert second.began_at_s == 100.0
    assert second.last_at_s == pytest.approx(101.1)
    assert result.completion_s == pytest.approx(101.1)
    assert (result.num_steps, result.sequence_steps) == (5, 5)
    assert result.busy_s == pytest.approx(17 + 2.02 + 1.1)
    held = 24 * (17 + 2.02) + 1 * 1.1  # blocks times seconds
    assert result.pool_use_s == pytest.approx(held / SETUP.num_blocks)
    assert result.peak_pool_use == pytest.approx(24 / SETUP.num_blocks)


@pytest.mark.covers("S59")
def test_a_long_prompt_beside_a_decode_delays_no_token_for_long() -> None:
    # 2048 tokens behind 90,000 take 0.74 s in the cost model, 2048 at the start of a prompt 0.18 s.
    requests = [TraceRequest(0.0, 64, 400), TraceRequest(0.1, 100_000, 2)]
    setup = ReplaySetup(num_blocks=1700, max_num_seqs=2, max_num_batched_tokens=2048)
    gaps = {
        name: figures_of(replayed(requests, setup, BY_NAME[name]))["gap_s_p99"]
        for name in ("none", "vLLM-like")
    }
    assert gaps["none"] < 0.19
    assert gaps["vLLM-like"] > 0.7


def test_what_the_pool_cannot_hold_is_refused() -> None:
    setup = replace(SETUP, num_blocks=4)  # 192 tokens and the block of the next one
    requests = [TraceRequest(0.0, 190, 3), TraceRequest(0.0, 190, 2)]
    result = replayed(requests, setup)
    assert result.num_refused == 1
    assert [served.num_ends for served in result.served] == [1]


def test_samples_are_bounded_and_in_order(conversations: list[TraceRequest]) -> None:
    result = replayed(conversations)
    times_s = [sample.at_s for sample in result.samples]
    assert result.num_steps > 512 > len(times_s) >= 255
    assert times_s == sorted(times_s)
    assert result.samples[-1].num_preemptions <= result.num_preemptions
    assert math.isclose(times_s[-1], result.completion_s, rel_tol=0.1)


def scheduled(start: int, num_tokens: int, block_table: list[int]) -> ScheduledSequence:
    return ScheduledSequence(0, [0] * num_tokens, start, block_table, None)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ([scheduled(0, 64, [0]), scheduled(64, 960, [0, *range(1, 16)])], 0),
        ([scheduled(0, 1025, list(range(17)))], 1),  # one token above the budget
        ([scheduled(i, 1, [i]) for i in range(33)], 1),  # one sequence more than seats
        ([scheduled(64, 1, [0])], 1),  # no block for the token
        ([scheduled(0, 1, [3]), scheduled(64, 1, [5, 3])], 1),  # two writers of one block
        ([scheduled(64, 1, [3, 4]), scheduled(64, 1, [3, 5])], 0),  # one prefix, read by both
        ([scheduled(0, 1, [90])], 1),  # no block of this pool
        ([scheduled(0, 1, [-1])], 1),
    ],
)
def test_overruns_are_seen(batch: list[ScheduledSequence], count: int) -> None:
    assert num_overruns(batch_of(batch), SETUP) == count
