"""When blocks run out: which sequence is preempted, how much is freed, which is kept."""

from __future__ import annotations

import pytest

from engine.core.planner_contract import Chunk, Preemption, PreemptionReason, StopRule
from tests.support.engine.choices import ORDERS
from tests.support.engine.planner_views import (
    Pool,
    View,
    admitted,
    decoding,
    plan,
    prefilling,
    receiving,
    tokens,
    victims,
    waiting,
)

# --- the order ------------------------------------------------------------------------------------


def a_to_e_beside_one_that_grows() -> list[View]:
    """Five decodes that need nothing now, and before them one that needs a block."""
    table = [(1, 10, 500, 1), (2, 10, 2000, 1), (3, 200, 100, 1), (4, 3, 50, 0), (5, 60, 900, 2)]
    return [
        decoding(0, 6400, output=5000, priority=9),
        *(
            decoding(i, prompt + output - 1, output=output, priority=priority)
            for i, output, prompt, priority in table
        ),
    ]


@pytest.mark.covers("E41", "E42", "E43", "S33")
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param("last_in_first_out", [5, 4, 3, 2, 1], id="E41"),
        pytest.param("shortest_output", [4, 2, 1, 5, 3], id="E42"),
        pytest.param("priority", [4, 2, 1, 3, 5], id="E43"),
    ],
)
def test_victims_are_taken_in_the_order_of_the_policy(order: str, expected: list[int]) -> None:
    running = a_to_e_beside_one_that_grows()
    assert victims(plan(running=running, pool=0, order=order)) == expected[:1]
    # When nobody's blocks are its own, all go, one after the other.
    nothing = Pool(0, shared=frozenset(b for view in running for b in view.block_table))
    assert victims(plan(running=running, pool=nothing, order=order)) == expected


@pytest.mark.covers("E44")
def test_the_intended_first_victim_is_not_the_one_that_is_kept() -> None:
    running = a_to_e_beside_one_that_grows()
    key = {s.sequence_id: (s.num_output, -s.num_prompt) for s in running[1:]}
    upstream = sorted(key, key=lambda i: key[i], reverse=True)[:-1]
    assert upstream == [3, 5, 1, 2]
    assert victims(plan(running=running, pool=0, order="shortest_output")) == [4]


@pytest.mark.covers("S33")
def test_the_youngest_decode_pays_and_no_more_than_needed() -> None:
    running = [decoding(i, 64) for i in (1, 2, 3, 4, 5)]
    step = plan(running=running, pool=1)
    assert victims(step) == [5, 4]
    assert step.chunks == {i: Chunk(1, 1) for i in (1, 2, 3)}


def test_the_youngest_that_needs_a_block_preempts_itself() -> None:
    step = plan(running=[decoding(1, 70), decoding(2, 64)], pool=0)
    assert victims(step) == [2]
    assert list(step.chunks) == [1]


@pytest.mark.covers("F54")
def test_no_sequence_is_both_planned_and_preempted() -> None:
    running = [decoding(i, 64, drafts=i % 3) for i in range(1, 8)]
    for available in range(9):
        step = plan(running=running, pool=available, k=2)
        assert not set(step.chunks) & set(victims(step))
        assert set(step.chunks) | set(victims(step)) == set(range(1, 8))
        new = sum(c.num_new_blocks for c in step.chunks.values())
        assert new <= available + len(step.preempted)


# --- credit and headroom --------------------------------------------------------------------------


@pytest.mark.covers("S36")
def test_a_victim_is_credited_only_with_what_it_alone_holds() -> None:
    shared = frozenset({7})
    running = [decoding(1, 64, (1,)), decoding(2, 64, (7,)), decoding(3, 70, (8, 9))]
    step = plan(running=running, pool=Pool(0, shared=shared))
    assert (victims(step), list(step.chunks)) == ([3], [1, 2])
    # What sequence 3 holds is shared: taking it would free nothing, so the next one pays too.
    running = [decoding(1, 64), decoding(2, 70, (5, 6)), decoding(3, 70, (7, 8))]
    step = plan(running=running, pool=Pool(0, shared=frozenset({7, 8})))
    assert (victims(step), list(step.chunks)) == ([3, 2], [1])


