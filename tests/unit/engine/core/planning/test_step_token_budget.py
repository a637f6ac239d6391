"""How one step's tokens are shared out: decodes first, charged exactly, prompts get the rest."""

from __future__ import annotations

import pytest

from common.kv.token_budget import num_speculative_tokens, tokens_per_seq
from engine.core.planner_contract import Chunk, StopRule
from tests.support.engine.planner_views import (
    View,
    admitted,
    decoding,
    plan,
    prefilling,
    receiving,
    tokens,
    waiting,
)


def decodes(count: int, drafts: int = 0) -> list[View]:
    """Decodes in the middle of a block."""
    return [decoding(i, 32, drafts=drafts) for i in range(1, count + 1)]


# --- what is left for prompts ---------------------------------------------------------------------


@pytest.mark.covers("B04", "B08", "E01", "E02", "E03", "E04", "E05", "E06", "E09", "S02")
@pytest.mark.parametrize(
    ("cap", "seats", "method", "configured", "num_decodes", "left"),
    [
        pytest.param(8192, 256, "none", 0, 100, 8092, id="E01"),
        pytest.param(8192, 256, "none", 1, 100, 8092, id="E02"),
        pytest.param(8192, 256, "mtp", 1, 100, 7992, id="E03"),
        pytest.param(8192, 256, "mtp", 4, 100, 7692, id="E04"),
        pytest.param(8192, 256, "mtp", 4, 0, 8192, id="E05"),
        pytest.param(2048, 256, "mtp", 5, 256, 512, id="E06"),
        pytest.param(512, 256, "mtp", 1, 256, 0, id="E07"),
        pytest.param(2048, 300, "mtp", 5, 300, 248, id="E09"),
        pytest.param(257, 257, "none", 0, 256, 1, id="one token left"),
    ],
)
def test_prompts_get_what_decodes_and_their_drafts_leave(
    cap: int, seats: int, method: str, configured: int, num_decodes: int, left: int
) -> None:
    k = num_speculative_tokens(method, configured)
    step = plan(
        running=decodes(num_decodes, k),
        queue=[waiting(999, 20_000)],
        cap=cap,
        seats=seats + 1,
        k=k,
    )
    assert [c.num_tokens + c.num_drafts for c in step.chunks.values()] == [1 + k] * num_decodes
    assert [a.num_tokens for a in step.admissions] == ([left] if left else [])
    assert step.num_tokens == cap == num_decodes * tokens_per_seq(method, configured) + left
    assert step.stopped_by is (StopRule.NOTHING_WAITS if left else StopRule.NO_BUDGET)


@pytest.mark.covers("C09")
def test_a_decode_is_charged_once() -> None:
    assert 8192 - 256 * 2 - 100 == 7580
    step = plan(running=decodes(100, 1), queue=[waiting(999, 9000)], seats=256, k=1)
    assert (step.num_decode_tokens, step.num_draft_tokens, step.num_chunk_tokens) == (
        100,
        100,
        7992,
    )


@pytest.mark.covers("S01")
def test_a_decode_without_drafts_is_charged_one_token() -> None:
    running = [decoding(1, 32, drafts=3), decoding(2, 32), decoding(3, 32, drafts=1)]
    step = plan(running=running, queue=[waiting(9, 900)], cap=100, k=3)
    assert tokens(step) == {1: 4, 2: 1, 3: 2, 9: 93}


@pytest.mark.covers("C21", "E10", "S07")
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("num_exporting", [128, 512])
def test_a_sequence_that_waits_for_a_transfer_is_charged_nothing(
    num_exporting: int, k: int
) -> None:
    upstream = {128: 7936, 512: 7168}
    assert 8192 - num_exporting * 2 == upstream[num_exporting]
    step = plan(queue=[waiting(999, 9000)], exporting=num_exporting, k=k)
    assert step.num_tokens == 8192


@pytest.mark.covers("S07")
def test_a_receiving_sequence_is_charged_nothing() -> None:
    landing = [receiving(i, 100, 2) for i in range(1, 101)]
    assert plan(landing=landing, queue=[waiting(999, 9000)], k=4).num_tokens == 8192


# --- decodes first --------------------------------------------------------------------------------


