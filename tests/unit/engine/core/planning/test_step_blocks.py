"""Blocks in a plan: growth of decodes, what an admission takes, cached prefixes."""

from __future__ import annotations

import pytest

from common.kv.blocks import blocks_for
from engine.core.planner_contract import Admission, Chunk, StepLimits, StopRule
from engine.core.planning.admission_plan import admission_blocks
from tests.support.engine.planner_views import (
    BS,
    MANY,
    Pool,
    admitted,
    decoding,
    plan,
    preempted,
    prefilling,
    tokens,
    waiting,
)


def limits(k: int = 0, model_len: int = MANY) -> StepLimits:
    return StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        block_size=BS,
        max_model_len=model_len,
        num_speculative_tokens=k,
    )


# --- decodes --------------------------------------------------------------------------------------


@pytest.mark.covers("E26", "E27")
@pytest.mark.parametrize(
    ("computed", "table", "new"),
    [
        pytest.param(100, 2, 0, id="E26"),
        pytest.param(4000, 65, 0, id="E27"),
        pytest.param(127, 2, 0, id="last slot"),
        pytest.param(128, 2, 1, id="first slot of the next block"),
        pytest.param(0, 1, 0, id="first token"),
    ],
)
def test_a_decode_takes_a_block_only_when_its_next_token_starts_one(
    computed: int, table: int, new: int
) -> None:
    assert plan(running=[decoding(1, computed, table)]).chunks == {1: Chunk(1, new)}


@pytest.mark.covers("C19")
@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_table_that_is_longer_than_needed_asks_for_nothing(k: int) -> None:
    needed = blocks_for(4000 + 1, BS) - 65
    assert (needed, needed + 1, max(needed, 0) + 1) == (-2, -1, 1)
    step = plan(running=[decoding(1, 4000, 65, drafts=k)], pool=0, k=k)
    assert step.chunks == {1: Chunk(1, 0, k)}


@pytest.mark.covers("C18", "E28")
def test_the_slots_of_drafts_are_added_once_and_in_tokens() -> None:
    upstream = [0]
    for index in range(4):
        upstream.append(upstream[-1] + max(blocks_for(16 * (index + 1), BS) - upstream[-1], 0) + 1)
    assert upstream[1:] == [2, 3, 4, 5]
    # Here the prompt's blocks are taken at once, and no chunk asks for more.
    (admission,) = plan(queue=[waiting(1, 64)], cap=16, k=1).admissions
    tables = [admission.num_new_blocks]
    for computed in (16, 32, 48):
        (chunk,) = plan(running=[prefilling(1, 64, computed)], cap=16, k=1).chunks.values()
        tables.append(tables[-1] + chunk.num_new_blocks)
    assert tables == [1, 1, 1, 1]
    (decode,) = plan(running=[decoding(1, 64, 1, drafts=1)], k=1).chunks.values()
    assert tables[-1] + decode.num_new_blocks == blocks_for(64 + 1 + 1, BS) == 2


@pytest.mark.covers("C18")
def test_whole_blocks_of_prompt_need_no_more_than_the_prompt_does() -> None:
    upstream = [0]
    for chunk in range(4):
        upstream.append(upstream[-1] + max(blocks_for(64 * (chunk + 1), BS) - upstream[-1], 0) + 1)
    assert upstream[1:] == [2, 3, 4, 5]
    (admission,) = plan(queue=[waiting(1, 256)], cap=64, k=1).admissions
    assert admission.num_new_blocks == 4


@pytest.mark.covers("C20")
def test_the_last_chunk_of_a_prompt_on_a_full_prefill_node_asks_for_nothing() -> None:
    upstream_asks = max(blocks_for(64, BS) - 1, 0) + 1
    assert upstream_asks == 1, "checked against a threshold of 0, then refused by the allocator"
    step = plan(running=[prefilling(1, 64, 48, most=0)], pool=0, k=1)
    assert step.chunks == {1: Chunk(16)}


@pytest.mark.covers("S13")
def test_a_chunk_asks_for_no_blocks_whatever_its_size() -> None:
    for computed in (0, 1, 63, 64, 199):
        step = plan(running=[prefilling(1, 200, computed)], pool=0)
        assert step.chunks == {1: Chunk(200 - computed)}


# --- admissions -----------------------------------------------------------------------------------


@pytest.mark.covers("E25")
@pytest.mark.parametrize(
    ("known", "k", "blocks"),
    [
        pytest.param(100, 0, 2, id="E25"),
        pytest.param(1, 0, 1, id="one token"),
        pytest.param(64, 0, 1, id="a whole block"),
        pytest.param(65, 0, 2, id="a block and a token"),
        pytest.param(64, 4, 1, id="drafts come later"),
    ],
)
def test_a_sequence_is_seated_with_the_blocks_of_all_it_knows(
    known: int, k: int, blocks: int
) -> None:
    assert admission_blocks(waiting(1, known), limits(k)) == blocks
    (admission,) = plan(queue=[waiting(1, known)], k=k).admissions
    assert admission.num_new_blocks == blocks


