"""A scheduler's statistics: every counter against an independent count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.core.planner_contract import StopRule
from engine.core.statistics import SchedulerStatistics, StepCounters
from tests.support.engine.build import STRICT, Engine, make_request


def seen(engine: Engine) -> SchedulerStatistics:
    return engine.scheduler.statistics()


def test_a_new_scheduler_has_done_nothing() -> None:
    statistics = seen(Engine(num_blocks=7, budget=33, reservation_policy="global_ratio"))
    assert (
        statistics.counters.num_steps,
        statistics.counters.last_step_tokens,
        statistics.counters.num_preemptions,
    ) == (
        0,
        0,
        0,
    )
    assert (statistics.max_num_batched_tokens, statistics.method) == (33, "none")
    assert statistics.new_token_ratio == 0.7
    assert (statistics.blocks.free, statistics.blocks.available) == (7, 7)
    assert set(statistics.counters.stops) == {rule.value for rule in StopRule}
    assert set(statistics.counters.preemptions) == {"blocks", "priority"}
    assert statistics.counters.acceptance_length == 0.0


@pytest.mark.covers("S58")
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_planned_tokens_add_up_by_kind(method: str) -> None:
    engine = Engine(num_blocks=9, seats=3, budget=16, method=method, num_drafts=2, **STRICT)
    for seed, length in enumerate((9, 3, 14, 6)):
        engine.add(make_request(length, seed=seed, max_tokens=9, ignore_eos=True))
    kinds: Counter[str] = Counter()
    for number in range(1, 300):
        if not engine.scheduler.running and not engine.scheduler.waiting:
            break
        decoding = {s.sequence_id for s in engine.scheduler.running if s.is_decoding}
        step = engine.plan()
        for scheduled in step.batch:
            is_decode = scheduled.sequence_id in decoding
            kinds["draft"] += scheduled.num_drafts
            rest = len(scheduled.token_ids) - scheduled.num_drafts
            kinds["decode" if is_decode else "chunk"] += rest
        statistics = seen(engine)
        assert statistics.counters.last_step_tokens == sum(len(s.token_ids) for s in step.batch)
        assert statistics.counters.num_steps == number
        assert sum(statistics.counters.stops.values()) == number
        engine.apply(step)
    statistics = seen(engine)
    assert statistics.counters.num_decode_tokens == kinds["decode"]
    assert statistics.counters.num_draft_tokens == kinds["draft"]
    assert statistics.counters.num_chunk_tokens == kinds["chunk"]
    assert (kinds["draft"] > 0) is (method == "mtp")
    assert statistics.counters.num_drafted == kinds["draft"]
    assert engine.num_preemptions > 0


def test_an_empty_plan_is_no_step() -> None:
    engine = Engine(reservation_policy="global_ratio")
    engine.plan()
    assert (seen(engine).counters.num_steps, seen(engine).counters.stops["nothing_waits"]) == (0, 1)


@pytest.mark.covers("S58")
def test_preemptions_are_counted_by_reason() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, enable_priority_scheduling=True, **STRICT)
    for seed in (1, 2):
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add(make_request(2, seed=3, max_tokens=2, priority=1))
    engine.step()
    assert seen(engine).counters.preemptions == {"blocks": 0, "priority": 1}
    engine.run()
    assert seen(engine).counters.preemptions["blocks"] >= 1
    assert seen(engine).counters.num_preemptions == sum(seen(engine).counters.preemptions.values())


def test_recomputed_tokens_are_those_that_had_been_computed() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, **STRICT)
    sequences = [
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)
    ]
    engine.run()
    computed = sum(len(s.token_ids) for batch in engine.runner.batches for s in batch)
    needed = sum(s.num_prompt + 12 - 1 for s in sequences)
    assert computed > needed
    assert seen(engine).counters.num_recomputed_tokens == computed - needed


def test_recomputed_tokens_do_not_count_what_the_cache_still_holds() -> None:
    engine = Engine(num_blocks=6, seats=2, **STRICT)
    sequences = [
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)
    ]
    engine.run_until(lambda: engine.num_preemptions > 0)
    engine.scheduler.finish(sequences[0])
    lost = sequences[1].num_known - 1
    found = engine.scheduler.num_cached_tokens(sequences[1])
    assert 0 < found < lost or found == lost
    engine.step()
    assert seen(engine).counters.num_recomputed_tokens == lost - found


STOPPED: dict[str, dict[str, Any]] = {
    "no_seat": {"seats": 1},
    "no_budget": {"budget": 4},
    "no_blocks": {"num_blocks": 3},
    "reserved": {"num_blocks": 4, "reservation_policy": "token_ratio", "init_new_token_ratio": 1.0},
    "barrier": {"num_blocks": 3, "skip_ahead_window": 1, "skip_ahead_limit": 0},
    "nothing_waits": {},
}


@pytest.mark.covers("S58")
@pytest.mark.parametrize("rule", STOPPED)
def test_the_rule_that_stopped_a_plan_is_counted(rule: str) -> None:
    engine = Engine(**{**STRICT, "num_blocks": 16, **STOPPED[rule]})
    engine.add(make_request(8, seed=1, max_tokens=4))
    engine.add(make_request(4, seed=2, max_tokens=4))
    engine.plan()
    assert {name: count for name, count in seen(engine).counters.stops.items() if count} == {
        rule: 1
    }


@pytest.mark.covers("S58")
def test_what_is_kept_back_and_how_often_the_head_was_passed() -> None:
    engine = Engine(
        num_blocks=12,
        seats=8,
        skip_ahead_window=1,
        reservation_policy="global_ratio",
        init_new_token_ratio=1.0,
    )
    first = engine.add(make_request(9, seed=1, max_tokens=12, ignore_eos=True))
    engine.step()
    head = engine.add(make_request(40, seed=2, max_tokens=4))
    engine.add(make_request(1, seed=3, max_tokens=3))
    engine.step()
    assert (head.num_bypassed, seen(engine).highest_num_bypassed) == (1, 1)
    # In the end 21 tokens are 6 blocks; the small one's 4 fit into its own.
    assert seen(engine).counters.num_growth_blocks == 6 - len(first.block_table) == 3
    engine.scheduler.finish(head)
    assert seen(engine).highest_num_bypassed == 0


def test_seats_queue_and_blocks_are_told_as_they_are_now() -> None:
    engine = Engine(num_blocks=16, seats=2)
    engine.add(make_request(8, seed=1))
    engine.add(make_request(8, seed=2), has_remote_kv=True)
    engine.add(make_request(3, seed=3))
    engine.plan()
    statistics = seen(engine)
    assert (statistics.num_running, statistics.num_waiting) == (2, 1)
    blocks = statistics.blocks
    assert (blocks.running, blocks.receiving, blocks.reserved) == (2, 2, 1)
    assert engine.scheduler.num_queued_tokens == 3 + 8


def test_queued_tokens_leave_out_what_is_cached() -> None:
    engine = Engine(num_blocks=32, seats=1)
    first = make_request(16, seed=1, max_tokens=8, ignore_eos=True)
    engine.add(first)
    engine.step()
    prompt = (*first.prompt_token_ids, 5, 6, 7)
    waiting = engine.add(make_request(prompt, max_tokens=1))
    whole = engine.add(make_request(tuple(first.prompt_token_ids), max_tokens=1))
    num_running = 1
    assert (waiting.num_found_tokens, whole.num_found_tokens) == (16, 12), "some is computed"
    assert engine.scheduler.num_queued_tokens == num_running + 3 + 4
    engine.scheduler.finish(waiting)
    engine.scheduler.finish(whole)
    assert engine.scheduler.num_queued_tokens == num_running


def test_counters_that_were_read_change_no_more() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, is_ahead=True, **STRICT)
    before = seen(engine).counters
    for seed in (1, 2):
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True))
    engine.run()
    assert before == StepCounters()
    after = seen(engine).counters
    for name in ("preemptions", "stops", "plans_ahead"):
        assert getattr(after, name) != getattr(before, name), name


def test_acceptance_length_is_one_and_the_accepted_drafts_of_a_verifying_step() -> None:
    counters = StepCounters()
    for drafted, accepted in ((3, 3), (3, 0), (2, 1)):
        counters.on_verified(drafted, accepted)
    assert (counters.num_drafted, counters.num_accepted, counters.num_speculative_steps) == (
        8,
        4,
        3,
    )
    engine = Engine(method="mtp", num_drafts=3)
    engine.add(make_request(5, max_tokens=40, ignore_eos=True))
    engine.run()
    statistics = seen(engine)
    assert statistics.method == "mtp"
    assert statistics.counters.num_speculative_steps > 0
    assert statistics.counters.acceptance_length == pytest.approx(
        1 + statistics.counters.num_accepted / statistics.counters.num_speculative_steps
    )
    outputs = [len(o) for o in engine.outputs.values()]
    assert outputs == [40]
    # Each token came as an accepted draft or as the model's own, one per step.
    assert statistics.counters.num_accepted == 40 - len(engine.runner.batches)