@pytest.mark.covers("B24", "E47", "E48", "S35")
@pytest.mark.parametrize(
    ("num_decodes", "retract", "k", "headroom"),
    [
        pytest.param(3, 20, 0, 1, id="E47 K=0"),
        pytest.param(3, 20, 3, 3, id="E47 K=3"),
        pytest.param(3, 0, 3, 0, id="none asked for"),
        pytest.param(32, 20, 0, 10, id="E48 20 steps"),
        pytest.param(32, 40, 0, 20, id="E48 40 steps"),
    ],
)
def test_one_preemption_makes_room_for_some_steps(
    num_decodes: int, retract: int, k: int, headroom: int
) -> None:
    # The oldest needs a block now; the youngest frees one for it, and the headroom.
    running = [decoding(i, 32) for i in range(1, num_decodes)]
    running[0] = decoding(1, 64, 1)
    assert 20 * 2 // 64 == 0, "rounded down there would be no headroom at all"
    just_enough = decoding(num_decodes, 64 * (1 + headroom) - 1, 1 + headroom)
    step = plan(running=[*running, just_enough], pool=0, retract=retract, k=k)
    assert victims(step) == [num_decodes]
    if headroom:
        too_few = decoding(num_decodes, 64 * headroom - 1, headroom)
        step = plan(running=[*running, too_few], pool=0, retract=retract, k=k)
        assert victims(step)[:2] == [num_decodes, num_decodes - 1]


@pytest.mark.covers("S35")
def test_cached_blocks_count_before_further_victims() -> None:
    # All that is available counts, evictable blocks too; victims come on top.
    running = [decoding(1, 64), decoding(2, 32), decoding(3, 32), decoding(4, 64, 1)]
    evictable = frozenset(range(900, 930))
    step = plan(running=running, pool=Pool(0, evictable), retract=20)
    assert victims(step) == [4, 3]
    assert victims(plan(running=running, pool=Pool(1, evictable), retract=20)) == [4]


@pytest.mark.covers("S35")
def test_headroom_is_not_a_reason_to_preempt() -> None:
    running = [decoding(i, 64) for i in (1, 2, 3)]
    step = plan(running=running, pool=3, retract=20)
    assert step.preempted == []


def test_nobody_is_preempted_for_tokens_that_nobody_will_produce() -> None:
    # Both that are left end with their next token: one token each, within what they get now.
    running = [decoding(1, 64, most=2), decoding(2, 32, most=2), decoding(3, 70, 2)]
    assert victims(plan(running=running, pool=0, retract=20)) == [3]


# --- who just came back ---------------------------------------------------------------------------


@pytest.mark.covers("F47", "S37")
@pytest.mark.parametrize(("since_resume", "victim"), [(None, 3), (16, 3), (15, 2), (0, 2)])
def test_one_that_came_back_is_spared_until_it_has_produced_something(
    since_resume: int | None, victim: int
) -> None:
    running = [
        decoding(1, 64),
        decoding(2, 70, 2, output=50),
        decoding(3, 70, 2, output=50, since_resume=since_resume),
    ]
    step = plan(running=running, pool=0, progress=16)
    assert victims(step) == [victim]


@pytest.mark.covers("S37")
def test_it_pays_when_nobody_else_is_left() -> None:
    running = [decoding(1, 64, since_resume=3), decoding(2, 70, 2, since_resume=2)]
    assert victims(plan(running=running, pool=0, progress=16)) == [2]


# --- nobody to take from --------------------------------------------------------------------------


@pytest.mark.covers("B12", "E45", "S17", "S38")
def test_sequences_that_prefill_are_never_preempted() -> None:
    running = [prefilling(1, 200, 64), prefilling(2, 200, 64)]
    step = plan(running=running, queue=[waiting(3, 10)], pool=0)
    assert (victims(step), tokens(step)) == ([], {1: 136, 2: 136})
    assert (step.num_decode_tokens, step.stopped_by) == (0, StopRule.NO_BLOCKS)
    # The youngest prefills, so the one before it pays.
    running = [decoding(1, 64), decoding(2, 70, 2), prefilling(3, 200, 0)]
    assert victims(plan(running=running, pool=0)) == [2]


