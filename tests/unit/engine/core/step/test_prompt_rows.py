"""Which rows of a step log probabilities of a prompt are asked for."""

from __future__ import annotations

from typing import NoReturn

from engine.core.sequences.seats import Seats
from engine.core.step.prompt_rows import prompt_rows
from engine.core.step.step_batch import StepBatch

NUM_PROMPT = 10
TOP = 2


def one_chunk(start: int, num_tokens: int, *, num_known: int = NUM_PROMPT) -> StepBatch:
    """A chunk of a prompt of the tokens 100 to 109, of which log probabilities are asked for."""
    seats = Seats(1, NUM_PROMPT + 5, 1)
    seats.token_ids[0, :NUM_PROMPT] = range(100, 100 + NUM_PROMPT)
    seats.num_prompt[0], seats.num_known[0] = NUM_PROMPT, num_known
    seats.num_prompt_logprobs[0] = TOP
    is_sampled = start + num_tokens == num_known

    def no_view(entry: int) -> NoReturn:
        raise AssertionError(f"entry {entry} is not looked at")

    return StepBatch(seats, range(1), [start], [num_tokens], [0], [is_sampled], no_view)


def following(batch: StepBatch) -> list[int]:
    """The tokens whose log probabilities are asked for, in one entry or none."""
    rows = prompt_rows(batch)
    assert all((each.entry, each.num_top) == (0, TOP) for each in rows)
    return [token_id for each in rows for token_id in each.following.tolist()]


def test_each_chunk_asks_for_the_tokens_behind_its_own_rows() -> None:
    assert following(one_chunk(0, 4)) == [101, 102, 103, 104]
    assert following(one_chunk(4, 3)) == [105, 106, 107]


def test_behind_the_last_token_of_a_prompt_nothing_is_asked_for() -> None:
    assert following(one_chunk(7, 3)) == [108, 109]
    assert following(one_chunk(9, 1)) == []


def test_a_prompt_that_is_computed_again_below_an_output_has_no_such_rows() -> None:
    assert following(one_chunk(0, 4, num_known=NUM_PROMPT + 1)) == []


def test_without_a_request_for_them_there_are_none() -> None:
    batch = one_chunk(0, 4)
    batch.seats.num_prompt_logprobs[0] = -1
    assert prompt_rows(batch) == []
