"""Plans that are made while the step before runs: when they are taken, and what prevents it."""

from __future__ import annotations

import pytest

from engine.core.planner_contract import Admission, AheadRule, Chunk, StepPlan, StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import STRICT, Engine, check_idle, make_request, status_of
from tests.support.engine.choices import MODES
from tests.support.engine.hash_runner import expected_tokens


def add(engine: Engine, length: int, max_tokens: int, seed: int = 0, **given: object) -> Sequence:
    """A request that ends by its length, unless it is given stop tokens."""
    request = make_request(length, seed=seed, max_tokens=max_tokens, ignore_eos=True, **given)  # type: ignore[arg-type]
    return engine.add(request)


def stopping_at(length: int, seed: int, index: int) -> dict[str, object]:
    """Stop tokens that end the output of such a request with token `index`, and not before."""
    request = make_request(length, seed=seed, max_tokens=50, ignore_eos=True)
    answer = expected_tokens(request.prompt_token_ids, request.sampling)
    assert answer.index(answer[index]) == index
    return {"stop_token_ids": (answer[index],)}


def answer(sequence: Sequence) -> list[int]:
    return expected_tokens(sequence.request.prompt_token_ids, sequence.request.sampling)


def check_answers(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert engine.outputs[sequence.sequence_id] == answer(sequence)
    check_idle(engine.scheduler)


@pytest.mark.covers("S60")
def test_nearly_every_step_of_a_steady_load_is_planned_ahead_and_needs_no_more_steps() -> None:
    steps = {}
    for is_ahead in (False, True):
        engine = Engine(num_blocks=80, seats=4, budget=8, is_ahead=is_ahead, **STRICT)
        load = [add(engine, 5 + seed, 20 + seed % 3, seed) for seed in range(12)]
        engine.run()
        check_answers(engine, *load)
        steps[is_ahead] = engine.scheduler.statistics().counters.num_steps
        counted = engine.plans_ahead
        if is_ahead:
            assert counted == {"no_step": 1, "taken": steps[True] - 1}
            assert engine.num_as_foreseen == steps[True] - 1
        else:
            assert counted == {"no_step": steps[False]}
    # Ends by length are foreseen, so the next in the queue does not wait a step longer.
    assert steps[True] == steps[False]


@pytest.mark.covers("S60")
def test_a_sequence_that_its_token_ends_is_left_out_and_the_others_go_on() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    short = add(engine, 5, 50, 1, **stopping_at(5, 1, 3))
    others = [add(engine, 6, 12, seed) for seed in (2, 3)]
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    held = engine.scheduler.pool.counts().running
    assert held == sum(len(one.block_table) for one in others)
    num_decodes = engine.scheduler.statistics().counters.num_decode_tokens
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == others
    assert step.num_tokens == 2
    counters = engine.scheduler.statistics().counters
    assert (counters.num_decode_tokens, counters.last_step_tokens) == (num_decodes + 2, 2)
    engine.apply(step)
    engine.run()
    check_answers(engine, short, *others)


def test_a_candidate_for_the_seat_of_one_that_its_token_ends_waits_a_step_longer() -> None:
    engine = Engine(num_blocks=40, seats=2, is_ahead=True)
    short = add(engine, 5, 50, 1, **stopping_at(5, 1, 3))
    other, next_one = add(engine, 6, 12, 2), add(engine, 7, 3, 3)
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    engine.step()
    assert engine.was_ahead
    assert status_of(next_one) is SequenceStatus.WAITING
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [other, next_one]
    engine.apply(step)
    engine.run()
    check_answers(engine, short, other, next_one)


def test_one_that_ends_by_its_length_gives_its_seat_and_its_blocks_in_the_same_plan() -> None:
    engine = Engine(num_blocks=4, seats=2, caching=False, is_ahead=True, **STRICT)
    first, next_one = add(engine, 7, 4, 1), add(engine, 10, 3, 2)
    engine.step()
    assert status_of(next_one) is SequenceStatus.WAITING
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [next_one]
    engine.apply(step)
    engine.run()
    check_answers(engine, first, next_one)


def test_blocks_that_another_one_shares_are_not_those_of_one_that_ends() -> None:
    engine = Engine(num_blocks=5, is_ahead=True, **STRICT)
    prompt = make_request(8, seed=1).prompt_token_ids
    first = engine.add(make_request((*prompt, 1), max_tokens=3, ignore_eos=True))
    engine.step()
    second = engine.add(make_request((*prompt, 2), max_tokens=3, ignore_eos=True))
    third = add(engine, 10, 2, 3)
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    assert second.num_cached_tokens == 8
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [second]
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second, third)