@pytest.mark.covers("E70", "E71", "E72", "E73", "E74", "S46")
@pytest.mark.parametrize(
    ("known", "k", "blocks", "upstream"),
    [
        pytest.param(4000, 0, 63, 65, id="E70 K=0"),
        pytest.param(4000, 3, 63, 65, id="E70 K=3"),
        pytest.param(4032, 0, 64, 65, id="E71"),
        pytest.param(63, 0, 1, 3, id="E72 K=0"),
        pytest.param(63, 1, 2, 3, id="E72 K=1"),
        pytest.param(64, 0, 2, 3, id="E73"),
        pytest.param(10, 3, 1, 3, id="E74"),
        pytest.param(1, 0, 1, 3, id="one token"),
    ],
)
def test_a_reservation_takes_the_prompt_and_one_step_beyond(
    known: int, k: int, blocks: int, upstream: int
) -> None:
    assert blocks_for(known, BS) + 2 == upstream
    sequence = waiting(1, known, remote=True)
    assert admission_blocks(sequence, limits(k)) == blocks
    assert plan(queue=[sequence], pool=blocks, k=k).admissions == [Admission(1, (), blocks, 0)]
    step = plan(queue=[sequence], pool=blocks - 1, k=k)
    assert (step.admissions, step.stopped_by) == ([], StopRule.NO_BLOCKS)


@pytest.mark.covers("S46")
def test_blocks_that_the_decode_node_has_cached_are_not_asked_for() -> None:
    cached = {1: tuple(range(30))}
    step = plan(queue=[waiting(1, 4000, remote=True)], pool=33, cached=cached, k=3)
    assert step.admissions == [Admission(1, cached[1], 33, 0)]


def test_nothing_is_reserved_past_the_models_length() -> None:
    sequence = waiting(1, 126, remote=True)
    assert admission_blocks(sequence, limits(4, model_len=MANY)) == 3
    assert admission_blocks(sequence, limits(4, model_len=128)) == 2


@pytest.mark.covers("E75", "E76", "E77", "F111", "S47")
@pytest.mark.parametrize(
    ("known", "num_cached", "new", "computed"),
    [
        pytest.param(4000, 32, 31, 1952, id="E75"),
        pytest.param(4096, 63, 1, 64, id="E76"),
        pytest.param(4000, 62, 1, 32, id="E77"),
    ],
)
def test_a_prompt_computes_and_allocates_what_the_cache_lacks(
    known: int, num_cached: int, new: int, computed: int
) -> None:
    cached = {1: tuple(range(num_cached))}
    step = plan(queue=[waiting(1, known, most=0)], cached=cached)
    assert step.admissions == [Admission(1, cached[1], new, computed)]


def test_a_remote_admission_takes_a_seat_and_blocks_but_no_tokens() -> None:
    queue = [waiting(1, 100, remote=True), waiting(2, 100), waiting(3, 64, remote=True)]
    step = plan(queue=queue, cap=100, seats=3)
    assert step.admissions == [
        Admission(1, (), 2, 0),
        Admission(2, (), 2, 100),
        Admission(3, (), 2, 0),
    ]
    assert step.num_tokens == 100
    assert admitted(plan(queue=queue, cap=100, seats=2)) == [1, 2]
    assert admitted(plan(queue=queue, cap=100, pool=5)) == [1, 2]


def test_what_is_in_host_memory_is_not_computed_again() -> None:
    (admission,) = plan(queue=[preempted(1, 300, swapped=299)]).admissions
    assert (admission.num_new_blocks, admission.num_tokens) == (5, 1)


@pytest.mark.covers("S39")
@pytest.mark.parametrize(("num_cached", "computed"), [(1, 100), (2, 72), (3, 8)])
def test_the_longer_of_cached_prefix_and_host_copy_counts(num_cached: int, computed: int) -> None:
    step = plan(queue=[preempted(1, 200, swapped=100)], cached={1: tuple(range(num_cached))})
    assert tokens(step) == {1: computed}


# --- cached blocks --------------------------------------------------------------------------------


@pytest.mark.covers("F114")
def test_a_claimed_cached_block_is_no_longer_evictable() -> None:
    # Both blocks that are available are the hit itself: nothing is left for the last token.
    cached = {1: (5, 6)}
    evictable = frozenset({5, 6})
    assert admitted(plan(queue=[waiting(1, 130)], pool=Pool(2, evictable), cached=cached)) == []
    step = plan(queue=[waiting(1, 130)], pool=Pool(3, evictable), cached=cached)
    assert step.admissions == [Admission(1, (5, 6), 1, 2)]


def test_two_that_share_a_cached_prefix_claim_it_once() -> None:
    cached = {1: (5, 6), 2: (5, 6), 3: (5, 6)}
    queue = [waiting(1, 130), waiting(2, 130), waiting(3, 130)]
    step = plan(queue=queue, pool=Pool(4, frozenset({5, 6})), cached=cached)
    assert step.admissions == [Admission(1, (5, 6), 1, 2), Admission(2, (5, 6), 1, 2)]


def test_a_hit_on_blocks_that_others_run_on_costs_nothing_available() -> None:
    cached = {1: (5, 6)}
    assert admitted(plan(queue=[waiting(1, 130)], pool=1, cached=cached)) == [1]
    assert admitted(plan(queue=[waiting(1, 130)], pool=0, cached=cached)) == []


def test_blocks_given_to_decodes_are_not_there_for_admissions() -> None:
    running = [decoding(1, 64, drafts=1), decoding(2, 64)]
    assert admitted(plan(running=running, queue=[waiting(3, 60)], pool=2, k=1)) == []
    assert admitted(plan(running=running, queue=[waiting(3, 60)], pool=3, k=1)) == [3]
