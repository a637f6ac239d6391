"""Victims in a running scheduler: where they wait, when they resume, and which never can."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import STRICT, Engine, check_idle, make_request, status_of
from tests.support.engine.hash_runner import expected_tokens


def check_answers(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        request = sequence.request
        right = expected_tokens(request.prompt_token_ids, request.sampling)
        assert engine.outputs[sequence.sequence_id] == right


def add(engine: Engine, length: int, max_tokens: int, seed: int, **given: Any) -> Sequence:
    request = make_request(length, seed=seed, max_tokens=max_tokens, ignore_eos=True, **given)
    return engine.add(request)


def tight(**given: Any) -> Engine:
    """By default 6 blocks of 4 tokens for two that want 5 each."""
    return Engine(**{"num_blocks": 6, "seats": 2, "caching": False, **STRICT, **given})


# --- the queue ------------------------------------------------------------------------------------


@pytest.mark.covers("S41")
@pytest.mark.parametrize(("requeue", "order"), [("arrival", [2, 3, 4]), ("tail", [3, 4, 2])])
def test_where_a_victim_waits(requeue: str, order: list[int]) -> None:
    engine = tight(requeue=requeue)
    sequences = [add(engine, 8, 12, seed) for seed in (1, 2)]
    engine.step()
    sequences += [add(engine, 2, 2, seed) for seed in (3, 4)]
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert [s.sequence_id for s in engine.scheduler.waiting] == order
    engine.run()
    check_answers(engine, *sequences)


@pytest.mark.covers("S41")
def test_more_important_ones_are_seated_first() -> None:
    engine = Engine(seats=1, enable_priority_scheduling=True)
    first = add(engine, 4, 2, 1)
    engine.step()
    low, high = add(engine, 4, 2, 2, priority=-1), add(engine, 4, 2, 3, priority=1)
    assert [s.sequence_id for s in engine.scheduler.waiting] == [high.sequence_id, low.sequence_id]
    engine.run()
    check_answers(engine, first, low, high)
    order = [s.sequence_id for batch in engine.runner.batches for s in batch]
    assert order.index(high.sequence_id) < order.index(low.sequence_id)


def test_a_victim_of_priority_answers_as_if_nothing_had_happened() -> None:
    engine = Engine(seats=2, enable_priority_scheduling=True)
    low = [add(engine, 5, 9, seed) for seed in (1, 2)]
    for _ in range(3):
        engine.step()
    high = add(engine, 5, 3, 3, priority=1)
    engine.step()
    assert status_of(low[1]) is SequenceStatus.PREEMPTED
    assert status_of(high) is SequenceStatus.RUNNING_DECODE
    engine.run()
    check_answers(engine, *low, high)
    statistics = engine.scheduler.statistics()
    assert statistics.counters.preemptions == {"blocks": 0, "priority": 1}
    check_idle(engine.scheduler)


@pytest.mark.covers("T33")
def test_what_a_victim_finds_of_its_own_is_no_cached_prefix() -> None:
    engine = Engine(seats=2, enable_priority_scheduling=True)
    sequences = [add(engine, 9, 9, seed) for seed in (1, 2)]
    for _ in range(3):
        engine.step()
    sequences.append(add(engine, 5, 3, 3, priority=1))
    engine.run()
    counters = engine.scheduler.statistics().counters
    assert counters.preemptions["priority"] == 1
    assert counters.num_recomputed_tokens < 9, "it found nothing"
    assert set(counters.prefix_blocks_found.values()) == {0}
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 0]


@pytest.mark.covers("F54", "S40")
def test_a_victim_of_this_step_is_in_no_batch() -> None:
    engine = Engine(seats=2, method="mtp", num_drafts=2, enable_priority_scheduling=True)
    low = [add(engine, 5, 9, seed) for seed in (1, 2)]
    for _ in range(2):
        engine.step()
    high = add(engine, 5, 3, 3, priority=1)
    step = engine.plan()
    (victim,) = engine.scheduler.waiting
    (kept,) = [s for s in low if s is not victim]
    assert [s.sequence_id for s in step.sequences] == [kept.sequence_id, high.sequence_id]
    assert victim.draft_token_ids == ()
    engine.apply(step)
    engine.run()
    check_answers(engine, *low, high)


@pytest.mark.covers("S43")
def test_a_bypassed_sequence_ages_though_victims_join_the_queue_before_it() -> None:
    engine = Engine(
        num_blocks=12,
        seats=8,
        enable_priority_scheduling=True,
        **{**STRICT, "skip_ahead_window": 1},
    )
    for seed in (1, 2, 3):
        add(engine, 7, 20, seed, priority=1)
    engine.step()
    important = add(engine, 34, 2, 4, priority=2)
    blocked, small = add(engine, 30, 2, 5), add(engine, 1, 2, 6)
    step = engine.plan()
    # Two victims make room for the important one; one block is left, enough for the small one.
    assert step.num_preempted == 2
    assert {important.sequence_id, small.sequence_id} <= {s.sequence_id for s in step.sequences}
    assert blocked.num_bypassed == 1
    assert engine.scheduler.statistics().highest_num_bypassed == 1


@pytest.mark.covers("S43")
def test_age_grows_from_step_to_step_until_nobody_passes_and_ends_with_the_seat() -> None:
    engine = Engine(
        num_blocks=12,
        seats=8,
        caching=False,
        **{**STRICT, "skip_ahead_window": 1},
        skip_ahead_limit=3,
    )
    first = add(engine, 16, 12, 1)
    engine.step()
    blocked = add(engine, 36, 2, 2)
    small = []
    for age in (1, 2, 3):
        small.append(add(engine, 1, 2, 2 + age))
        engine.step()
        assert blocked.num_bypassed == age
        assert engine.scheduler.statistics().highest_num_bypassed == age
    late = add(engine, 1, 2, 6)
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    assert status_of(late) is SequenceStatus.WAITING, "the limit is reached"
    engine.step()
    assert status_of(blocked) is not SequenceStatus.WAITING
    assert blocked.num_bypassed == 0
    engine.run()
    check_answers(engine, first, blocked, *small, late)


@pytest.mark.covers("S37")
def test_progress_counts_from_the_last_preemption() -> None:
    engine = tight(min_progress_tokens=16)
    victim = [add(engine, 8, 12, seed) for seed in (1, 2)][1]
    progress = victim.num_output_since_resume
    assert progress is None
    engine.run_until(lambda: status_of(victim) is SequenceStatus.PREEMPTED)
    produced, progress = victim.num_output, victim.num_output_since_resume
    assert produced > 0
    assert progress == 0
    engine.run_until(lambda: victim.num_output == produced + 2)
    assert victim.num_output_since_resume == 2


# --- coming back ----------------------------------------------------------------------------------


@pytest.mark.covers("F47", "S37")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reservation_policy": "none"},
        {"reservation_policy": "none", "preemption_mode": "swap", "num_host_blocks": 64},
        {"reservation_policy": "none", "requeue": "tail"},
        {"reservation_policy": "fixed_blocks"},
        {"reservation_policy": "global_ratio", "init_new_token_ratio": 0.1},
        {"reservation_policy": "none", "method": "mtp", "num_drafts": 3},
        {"reservation_policy": "none", "preemption_policy": "shortest_output"},
    ],
    ids=str,
)
def test_a_victim_is_not_admitted_just_to_be_preempted_again(settings: dict[str, Any]) -> None:
    engine = Engine(num_blocks=24, seats=8, caching=False, max_model_len=80, **settings)
    sequences = [add(engine, 9, 40, seed) for seed in range(8)]
    preempted: Counter[int] = Counter()
    for _ in range(1000):
        if not engine.scheduler.running and not engine.scheduler.waiting:
            break
        before = {s.sequence_id for s in engine.scheduler.running if s.is_decoding}
        progress = {s.sequence_id: s.num_output_since_resume for s in engine.scheduler.running}
        step = engine.plan()
        gone = before - {s.sequence_id for s in engine.scheduler.running}
        preempted.update(gone)
        for sequence_id in gone:
            made = progress[sequence_id]
            assert made is None or made >= 4, f"{sequence_id} came back for {made} tokens"
        engine.apply(step)
    check_answers(engine, *sequences)
    check_idle(engine.scheduler)
    assert max(preempted.values(), default=0) <= 4, preempted
    # Nobody pays for the whole answer twice over: what is lost is a small part of the work.
    statistics = engine.scheduler.statistics()
    assert statistics.counters.num_recomputed_tokens <= 2 * 8 * 49


@pytest.mark.covers("B29")
def test_without_headroom_victims_come_and_go_and_all_answers_are_right() -> None:
    engine = Engine(num_blocks=24, seats=8, caching=False, max_model_len=80, **STRICT)
    sequences = [add(engine, 9, 40, seed) for seed in range(8)]
    engine.run(most_steps=1000)
    check_answers(engine, *sequences)
    assert engine.num_preemptions > 0


@pytest.mark.covers("C11", "E83", "F49", "S44")
def test_transfers_land_while_a_victim_waits_and_it_resumes_in_the_end() -> None:
    engine = tight(num_blocks=7, seats=3, skip_ahead_window=1)
    landing = engine.add(make_request(1, seed=3, max_tokens=2, ignore_eos=True), has_remote_kv=True)
    old, victim = add(engine, 8, 16, 1), add(engine, 8, 16, 2)
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert list(engine.scheduler.waiting) == [victim]
    assert status_of(landing) is SequenceStatus.WAITING_FOR_KV
    engine.land(landing)
    assert status_of(landing) is SequenceStatus.RUNNING_DECODE
    # A new reservation does not pass the victim.
    small = engine.add(make_request(1, seed=4, max_tokens=2, ignore_eos=True), has_remote_kv=True)
    step = engine.plan()
    assert {s.sequence_id for s in step.sequences} == {old.sequence_id, landing.sequence_id}
    assert step.reserved == []
    assert list(engine.scheduler.waiting) == [victim, small]
    engine.apply(step)
    engine.run_until(lambda: status_of(small) is SequenceStatus.WAITING_FOR_KV)
    assert status_of(victim) is not SequenceStatus.PREEMPTED
    engine.land(small)
    engine.run()
    check_answers(engine, old, victim, landing, small)
    check_idle(engine.scheduler)


# --- nobody to take from --------------------------------------------------------------------------


@pytest.mark.covers("S13", "S38")
def test_a_lone_decode_waits_until_a_transfer_ends_and_admissions_with_it() -> None:
    engine = Engine(num_blocks=5, seats=3, caching=False, **STRICT)
    exported = engine.add(make_request(9, seed=1), is_exported=True)
    engine.step()
    assert status_of(exported) is SequenceStatus.EXPORTING
    decode = add(engine, 6, 6, 2)
    engine.run_until(lambda: decode.num_computed == 8)
    late = add(engine, 1, 1, 3)
    for _ in range(3):
        step = engine.plan()
        assert (list(step.batch), step.starved, step.num_preempted) == ([], [], 0)
        assert not step.made_progress
    assert engine.scheduler.statistics().counters.stops["no_victim"] == 3
    assert status_of(late) is SequenceStatus.WAITING
    engine.scheduler.release(exported)
    engine.run()
    check_answers(engine, decode, late)
    check_idle(engine.scheduler)


@pytest.mark.covers("B29", "F50", "S34")
def test_one_that_can_never_grow_is_told_and_the_others_go_on() -> None:
    # No node starts with a pool that is smaller than its model's longest sequence (S54).
    engine = Engine(num_blocks=2, seats=2, caching=False, max_model_len=40, **STRICT)
    starving = add(engine, 6, 10, 1)
    engine.run_until(lambda: starving.num_computed == 8)
    step = engine.plan()
    assert (step.starved, list(step.batch)) == ([starving], [])
    assert step.made_progress, "the next plan differs when it has been finished"
    assert (
        engine.outputs[1]
        == expected_tokens(starving.prompt_token_ids, starving.request.sampling)[:3]
    )
    late = add(engine, 3, 2, 2)
    engine.scheduler.finish(starving)
    engine.run()
    check_answers(engine, late)
    check_idle(engine.scheduler)


@pytest.mark.covers("E46")
def test_the_blocks_of_ended_sequences_are_evicted_for_a_lone_decode() -> None:
    engine = Engine(num_blocks=4, seats=2, **STRICT)
    add(engine, 8, 1, 1)
    engine.run()
    assert engine.scheduler.pool.counts().cached == 2
    lone = add(engine, 4, 9, 2)
    engine.run()
    check_answers(engine, lone)
    assert engine.num_preemptions == 0