@pytest.mark.covers("C03", "E07", "S06")
def test_at_a_budget_of_0_every_decode_still_grows() -> None:
    cap, k = 512, 1
    running = [decoding(i, 64, drafts=k) for i in range(1, 257)]
    upstream_budget = cap - len(running) * (k + 1)
    assert upstream_budget == 0, "a loop that runs while the budget is above 0 visits nobody"
    step = plan(running=running, queue=[waiting(999, 10)], cap=cap, seats=300, k=k)
    assert list(step.chunks.items()) == [(i, Chunk(1, 1, 1)) for i in range(1, 257)]
    assert (step.num_tokens, step.admissions, step.stopped_by) == (512, [], StopRule.NO_BUDGET)


@pytest.mark.covers("C04", "E11", "S12")
@pytest.mark.parametrize("first", [1, 9], ids=["prefill in front", "prefill behind"])
def test_decodes_come_before_running_chunks(first: int) -> None:
    cap, k, prompt_left = 1024, 1, 4000
    running = [prefilling(first, prompt_left, 0)]
    running += [decoding(2, 64, drafts=1), decoding(3, 128, drafts=1)]
    running.sort(key=lambda s: s.sequence_id)
    upstream_left = cap - 2 * (k + 1)
    assert upstream_left - min(prompt_left, upstream_left) == 0, "nothing is left for the decodes"
    step = plan(running=running, queue=[waiting(10, 10)], cap=cap, k=k)
    assert list(step.chunks.items()) == [
        (2, Chunk(1, 1, 1)),
        (3, Chunk(1, 1, 1)),
        (first, Chunk(1020)),
    ]
    assert step.admissions == []
    assert step.num_tokens == 1024


@pytest.mark.covers("C04")
def test_a_chunk_without_blocks_left_in_the_pool_stops_no_decode() -> None:
    # A prompt holds all its blocks from the start, so its chunks never ask for one.
    running = [prefilling(1, 4000, 0), decoding(2, 70), decoding(3, 70)]
    step = plan(running=running, pool=0, cap=1024)
    assert tokens(step) == {2: 1, 3: 1, 1: 1022}


@pytest.mark.covers("S12")
def test_chunks_share_what_is_left_in_order_of_arrival() -> None:
    running = [prefilling(1, 100, 40), prefilling(2, 100, 0), prefilling(3, 100, 0)]
    step = plan(running=running, queue=[waiting(4, 100)], cap=130)
    assert tokens(step) == {1: 60, 2: 70}
    assert step.stopped_by is StopRule.NO_BUDGET


def test_admissions_use_the_budget_up_and_the_last_takes_a_part() -> None:
    step = plan(queue=[waiting(i, 100) for i in (1, 2, 3, 4)], cap=250)
    assert tokens(step) == {1: 100, 2: 100, 3: 50}
    assert step.stopped_by is StopRule.NO_BUDGET


@pytest.mark.covers("B02", "F100", "S05")
def test_a_budget_that_decodes_alone_exceed_is_not_exceeded() -> None:
    # No such configuration starts (S52); the planner keeps to its cap all the same.
    step = plan(running=decodes(6, 3), queue=[waiting(9, 10)], cap=4, k=3)
    assert tokens(step) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert step.num_tokens == 4


# --- the share of one prompt -------------------------------------------------------------------


@pytest.mark.covers("F99", "S12")
def test_while_others_wait_one_prompt_gets_no_more_than_the_threshold() -> None:
    running = [prefilling(1, 9000, 0)]
    step = plan(running=running, queue=[waiting(2, 300), waiting(3, 9000)], cap=2048, threshold=512)
    assert tokens(step) == {1: 512, 2: 300, 3: 512}
    # What one prompt may not have goes to the next in line, or stays unused.
    step = plan(running=[*running, prefilling(2, 9000, 0)], cap=700, threshold=512)
    assert tokens(step) == {1: 512, 2: 188}
    step = plan(running=running, queue=[waiting(2, 300)], seats=1, cap=2048, threshold=512)
    assert tokens(step) == {1: 512}


@pytest.mark.covers("S12")
def test_a_prompt_alone_gets_the_whole_budget() -> None:
    decodes_beside = [decoding(1, 70), decoding(2, 70)]
    step = plan(running=[*decodes_beside, prefilling(3, 9000, 0)], cap=2048, threshold=512)
    assert tokens(step) == {1: 1, 2: 1, 3: 2046}
    assert tokens(plan(queue=[waiting(1, 9000)], cap=2048, threshold=512)) == {1: 2048}


