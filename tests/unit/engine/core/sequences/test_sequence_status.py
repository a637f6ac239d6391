"""The transition table: what is allowed, and that everything else is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import TRANSITIONS, SequenceStatus, check_transition
from tests.support.engine.build import make_request, take_seat

_S = SequenceStatus
ALLOWED = {
    (_S.WAITING, _S.RUNNING_PREFILL),
    (_S.WAITING, _S.WAITING_FOR_KV),
    (_S.WAITING_FOR_KV, _S.RUNNING_DECODE),
    (_S.RUNNING_PREFILL, _S.RUNNING_DECODE),
    (_S.RUNNING_PREFILL, _S.EXPORTING),
    (_S.RUNNING_DECODE, _S.PREEMPTED),
    (_S.RUNNING_DECODE, _S.EXPORTING),
    (_S.PREEMPTED, _S.RUNNING_PREFILL),
    (_S.PREEMPTED, _S.RUNNING_DECODE),
    (_S.PREEMPTED, _S.SWAPPING_IN),
    (_S.SWAPPING_IN, _S.RUNNING_DECODE),
    (_S.SWAPPING_IN, _S.PREEMPTED),
    *((old, _S.FINISHED) for old in _S if old is not _S.FINISHED),
}


@pytest.mark.covers("S16")
@pytest.mark.parametrize(("old", "new"), list(product(_S, _S)))
def test_each_transition_is_allowed_or_refused_by_name(
    old: SequenceStatus, new: SequenceStatus
) -> None:
    if (old, new) in ALLOWED:
        check_transition(old, new)
    else:
        with pytest.raises(ValueError, match=f"from {old.value} to {new.value}"):
            check_transition(old, new)


def test_the_table_has_a_row_for_every_status() -> None:
    assert set(TRANSITIONS) == set(SequenceStatus)


def test_a_refused_move_leaves_the_status_as_it_was() -> None:
    sequence = Sequence(1, make_request(3))
    with pytest.raises(ValueError, match="running_decode"):
        sequence.move_to(SequenceStatus.RUNNING_DECODE)
    assert sequence.status is SequenceStatus.WAITING


def known_three_and_two(place: str) -> Sequence:
    """A sequence with a prompt of three tokens and two more; they came one by one if seated."""
    output = (20, 21) if place == "waiting" else ()
    sequence = Sequence(1, make_request((10, 11, 12), seed=9, output_token_ids=output))
    if place != "waiting":
        seats = take_seat(sequence, [3], num_computed=3)
        seats.append(sequence.seat, [20])
        seats.append_one_each(np.array([sequence.seat]), np.array([4]), np.array([21]))
    if place == "left":
        sequence.leave_seat()
    return sequence


@pytest.mark.parametrize("place", ["waiting", "seated", "left"])
@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, [10, 11, 12]),
        (1, 2, [11]),
        (2, 4, [12, 20]),
        (3, 5, [20, 21]),
        (4, 5, [21]),
        (0, 5, [10, 11, 12, 20, 21]),
        (3, 3, []),
        (5, 5, []),
    ],
)
def test_known_tokens_run_from_the_prompt_into_the_output(
    start: int, end: int, expected: list[int], place: str
) -> None:
    sequence = known_three_and_two(place)
    assert sequence.tokens(start, end) == expected
    assert (sequence.num_known, sequence.num_uncomputed) == (5, 5 if place == "waiting" else 1)
    assert sequence.num_output == 2


@pytest.mark.parametrize("place", ["waiting", "seated", "left"])
def test_the_next_draw_sees_its_index_and_both_token_lists(place: str) -> None:
    sequence = known_three_and_two(place)
    drawn = sequence.sample_input()
    assert drawn.output_index == 2
    assert drawn.params.seed == 9
    assert (list(drawn.prompt_token_ids), drawn.output_token_ids) == ([10, 11, 12], [20, 21])


def test_a_sequence_takes_along_what_its_seat_held_alone() -> None:
    sequence, other = (Sequence(i, make_request((10, 11, 12), max_tokens=9)) for i in (1, 2))
    seats = take_seat(sequence, [3, 7], num_computed=2)
    seats.add_blocks(sequence.seat, [5])
    seats.write_drafts(sequence.seat, [90])
    assert sequence.num_known == 3, "a draft is not known"
    seats.append(sequence.seat, [20])
    seat, held = sequence.seat, (sequence.block_table, sequence.output_token_ids)
    assert held == ([3, 7, 5], [20])
    assert sequence.num_held_blocks == 3
    sequence.leave_seat()
    seats.check([])
    other.take_seat(seats)
    assert (other.seat, other.num_known, other.num_computed, other.block_table) == (seat, 3, 0, [])
    seats.add_blocks(other.seat, [4])
    seats.append(other.seat, [30, 31])
    assert (sequence.block_table, sequence.output_token_ids) == held
    assert (sequence.num_known, sequence.num_computed) == (4, 2)
    assert sequence.give_up_blocks() == [3, 7, 5]
    assert sequence.num_held_blocks == 0
    assert sequence.block_table == []


def test_the_seats_notice_one_that_is_lost_and_an_empty_one_that_holds_something() -> None:
    sequence = Sequence(1, make_request(3))
    seats = take_seat(sequence, [3], num_computed=0)
    seats.check([sequence.seat])
    for wrong in ([], [sequence.seat] * 2, [1 - sequence.seat]):
        with pytest.raises(AssertionError, match="lost or taken twice"):
            seats.check(wrong)
    seats.block_tables[sequence.seat, 0] = 0
    seats.num_blocks[sequence.seat] = 0
    seats.block_tables[1 - sequence.seat, 0] = 6
    with pytest.raises(AssertionError, match="behind those that are held"):
        seats.check([sequence.seat])
    seats.num_known[1 - sequence.seat] = 1
    with pytest.raises(AssertionError, match="an empty seat holds"):
        seats.check([sequence.seat])
