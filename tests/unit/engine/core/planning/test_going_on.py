"""Steps that the runner begins before the one before has ended: which ones, and what changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.core.planner_contract import StopRule
from engine.core.planning.going_on import rows_after
from engine.core.runner_contract import RunnerResult
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import BlockCopy, PlannedStep
from engine.core.step_after import STEPS_WITHOUT_DRAFTS
from tests.support.engine.build import STRICT, Engine, check_idle, make_request, status_of
from tests.support.engine.hash_runner import VOCAB_SIZE, expected_tokens

WHEN = pytest.mark.parametrize("goes_on", ["early", "late"])


def engine_that(goes_on: str, **given: Any) -> Engine:
    return Engine(**{"num_blocks": 60, "is_ahead": True, "goes_on": goes_on, **given})


def add(engine: Engine, length: int, max_tokens: int, seed: int = 0, **given: Any) -> Sequence:
    request = make_request(length, seed=seed, max_tokens=max_tokens, ignore_eos=True, **given)
    return engine.add(request)


def stopping_at(length: int, seed: int, index: int) -> dict[str, Any]:
    """Stop tokens that end the output of such a request with token `index`, and not before."""
    request = make_request(length, seed=seed, max_tokens=50, ignore_eos=True)
    answer = expected_tokens(request.prompt_token_ids, request.sampling)
    assert answer.index(answer[index]) == index
    return {"stop_token_ids": (answer[index],)}


def check_answers(engine: Engine, *sequences: Sequence) -> None:
    for one in sequences:
        right = expected_tokens(one.request.prompt_token_ids, one.request.sampling)
        assert engine.outputs[one.sequence_id] == right
    check_idle(engine.scheduler)


@pytest.mark.covers("S61")
@WHEN
def test_all_steps_of_a_steady_load_but_the_first_two_are_begun_ahead(goes_on: str) -> None:
    engine = engine_that(goes_on)
    load = [add(engine, 5 + seed, 20 + seed, seed) for seed in range(4)]
    engine.run()
    check_answers(engine, *load)
    # The prompts, a plan made while they ran, and then every step but that of the first token.
    assert engine.plans_ahead == {"no_step": 1, "taken": 1, "begun": 21}
    assert (engine.runner.num_begun, engine.runner.num_forgotten) == (21, 0)
    assert engine.scheduler.statistics().counters.num_steps == 23


def test_a_runner_that_does_not_go_on_is_offered_nothing_and_given_no_block_early() -> None:
    held = {}
    for goes_on in ("", "early"):
        engine = engine_that(goes_on)
        one = add(engine, 4, 9)
        engine.step()
        engine.step()
        step = engine.plan()
        held[goes_on] = len(one.block_table)
        assert (one.num_known, step.batch.starts.tolist()) == (6, [5])
        assert (step.batch.going_on is None) is (goes_on == "")
        engine.apply(step)
        step = engine.plan()
        assert len(one.block_table) == 2
        engine.apply(step)
        step = engine.plan()
        assert one.num_known == 8
        assert len(one.block_table) == (3 if goes_on else 2)
        engine.apply(step)
        engine.run()
        check_answers(engine, one)
    assert held == {"": 2, "early": 2}


@pytest.mark.covers("S61")
@WHEN
def test_one_that_its_token_ends_is_left_out_of_the_step_that_runs_with_it(goes_on: str) -> None:
    engine = engine_that(goes_on)
    short = add(engine, 5, 50, 1, **stopping_at(5, 1, 3))
    others = [add(engine, 6, 12, seed) for seed in (2, 3)]
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    assert not short.block_table
    step = engine.plan()
    assert step.sequences == others
    assert step.batch.continues is not None
    assert step.batch.continues.tolist() == [1, 2]
    assert step.num_tokens == 2
    engine.apply(step)
    engine.run()
    check_answers(engine, short, *others)
    assert engine.runner.num_forgotten == 0


@WHEN
def test_those_that_end_by_their_length_are_not_offered(goes_on: str) -> None:
    engine = engine_that(goes_on)
    short, long = add(engine, 5, 3, 1), add(engine, 6, 12, 2)
    engine.step()
    engine.step()
    step = engine.plan()
    assert step.batch.going_on is not None
    assert step.batch.going_on.tolist() == [1]
    engine.apply(step)
    assert status_of(short) is SequenceStatus.FINISHED
    engine.run()
    check_answers(engine, short, long)


@WHEN
def test_where_all_have_ended_the_step_is_forgotten(goes_on: str) -> None:
    engine = engine_that(goes_on, seats=1)
    short = add(engine, 5, 50, 1, **stopping_at(5, 1, 4))
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    after = add(engine, 9, 5, 3)
    step = engine.plan()
    assert step.sequences == [after]
    assert step.batch.continues is None
    assert engine.plans_ahead["nothing_left"] == 1
    engine.apply(step)
    assert engine.runner.num_forgotten == 1
    engine.run()
    check_answers(engine, short, after)


@WHEN
def test_an_aborted_sequence_is_left_out(goes_on: str) -> None:
    engine = engine_that(goes_on)
    gone, stays = add(engine, 5, 30, 1), add(engine, 6, 12, 2)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish(gone)
    step = engine.plan()
    assert step.sequences == [stays]
    assert step.batch.continues is not None
    assert step.batch.continues.tolist() == [1]
    engine.apply(step)
    engine.run()
    check_answers(engine, stays)


@pytest.mark.covers("S61")
@WHEN
def test_an_arrival_waits_for_one_step_and_is_computed_in_the_next(goes_on: str) -> None:
    engine = engine_that(goes_on)
    first = add(engine, 5, 20, 1)
    for _ in range(4):
        engine.step()
    second = add(engine, 7, 6, 2)
    step = engine.plan()
    assert step.sequences == [first]
    assert step.stopped_by is StopRule.BEGUN
    assert step.batch.going_on is None, "it would make the arrival wait again"
    engine.apply(step)
    step = engine.plan()
    assert step.sequences == [first, second]
    engine.apply(step)
    engine.run()
    check_answers(engine, first, second)


@pytest.mark.covers("S61")
@WHEN
def test_a_landing_waits_for_one_step(goes_on: str) -> None:
    engine = engine_that(goes_on)
    first = add(engine, 5, 30, 1)
    engine.step()
    second = engine.add(make_request(9, seed=2, max_tokens=6), has_remote_kv=True)
    for _ in range(4):
        engine.step()
    assert engine.plans_ahead["begun"] >= 1, "KV that is on its way prevents nothing"
    engine.land(second)
    step = engine.plan()
    assert step.sequences == [first]
    assert step.batch.going_on is None
    engine.apply(step)
    assert engine.step()[1].sequence is second
    engine.run()
    check_answers(engine, first, second)


@WHEN
def test_with_all_seats_taken_and_a_queue_it_goes_on(goes_on: str) -> None:
    engine = engine_that(goes_on, seats=2)
    load = [add(engine, 5, 12, seed) for seed in range(5)]
    engine.run()
    check_answers(engine, *load)
    assert engine.plans_ahead["begun"] > engine.scheduler.statistics().counters.num_steps / 2


@WHEN
def test_with_priorities_nobody_who_waits_is_kept_waiting(goes_on: str) -> None:
    engine = engine_that(goes_on, seats=1, enable_priority_scheduling=True)
    load = [add(engine, 5, 6, 1), add(engine, 5, 6, 2)]
    engine.run_until(lambda: len(engine.scheduler.waiting) == 0)
    assert "begun" not in engine.plans_ahead
    engine.run()
    check_answers(engine, *load)


@pytest.mark.covers("S61")
@WHEN
@pytest.mark.parametrize("num_blocks", [6, 7, 8])
def test_blocks_given_early_preempt_nobody_and_make_nobody_wait(
    goes_on: str, num_blocks: int
) -> None:
    """Pools of exactly as many blocks as are needed at once, and of fewer."""
    counts = []
    for mode in ("", goes_on):
        engine = engine_that(mode, num_blocks=num_blocks, seats=4, caching=False, **STRICT)
        load = [add(engine, 3, 5, seed) for seed in range(4)]
        engine.run()
        check_answers(engine, *load)
        counters = engine.scheduler.statistics().counters
        counts.append((engine.num_preemptions, counters.num_recomputed_tokens))
    assert counts[0] == counts[1]
    assert (counts[0][0] > 0) is (num_blocks < 8)


@pytest.mark.covers("S61")
@WHEN
def test_one_that_was_left_behind_is_in_the_step_after_the_next(goes_on: str) -> None:
    engine = engine_that(goes_on)
    left, *others = (add(engine, 5, 12, seed) for seed in (1, 2, 3))
    for _ in range(2):
        engine.step()
    first = engine.plan()
    results = engine.runner.execute(first.batch)
    results.left_behind = frozenset({0})
    engine.plan_ahead(first)
    for output in engine.scheduler.apply(first, results):
        engine.outputs[output.sequence.sequence_id] += output.token_ids
    step = engine.plan()
    assert step.sequences == others
    assert step.batch.continues is not None
    assert step.batch.continues.tolist() == [1, 2]
    assert step.batch.going_on is None, "one that runs is not in it"
    engine.apply(step)
    step = engine.plan()
    assert step.sequences == [left, *others]
    assert step.batch.continues is None
    assert step.batch.going_on is not None
    engine.apply(step)
    engine.run()
    check_answers(engine, left, *others)


@WHEN
def test_where_all_are_left_behind_the_step_is_forgotten(goes_on: str) -> None:
    engine = engine_that(goes_on, leaves_one_in=1)
    load = [add(engine, 5, 8, seed) for seed in (1, 2)]
    engine.run()
    check_answers(engine, *load)
    assert engine.runner.num_begun == engine.runner.num_forgotten > 3
    assert "begun" not in engine.plans_ahead


@WHEN
def test_one_that_is_left_behind_is_preempted_or_aborted_as_any_other(goes_on: str) -> None:
    engine = engine_that(goes_on, num_blocks=7, seats=3, caching=False, leaves_one_in=3, **STRICT)
    load = [add(engine, 3, 9, seed) for seed in range(3)]
    gone = add(engine, 4, 12, 5)
    engine.run_until(lambda: engine.runner.num_left_behind > 4 and bool(gone.num_output))
    engine.scheduler.finish(gone)
    engine.run()
    check_answers(engine, *load)
    assert engine.num_preemptions > 0


def test_a_part_of_results_knows_who_is_left_behind() -> None:
    results = RunnerResult([None, None, None], left_behind=[0, 2])
    assert results.only([2, 1]).left_behind == {0}
    assert results.only([1]).left_behind == frozenset()


class Drafts:
    """In place of a node's speculation: a wrong draft for each sequence while it `finds` any."""

    method = "ngram"
    has_proposals = finds = False

    def __init__(self, engine: Engine) -> None:
        engine.draft_with(self)

    def drafts(self, decoding: list[Sequence]) -> list[tuple[int, ...]]:
        return [self._wrong(one) if self.finds else () for one in decoding]

    def _wrong(self, one: Sequence) -> tuple[int, ...]:
        answer = expected_tokens(one.prompt_token_ids, one.request.sampling)
        return ((answer[one.num_output] + 1) % VOCAB_SIZE,)

    def learn(self, view: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert num_accepted == 0

    def forget(self, view: Sequence) -> None:
        pass


@pytest.mark.covers("S61")
@WHEN
def test_a_node_that_has_found_no_drafts_for_some_steps_goes_on(goes_on: str) -> None:
    engine = engine_that(goes_on, method="ngram", num_drafts=2)
    Drafts(engine)
    for _ in range(STEPS_WITHOUT_DRAFTS):
        engine.step()  # in idle turns nothing is looked for
    load = [add(engine, 5, STEPS_WITHOUT_DRAFTS + 9, seed) for seed in (1, 2)]
    for _ in range(STEPS_WITHOUT_DRAFTS):
        engine.step()
        assert engine.runner.num_begun == 0
    engine.run()
    check_answers(engine, *load)
    assert engine.plans_ahead["begun"] == engine.runner.num_begun == 8


@pytest.mark.covers("S61")
@WHEN
def test_drafts_that_are_found_too_late_are_verified_in_the_step_after(goes_on: str) -> None:
    engine = engine_that(goes_on, method="ngram", num_drafts=2)
    drafts = Drafts(engine)
    load = [add(engine, 5, 60, seed) for seed in (1, 2)]
    engine.run_until(lambda: engine.runner.num_begun == 3)
    drafts.finds = True
    step = engine.plan()
    assert (step.batch.continues is None, step.has_drafts) == (False, False)
    assert step.batch.going_on is None
    engine.apply(step)
    step = engine.plan()
    assert step.batch.num_drafts.tolist() == [1, 1]
    drafts.finds = False
    engine.apply(step)
    for _ in range(STEPS_WITHOUT_DRAFTS // 2):
        assert engine.runner.num_begun == 3
        engine.step()
    assert engine.runner.num_begun == 4
    engine.run()
    check_answers(engine, *load)
    assert engine.runner.num_forgotten == 0


def verify_drafts(engine: Engine, drafts: Drafts) -> None:
    """Run steps up to one with drafts: the next one, or behind one that was begun."""
    drafts.finds = True
    for _ in range(2):
        step = engine.plan()
        if step.has_drafts:
            break
        engine.apply(step)
    assert step.has_drafts
    drafts.finds = False
    engine.apply(step)


def steps_until_begun(engine: Engine, drafts: Drafts) -> int:
    """Return how many steps without drafts run after one with them, until one is begun."""
    verify_drafts(engine, drafts)
    begun = engine.runner.num_begun
    for count in range(1, 60):
        engine.step()
        if engine.runner.num_begun > begun:
            return count
    raise AssertionError("none was begun")


@pytest.mark.covers("S61")
@WHEN
def test_a_node_waits_for_drafts_as_long_as_they_have_come_in_the_wait(goes_on: str) -> None:
    """Each draft that comes after it halves it, down to 2; one in the middle of it doubles it."""
    engine = engine_that(goes_on, method="ngram", num_drafts=2)
    drafts = Drafts(engine)
    load = [add(engine, 5, 58, seed) for seed in (1, 2)]
    engine.run_until(lambda: engine.runner.num_begun == 1)
    waits = [steps_until_begun(engine, drafts) for _ in range(4)]
    assert waits == [8, 4, 2, 2]
    verify_drafts(engine, drafts)
    engine.step()
    assert steps_until_begun(engine, drafts) == 4
    engine.run()
    check_answers(engine, *load)


@pytest.mark.covers("S61")
@WHEN
def test_a_node_waits_for_drafts_for_so_many_steps_at_most(goes_on: str) -> None:
    engine = engine_that(goes_on, method="ngram", num_drafts=2)
    drafts = Drafts(engine)
    load = [add(engine, 5, 58, seed) for seed in (1, 2)]
    for _ in range(3):
        engine.step()
    verify_drafts(engine, drafts)
    engine.step()
    assert steps_until_begun(engine, drafts) == STEPS_WITHOUT_DRAFTS
    engine.run()
    check_answers(engine, *load)


def test_a_node_whose_model_drafts_does_not_go_on() -> None:
    """Its layer computes every token too, and drafts from the hidden state of the row that drew."""
    engine = engine_that("early", method="mtp", num_drafts=2)
    Drafts(engine)
    one = add(engine, 6, 40)
    engine.run()
    check_answers(engine, one)
    assert engine.runner.num_begun == 0


def test_a_step_that_failed_in_part_goes_on_without_those_that_did() -> None:
    engine = engine_that("late")
    bad, good = add(engine, 5, 20, 1), add(engine, 6, 12, 2)
    for _ in range(3):
        engine.step()
    step = engine.plan()
    results = engine.runner.execute(step.batch)
    engine.plan_ahead(step)
    outputs = engine.scheduler.apply(step.only([1]), results.only([1]))
    engine.outputs[good.sequence_id] += outputs[0].token_ids
    engine.scheduler.finish(bad)
    step = engine.plan()
    assert step.sequences == [good]
    assert step.batch.continues is not None
    assert step.batch.continues.tolist() == [1]
    engine.apply(step)
    engine.run()
    check_answers(engine, good)


def behind(step: PlannedStep, engine: Engine, **given: Any) -> list[int] | None:
    settings: dict[str, Any] = {
        "num_running": len(step.sequences), "num_waiting": 0, "has_seat": True,
        "num_available": 9, "block_size": 4,
    }  # fmt: skip
    rows = rows_after(step, engine.scheduler.seats, **(settings | given))
    return None if rows is None else rows.entries.tolist()


@pytest.fixture
def engine() -> Engine:
    return Engine(num_blocks=40)


@pytest.fixture
def step(engine: Engine) -> PlannedStep:
    """A step of two sequences with 8 and 9 tokens; the first needs a block for its next one."""
    for length in (7, 8):
        add(engine, length, 3, length)
    engine.step()
    return engine.plan()


@pytest.mark.covers("S61")
def test_what_prevents_that_a_step_goes_on(engine: Engine, step: PlannedStep) -> None:
    assert behind(step, engine) == [0, 1]
    assert behind(step, engine, num_running=3) is None, "one that runs is not in it"
    assert behind(step, engine, num_waiting=1) is None
    assert behind(step, engine, num_waiting=1, has_seat=False) == [0, 1]
    assert behind(step, engine, num_available=1) == [0, 1]
    assert behind(step, engine, num_available=0) is None
    for name in ("swap_outs", "swap_ins", "swap_copies", "reserved"):
        one: Any = BlockCopy([1], [2])
        getattr(step, name).append(one)
        assert behind(step, engine) is None, name
        getattr(step, name).clear()
    step.batch.is_plain_decodes = False
    assert behind(step, engine) is None
    step.batch.is_plain_decodes = True
    assert behind(step, engine) == [0, 1]


def test_a_seat_that_gets_free_for_certain_is_a_seat(engine: Engine, step: PlannedStep) -> None:
    seats = engine.scheduler.seats
    seats.max_new_tokens[step.batch.rows[1]] = 2
    assert behind(step, engine) == [0]
    assert behind(step, engine, num_waiting=1, has_seat=False) is None
    seats.max_new_tokens[step.batch.rows] = 2
    assert behind(step, engine) is None
    assert np.array_equal(step.batch.starts, [7, 8])
