"""Steps that no scheduler should have planned are noticed, and steps that are to fail do."""

from __future__ import annotations

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence, SequencesFailed
from engine.core.step.step_batch import StepBatch, batch_of
from simulator.faults.contents import KVMemory
from simulator.faults.hosts import ProcessClock
from simulator.faults.node.steps import ComputedExecution, WrongStep
from simulator.timeline import Timeline

BLOCK_SIZE, MOST_TOKENS = 4, 6


def an_execution() -> ComputedExecution:
    memory = KVMemory(8, 0, BLOCK_SIZE)
    clock = ProcessClock(Timeline())
    return ComputedExecution(clock, memory, 1.0, MOST_TOKENS, plans_ahead=False)


def an_entry(start: int, num_tokens: int, table: list[int]) -> ScheduledSequence:
    """Return an entry that draws a token."""
    known = [3] * (start + num_tokens)
    sample = SampleInput(SamplingParams(max_tokens=9), 0, known, ())
    return ScheduledSequence(1, [3] * num_tokens, start, table, sample)


def a_batch(start: int, num_tokens: int, num_blocks: int) -> StepBatch:
    """Return a step of one sequence."""
    return batch_of([an_entry(start, num_tokens, list(range(num_blocks)))])


def followed(batch: StepBatch) -> StepBatch:
    """Return a step behind which another one may begin."""
    batch.going_on = np.array([0], np.int64)
    return batch


def test_a_step_has_no_more_tokens_than_its_budget() -> None:
    an_execution().begin(a_batch(0, MOST_TOKENS, 2), None)
    with pytest.raises(WrongStep, match="a step of more tokens than its budget has"):
        an_execution().begin(a_batch(0, MOST_TOKENS + 1, 2), None)


def test_each_token_has_a_block() -> None:
    execution = an_execution()
    execution.begin(a_batch(0, BLOCK_SIZE, 1), None)
    execution.wait()
    execution.begin(a_batch(0, BLOCK_SIZE + 1, 1), None)
    with pytest.raises(WrongStep, match="tokens without a block"):
        execution.wait()


def test_a_step_that_is_offered_has_blocks() -> None:
    execution = an_execution()
    execution.begin(followed(a_batch(0, BLOCK_SIZE - 1, 1)), None)
    execution.wait()
    execution.begin(followed(a_batch(0, BLOCK_SIZE, 1)), None)
    with pytest.raises(WrongStep, match="a step was offered without a block for every entry"):
        execution.wait()


@pytest.mark.parametrize(("start", "num_blocks", "is_wrong"), [(2, 2, False), (3, 2, True)])
def test_a_step_that_has_begun_is_the_one_that_is_planned(
    start: int, num_blocks: int, is_wrong: bool
) -> None:
    execution = an_execution()
    execution.begin(followed(a_batch(0, 2, 2)), None)
    (drawn,) = execution.wait()[0]
    assert drawn is not None
    batch = a_batch(start, 1, num_blocks)
    batch.continues = np.array([0], np.int64)
    if not is_wrong:
        execution.begin(batch, None)
        return
    with pytest.raises(WrongStep, match="the step that has begun computes"):
        execution.begin(batch, None)


def test_steps_that_are_to_fail_have_written_something_else() -> None:
    tables = [0], [1]
    right, all_fail, some_fail = an_execution(), an_execution(), an_execution()
    all_fail.failing, some_fail.failing = "all", "some"
    for execution in (right, all_fail, some_fail):
        execution.begin(batch_of([an_entry(0, 2, table) for table in tables]), None)
    results, _ = right.wait()
    assert None not in results
    with pytest.raises(RuntimeError, match="the step has failed"):
        all_fail.wait()
    with pytest.raises(SequencesFailed) as failed:
        some_fail.wait()
    assert failed.value.errors.keys() == {1}
    assert [one is None for one in failed.value.results] == [False, True]
    assert failed.value.results[0] == results[0]