@pytest.mark.covers("C24")
def test_before_its_first_token_a_sequence_neither_drafts_nor_pays() -> None:
    # The last chunks of two prompts are in this step; their first tokens are not drawn yet.
    running = [prefilling(1, 200, 199), prefilling(2, 200, 199)]
    k = 1
    upstream_charge = sum(1 + k for s in running if s.num_computed + 1 >= s.num_known)
    assert upstream_charge == 4
    step = plan(running=running, queue=[waiting(3, 100)], pool=2, cap=10, k=k)
    assert (step.num_decode_tokens, step.num_draft_tokens) == (0, 0)
    assert tokens(step) == {1: 1, 2: 1, 3: 8}
    # One that decodes beside them and cannot grow finds no victim, so it waits.
    step = plan(running=[*running, decoding(3, 64)], queue=[waiting(4, 10)], pool=0, k=k)
    assert (victims(step), tokens(step)) == ([], {1: 1, 2: 1})
    assert (step.starved, step.stopped_by) == ([], StopRule.NO_VICTIM)


@pytest.mark.covers("E46", "S13", "S34", "S38")
@pytest.mark.parametrize(
    ("beside", "ends"),
    [
        ({}, True),
        ({"prefill": True}, False),
        ({"landing": [receiving(8, 100, 2)]}, False),
        ({"exporting": 1}, False),
    ],
    ids=["alone", "a prefill", "a transfer", "an export"],
)
def test_the_last_decode_is_kept_and_ends_only_if_nothing_can_come_back(
    beside: dict[str, object], ends: bool
) -> None:
    beside = dict(beside)
    running = [decoding(1, 64)]
    if beside.pop("prefill", False):
        running.append(prefilling(2, 200, 0))
    step = plan(running=running, queue=[waiting(9, 10)], pool=0, **beside)  # type: ignore[arg-type]
    assert victims(step) == []
    assert step.starved == ([1] if ends else [])
    assert tokens(step) == ({2: 200} if len(running) == 2 else {})
    # Admissions stop, and nothing else does.
    assert (step.admissions, step.stopped_by) == ([], StopRule.NO_VICTIM)


@pytest.mark.covers("E46")
def test_cached_blocks_are_evicted_before_a_lone_decode_is_given_up() -> None:
    step = plan(running=[decoding(1, 64)], pool=Pool(1, evictable=frozenset({5})))
    assert (step.starved, step.chunks) == ([], {1: Chunk(1, 1)})


@pytest.mark.covers("S34")
def test_one_is_kept_even_if_all_the_others_free_nothing() -> None:
    shared = frozenset({1, 2, 3})
    running = [decoding(1, 64, (1,)), decoding(2, 64, (2,)), decoding(3, 64, (3,))]
    step = plan(running=running, pool=Pool(0, shared=shared), exporting=1)
    assert victims(step) == [3, 2]
    assert (step.chunks, step.starved, step.stopped_by) == ({}, [], StopRule.PREEMPTED)


@pytest.mark.covers("S13")
def test_admissions_stop_while_a_decode_waits_for_a_block() -> None:
    # What is free now would be taken by who comes, and the decode would wait for ever.
    running = [decoding(1, 64), prefilling(2, 640, 0)]
    step = plan(running=running, queue=[waiting(3, 10)], cached={3: ()}, pool=0)
    assert (tokens(step), step.stopped_by) == ({2: 640}, StopRule.NO_VICTIM)


# --- the rest of the step -------------------------------------------------------------------------


def test_a_preemption_stops_the_admissions_of_its_step() -> None:
    running = [decoding(1, 64), decoding(2, 64 * 20, 20)]
    step = plan(running=running, queue=[waiting(3, 10)], pool=0)
    assert step.preempted == [Preemption(2, PreemptionReason.BLOCKS)]
    assert (admitted(step), step.stopped_by) == ([], StopRule.PREEMPTED)


def test_a_preemption_leaves_prefills_their_chunks_and_gives_them_the_tokens() -> None:
    running = [decoding(1, 64, drafts=2), decoding(2, 70, 2, drafts=2), prefilling(3, 100, 0)]
    step = plan(running=running, pool=0, cap=10, k=2)
    assert (victims(step), tokens(step)) == ([2], {1: 3, 3: 7})


@pytest.mark.covers("S33")
def test_where_priorities_count_the_important_one_goes_last_whatever_the_order_is() -> None:
    running = [decoding(1, 64), decoding(2, 64, priority=5), decoding(3, 64, priority=5)]
    for order in ORDERS:
        assert victims(plan(running=running, pool=2, order=order, priorities=True)) == [1]
    assert victims(plan(running=running, pool=2, order="last_in_first_out")) == [3]
