"""A part of a step's batch has the entries that were asked for, with all their columns."""

from __future__ import annotations

import numpy as np

from common.prompt_logprobs import PromptLogprobs
from common.request import SamplingParams
from engine.core.runner_contract import DrawnTokens, RunnerResult, SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of

COLUMNS = ("starts", "num_tokens", "num_drafts", "is_sampled", "is_decode", "num_proposals")


def entry(number: int) -> ScheduledSequence:
    """An entry whose counts differ from those of every other; odd ones sample."""
    token_ids = list(range(10 * number, 10 * number + 5 + number))
    sample = SampleInput(SamplingParams(max_tokens=9), 0, token_ids[:-number], [])
    return ScheduledSequence(
        number,
        token_ids,
        0,
        [2 * number, 2 * number + 1],
        sample if number % 2 else None,
        num_drafts=number if number % 2 else 0,
        num_proposals=20 + number,
        next_token_id=None if number % 2 else 99,
    )


def test_a_part_has_the_columns_and_views_of_its_entries() -> None:
    entries = [entry(number) for number in range(1, 6)]
    batch = batch_of(entries)
    batch.is_decode[[1, 4]] = True
    assert list(batch) == entries
    for chosen in ([], [0], [3, 1], [1, 2, 4], range(5)):
        part = batch.only(list(chosen))
        assert list(part) == [entries[i] for i in chosen]
        for column in COLUMNS:
            whole, found = getattr(batch, column), getattr(part, column)
            np.testing.assert_array_equal(found, whole[np.array(chosen, np.int64)])
        tables = part.seats.block_tables[part.rows]
        assert tables.tolist() == [list(entries[i].block_table) for i in chosen]


def test_a_part_of_a_part() -> None:
    batch = batch_of([entry(number) for number in range(1, 6)])
    part = batch.only([4, 2, 0]).only([2, 1])
    assert [view.sequence_id for view in part] == [1, 3]
    assert part.num_proposals.tolist() == [21, 23]


def test_the_drafts_of_an_entry_are_its_last_tokens() -> None:
    entries = [entry(number) for number in range(1, 6)]
    batch = batch_of(entries)
    drafts = [batch.drafts(i) for i in range(5)]
    assert drafts == [[15], [], [35, 36, 37], [], [55, 56, 57, 58, 59]]


def test_a_part_of_a_result_has_what_its_entries_drew_and_their_prompt_logprobs() -> None:
    drawn = [DrawnTokens((i,)) if i % 2 else None for i in range(5)]
    scores = [PromptLogprobs(0, (-float(i),), (1,), (), ()) for i in range(5)]
    whole = RunnerResult(drawn, {1: scores[1], 4: scores[4]})
    for chosen in ([], [0], [4, 1], [1, 2, 3], range(5)):
        part = whole.only(list(chosen))
        assert list(part) == [drawn[i] for i in chosen]
        assert part.prompt_logprobs == {
            place: scores[i] for place, i in enumerate(chosen) if i in (1, 4)
        }
    assert RunnerResult().prompt_logprobs == {}