def test_exported_prompts_leave_with_their_token_and_keep_their_blocks() -> None:
    engine = Engine(num_blocks=12, seats=1, budget=4, is_ahead=True)
    first = engine.add(make_request(10, seed=1), is_exported=True)
    second = engine.add(make_request(9, seed=2), is_exported=True)
    engine.run_until(lambda: status_of(first) is SequenceStatus.EXPORTING)
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [second]
    assert set(second.block_table).isdisjoint(first.block_table)
    engine.apply(step)
    engine.run_until(lambda: status_of(second) is SequenceStatus.EXPORTING)
    engine.scheduler.release(first)
    engine.scheduler.release(second)
    check_idle(engine.scheduler)


def test_without_a_step_that_runs_nothing_is_planned_ahead() -> None:
    engine = Engine(is_ahead=True)
    engine.step()
    add(engine, 4, 3)
    engine.step()
    assert engine.plans_ahead == {"no_step": 2}


class DraftsIn:
    """In place of a node's speculation: drafts one wrong token in the steps of these numbers."""

    method = "ngram"
    has_proposals = False

    def __init__(self, engine: Engine, *steps: int) -> None:
        self.steps, self.batches = steps, engine.runner.batches
        engine.draft_with(self)

    def drafts(self, decoding: list[Sequence]) -> list[tuple[int, ...]]:
        number = len(self.batches) + 1
        return [(0,) if number in self.steps else ()] * len(decoding)

    def learn(self, view: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert num_accepted == 0

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: nothing is remembered."""


@pytest.mark.covers("S60")
def test_drafts_prevent_it_before_and_after_their_step_and_no_other() -> None:
    engine = Engine(num_blocks=40, method="ngram", num_drafts=2, is_ahead=True)
    DraftsIn(engine, 4, 7)
    load = [add(engine, 6 + seed, 10, seed) for seed in range(2)]
    taken = []
    while status_of(load[0]) is not SequenceStatus.FINISHED:
        engine.step()
        taken.append(engine.was_ahead)
    assert [number for number, is_taken in enumerate(taken, 1) if not is_taken] == [1, 4, 5, 7, 8]
    assert engine.plans_ahead == {"no_step": 1, "taken": 5, "drafts": 4}
    check_answers(engine, *load)


def test_drafts_of_one_that_waits_for_a_block_are_not_those_of_a_later_step() -> None:
    engine = Engine(
        num_blocks=12, seats=2, budget=7, max_model_len=44, caching=False, is_ahead=True,
        method="ngram", num_drafts=1, **STRICT,
    )  # fmt: skip
    DraftsIn(engine, 7)
    one, long = add(engine, 3, 12, 1), add(engine, 40, 1, 2)
    engine.run_until(lambda: list(engine.scheduler.running) == [one])
    assert one.draft_token_ids, "it waited with a draft"
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [one]
    assert step.batch.num_drafts.tolist() == [0]
    engine.apply(step)
    engine.run()
    check_answers(engine, one, long)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_where_nothing_is_found_to_draft_it_is_taken(method: str) -> None:
    engine = Engine(num_blocks=40, method=method, num_drafts=2, is_ahead=True)
    one = add(engine, 6, 8)
    engine.run()
    check_answers(engine, one)
    assert engine.plans_ahead == {"no_step": 1, "taken": 7}


def test_proposals_of_the_runner_prevent_it() -> None:
    engine = Engine(num_blocks=40, method="mtp", num_drafts=2, is_ahead=True)
    one = add(engine, 6, 8)
    engine.run()
    check_answers(engine, one)
    assert engine.plans_ahead.keys() == {"no_step", "drafts"}


def test_proposals_to_a_prompt_that_leaves_prevent_nothing() -> None:
    engine = Engine(num_blocks=12, seats=1, budget=4, method="mtp", num_drafts=2, is_ahead=True)
    first, second = (engine.add(make_request(9, seed=i), is_exported=True) for i in (1, 2))
    engine.run_until(lambda: status_of(second) is SequenceStatus.EXPORTING)
    assert len(first.proposed_token_ids) == 2
    assert engine.plans_ahead.keys() == {"no_step", "taken"}
    for one in (first, second):
        engine.scheduler.release(one)
    check_idle(engine.scheduler)


@pytest.mark.covers("S60", "F146")
@pytest.mark.parametrize("mode", MODES)
def test_a_preemption_prevents_it(mode: str) -> None:
    engine = Engine(
        num_blocks=6, seats=4, caching=False, is_ahead=True, num_host_blocks=20,
        preemption_mode=mode, min_progress_tokens=0, **STRICT,
    )  # fmt: skip
    load = [add(engine, 8, 12, seed) for seed in range(4)]
    engine.run()
    check_answers(engine, *load)
    assert engine.num_preemptions >= 2
    assert engine.plans_ahead["blocks"] >= engine.num_preemptions / 2
    assert engine.plans_ahead["taken"] > 0


def test_one_that_starves_or_waits_for_a_block_prevents_it() -> None:
    engine = Engine(num_blocks=3, seats=2, caching=False, is_ahead=True, max_model_len=20, **STRICT)
    one = add(engine, 4, 12, 1)
    engine.run_until(lambda: one.num_known == 13)
    step = engine.plan()
    assert step.starved == [one]
    assert engine.plans_ahead["blocks"] == 1
    engine.scheduler.finish(one)
    check_idle(engine.scheduler)
    leaving = engine.add(make_request(4, seed=2), is_exported=True)
    engine.run()
    two = add(engine, 4, 6, 3)
    engine.run_until(lambda: two.num_known == 9)
    step = engine.plan()
    assert (list(step.batch), step.starved) == ([], [])
    assert engine.plans_ahead["blocks"] == 2
    engine.scheduler.release(leaving)
    engine.run()
    check_answers(engine, two)


def test_when_all_have_ended_the_next_ones_are_planned_at_once() -> None:
    engine = Engine(num_blocks=40, seats=1, is_ahead=True)
    first = add(engine, 5, 50, 1, **stopping_at(5, 1, 3))
    second = add(engine, 7, 3, 3)
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    step = engine.plan()
    assert step.sequences == [second]
    assert not engine.was_ahead
    assert engine.plans_ahead["nothing_left"] == 1
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second)


@pytest.mark.covers("S60")
@pytest.mark.parametrize("is_partly", [False, True])
def test_a_failed_step_prevents_it(is_partly: bool) -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    good, bad = add(engine, 5, 8, 1), add(engine, 6, 8, 2)
    engine.step()
    step = engine.plan()
    assert step.sequences == [good, bad]
    engine.plan_ahead(step)
    results = engine.runner.execute(step.batch)
    if is_partly:
        for output in engine.scheduler.apply(step.only([0]), results.only([0])):
            engine.outputs[output.sequence.sequence_id] += output.token_ids
        engine.scheduler.finish(bad)
    else:
        engine.scheduler.finish(good)
        engine.scheduler.finish(bad)
    engine.plan()
    assert engine.plans_ahead["failed"] == 1
    assert not engine.was_ahead


def test_a_plan_without_the_results_of_its_step_is_not_taken() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    add(engine, 5, 8, 1)
    engine.step()
    step = engine.plan()
    engine.plan_ahead(step)
    again = engine.plan()
    assert engine.plans_ahead["failed"] == 1
    assert again.batch.starts.tolist() == step.batch.starts.tolist()


@pytest.mark.covers("S60")
def test_a_request_that_arrives_is_planned_at_once() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    first = add(engine, 5, 8, 1)
    engine.step()
    engine.step()
    second = add(engine, 6, 4, 2)
    step = engine.plan()
    assert step.sequences == [first, second]
    assert engine.plans_ahead["new_work"] == 1
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second)


@pytest.mark.parametrize("has_priorities", [False, True])
def test_a_request_that_no_plan_would_look_at_prevents_nothing(has_priorities: bool) -> None:
    """Seats are full; then blocks are, and more wait than may pass the head of the queue."""
    for seats, num_blocks, num_waiting in ((2, 40, 1), (8, 7, 3)):
        engine = Engine(
            num_blocks=num_blocks, seats=seats, caching=False, is_ahead=True,
            enable_priority_scheduling=has_priorities, **{**STRICT, "skip_ahead_window": 2},
        )  # fmt: skip
        load = [add(engine, 9, 4, seed) for seed in range(2 + num_waiting)]
        engine.step()
        load.append(add(engine, 9, 4, 7))
        engine.step()
        assert engine.was_ahead != has_priorities
        engine.run()
        check_answers(engine, *load)


def test_one_that_could_pass_the_head_of_the_queue_is_planned_at_once() -> None:
    engine = Engine(
        num_blocks=8, seats=8, caching=False, is_ahead=True, **{**STRICT, "skip_ahead_window": 1}
    )
    load = [add(engine, 9, 4, 1), add(engine, 20, 4, 2)]
    engine.step()
    load.append(add(engine, 4, 4, 3))
    step = engine.plan()
    assert step.sequences == [load[0], load[2]]
    assert engine.plans_ahead["new_work"] == 1
    engine.apply(step)
    engine.run()
    check_answers(engine, *load)


def test_one_that_passes_the_head_of_the_queue_is_seated_ahead() -> None:
    engine = Engine(
        num_blocks=9, seats=2, caching=False, is_ahead=True, **{**STRICT, "skip_ahead_window": 1}
    )
    first, second = add(engine, 5, 4, 1), add(engine, 12, 12, 2)
    head, passing = add(engine, 20, 2, 3), add(engine, 4, 2, 4)
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [second, passing]
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second, head, passing)


def test_a_request_behind_a_head_that_nobody_may_pass_prevents_nothing() -> None:
    strict = {**STRICT, "skip_ahead_window": 4, "skip_ahead_limit": 1}
    engine = Engine(num_blocks=8, seats=8, caching=False, is_ahead=True, **strict)
    load = [add(engine, 9, 8, 1), add(engine, 20, 4, 2), add(engine, 2, 2, 3)]
    engine.step()
    assert engine.scheduler.statistics().counters.stops["barrier"] == 1
    engine.step()
    load.append(add(engine, 2, 2, 4))
    engine.step()
    assert engine.was_ahead
    engine.run()
    check_answers(engine, *load)


@pytest.mark.parametrize("num_held_back", [0, 1])
def test_one_that_comes_to_the_front_of_the_queue_is_not_passed_by_a_plan_without_it(
    num_held_back: int,
) -> None:
    """It arrived before those that wait, and was held for its grammar or a prefix until now.

    The plan ends for want of a seat, at the last of the queue or before it.
    """
    engine = Engine(num_blocks=40, seats=2, is_ahead=True)
    first, other = add(engine, 5, 4, 1), add(engine, 6, 12, 2)
    held = engine.make(make_request(6, seed=3, max_tokens=3, ignore_eos=True))
    behind = [add(engine, 7, 3, 4 + number) for number in range(1 + num_held_back)]
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    engine.scheduler.add(held)
    step = engine.plan()
    assert step.sequences == [other, held]
    assert engine.plans_ahead["new_work"] == 1
    assert [one.num_bypassed for one in behind] == [0] * len(behind)
    engine.apply(step)
    engine.run()
    check_answers(engine, first, other, held, *behind)


@pytest.mark.covers("S60")
def test_a_landed_sequence_decodes_at_once() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    local, remote = add(engine, 5, 12, 1), engine.add(make_request(9, seed=2), has_remote_kv=True)
    for _ in range(3):
        engine.step()
    engine.land(remote)
    step = engine.plan()
    assert step.sequences == [local, remote]
    assert engine.plans_ahead["new_work"] == 1
    engine.apply(step)
    engine.run()
    assert engine.outputs[remote.sequence_id] == answer(remote)


@pytest.mark.covers("S60", "F146")
def test_an_aborted_sequence_is_left_out_whether_it_runs_or_waits() -> None:
    engine = Engine(num_blocks=40, seats=2, is_ahead=True)
    first, second = add(engine, 5, 4, 1), add(engine, 5, 12, 2)
    waiting, last = add(engine, 6, 4, 3), add(engine, 7, 4, 4)
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    engine.scheduler.finish(waiting)  # the plan seats it in place of the first
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [second]
    engine.apply(step)
    engine.scheduler.finish(second)
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [last]
    engine.apply(step)
    engine.run()
    check_answers(engine, first, last)


@pytest.mark.covers("S60")
def test_a_prefix_that_the_step_computed_is_not_computed_again() -> None:
    engine = Engine(num_blocks=40, seats=4, budget=13, is_ahead=True)
    prompt = make_request(13, seed=1).prompt_token_ids
    first = engine.add(make_request((*prompt, 1), max_tokens=3))
    second = engine.add(make_request((*prompt, 2), max_tokens=3))
    engine.step()
    step = engine.plan()
    assert engine.plans_ahead["prefix"] == 1
    assert step.sequences == [first, second]
    assert second.num_cached_tokens == 12
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second)


def test_one_that_fits_by_a_prefix_that_the_step_computed_waits_a_step_longer() -> None:
    engine = Engine(num_blocks=6, is_ahead=True, **STRICT)
    prompt = make_request(13, seed=1).prompt_token_ids
    first, second = (engine.add(make_request((*prompt, i), max_tokens=6)) for i in (1, 2))
    engine.step()
    engine.step()
    assert engine.was_ahead
    assert status_of(second) is SequenceStatus.WAITING
    step = engine.plan()
    assert step.sequences == [first, second]
    assert second.num_cached_tokens == 12
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second)


def test_blocks_of_a_dropped_entry_are_published_only_as_far_as_they_were_computed() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    # Its last token fills a block: as an end token it is known, and its KV never computed.
    one = add(engine, 5, 50, 1, **stopping_at(5, 1, 6))
    other = add(engine, 6, 20, 2)
    engine.run_until(lambda: status_of(one) is SequenceStatus.FINISHED)
    assert (one.num_known, one.num_computed) == (12, 11)
    assert len(one.block_hashes) == 2
    again = engine.add(make_request((*one.prompt_token_ids, *answer(one)), max_tokens=2, seed=1))
    assert engine.scheduler.num_cached_tokens(again) == 8
    engine.run()
    check_answers(engine, other, again)


def test_stopping_at_the_last_possible_token_by_a_token_is_the_same_end() -> None:
    engine = Engine(num_blocks=40, is_ahead=True)
    one = add(engine, 5, 4, 1, **stopping_at(5, 1, 3))
    other = add(engine, 6, 9, 2)
    engine.run()
    check_answers(engine, one, other)


def test_a_plan_without_some_sequences_counts_what_is_left() -> None:
    plan = StepPlan(
        chunks={1: Chunk(1), 2: Chunk(1, 1, num_drafts=3), 3: Chunk(7), 4: Chunk(5)},
        admissions=[Admission(5, (), 2, 6), Admission(6, (), 2, 4)],
        bypassed={7: [5, 6], 8: [6]},
        stopped_by=StopRule.NO_SEAT,
        num_decode_tokens=2,
        num_draft_tokens=3,
        num_chunk_tokens=22,
    )
    assert plan.without(set()) == plan
    left = plan.without({2, 3, 6})
    assert list(left.chunks) == [1, 4]
    assert [one.sequence_id for one in left.admissions] == [5]
    counts = (left.num_decode_tokens, left.num_draft_tokens, left.num_chunk_tokens)
    assert counts == (1, 0, 11)
    assert left.num_tokens == 12
    assert left.bypassed == {7: [5], 8: []}
    assert left.stopped_by is StopRule.NO_SEAT
    assert plan.num_tokens == 27


def test_every_rule_has_its_test_here() -> None:
    assert {rule.value for rule in AheadRule} == {
        "taken", "no_step", "drafts", "blocks", "nothing_left", "failed", "new_work", "prefix",
        "begun",  # in test_going_on.py
    }  # fmt: skip