def test_the_end_of_a_prompt_and_whole_granules_fit_under_the_threshold() -> None:
    running = [prefilling(1, 500, 0), prefilling(2, 9000, 0)]
    assert tokens(plan(running=running, cap=2048, threshold=512)) == {1: 500, 2: 512}
    step = plan(running=running, cap=2048, threshold=500, granularity=64)
    assert tokens(step) == {1: 500, 2: 448}
    assert tokens(plan(running=running, cap=2048, threshold=63, granularity=64)) == {1: 64, 2: 64}


def test_an_urgent_prompt_that_waits_keeps_no_more_than_the_threshold() -> None:
    running = [prefilling(1, 9000, 0)]
    queue = [waiting(2, 9000, priority=1)]
    step = plan(running=running, queue=queue, cap=700, threshold=512, priorities=True)
    assert tokens(step) == {1: 188, 2: 512}


# --- chunk granularity ----------------------------------------------------------------------------


@pytest.mark.covers("B03", "E12", "S53")
@pytest.mark.parametrize(
    ("cap", "first_chunk"),
    [
        pytest.param(512, 0, id="E12 budget 2"),
        pytest.param(573, 0, id="E12 one below"),
        pytest.param(574, 64, id="E12 smallest legal"),
        pytest.param(700, 128, id="E12 two granules and a rest"),
    ],
)
def test_the_one_seat_that_does_not_decode_gets_a_whole_granule(cap: int, first_chunk: int) -> None:
    running = decodes(255, 1)
    step = plan(
        running=running, queue=[waiting(999, 1000)], cap=cap, seats=256, k=1, granularity=64
    )
    assert step.num_chunk_tokens == first_chunk
    running.append(prefilling(998, 1000, 64))
    step = plan(running=running, cap=cap, seats=256, k=1, granularity=64)
    assert step.num_chunk_tokens == first_chunk


def test_only_the_last_chunk_of_a_prompt_is_not_a_multiple() -> None:
    running = [prefilling(1, 100, 64), prefilling(2, 300, 0)]
    step = plan(running=running, queue=[waiting(3, 100), waiting(4, 10)], cap=200, granularity=64)
    # 36 end the first prompt; 128 of the 164 that are left are whole granules; 36 are not one.
    assert tokens(step) == {1: 36, 2: 128}
    assert step.stopped_by is StopRule.NO_BUDGET
    assert admitted(plan(queue=[waiting(1, 36)], cap=36, granularity=64)) == [1]


@pytest.mark.covers("S53")
def test_every_free_seat_is_worth_as_many_tokens_as_a_decode() -> None:
    seats, k = 32, 3
    for num_decodes in range(seats + 1):
        step = plan(
            running=decodes(num_decodes, k),
            queue=[waiting(999, 5000)],
            cap=seats * (1 + k),
            seats=seats + 1,
            k=k,
        )
        assert step.num_chunk_tokens == (seats - num_decodes) * (1 + k)
        assert step.num_draft_tokens == num_decodes * k


# --- one plan -------------------------------------------------------------------------------------


@pytest.mark.covers("S14")
def test_the_same_input_gives_the_same_plan() -> None:
    running = [decoding(1, 64, drafts=2), decoding(2, 70), prefilling(3, 300, 64)]
    queue = [waiting(4, 130), waiting(5, 64, remote=True)]

    def once() -> object:
        return plan(running=running, queue=queue, pool=6, cached={4: (5, 6)}, k=2)

    assert once() == once()


@pytest.mark.covers("B11")
def test_the_planned_tokens_are_told_by_kind() -> None:
    running = [decoding(1, 64, drafts=2), decoding(2, 70, drafts=1), prefilling(3, 300, 64)]
    step = plan(running=running, queue=[waiting(4, 130)], k=2)
    assert (step.num_decode_tokens, step.num_draft_tokens, step.num_chunk_tokens) == (2, 3, 366)
    assert step.num_tokens == sum(tokens(step).values()) == 371


def test_a_plan_for_nobody_is_empty() -> None:
    step = plan()
    assert (step.chunks, step.admissions, step.preempted, step.num_tokens) == ({}, [], [], 0)
    assert step.stopped_by is StopRule.NOTHING_WAITS


def test_decodes_beyond_the_budget_take_neither_tokens_nor_blocks() -> None:
    step = plan(running=[decoding(i, 64, blocks=1) for i in range(1, 6)], cap=3, pool=5)
    assert step.chunks == {1: Chunk(1, 1), 2: Chunk(1, 1), 3: Chunk(1, 1)}
    assert (step.num_decode_tokens, step.num_tokens) == (3, 3)
