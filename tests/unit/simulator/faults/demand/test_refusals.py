"""What nodes may refuse, and the books of what they have refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import (
    DeadlineUnreachable,
    Draining,
    InternalError,
    NodeLost,
    Overloaded,
    PdserveError,
)
from common.ids import Incarnation
from engine.core.sequences.status import SequenceStatus
from simulator.faults.demand.refusals import Refusals
from simulator.faults.demand.waiting import Passes, check_refusal, check_waiting, refusals_of
from tests.unit.simulator.faults.histories import a_shape

A, B = Incarnation("a", 1), Incarnation("b", 2)
FULL = Overloaded("full")


def books(*refused: tuple[Incarnation, PdserveError, bool]) -> Refusals:
    found = Refusals()
    for node, error, may_wait in refused:
        found.on_reserve("r1", node, may_wait=may_wait)
        found.on_refusal("r1", node, error, is_prompt=False)
    return found


def end(found: Refusals, error: PdserveError, *able: Incarnation, lost: bool = False) -> None:
    found.on_end("r1", error, able, is_over_losses=lost)


def test_a_request_may_end_where_each_node_has_refused_it() -> None:
    end(books((A, FULL, True), (B, DeadlineUnreachable("late"), False)), FULL, A, B)
    end(books((A, Draining("it leaves"), False)), FULL, A)
    end(books(), NodeLost("gone"), A, B)
    end(books(), FULL, A, lost=True)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (books((A, FULL, True)), "which b#2 can take"),
        (books((A, FULL, True), (B, FULL, False)), "b#2 was not asked to queue it"),
        (books((A, FULL, True), (B, Overloaded("", retry_after_s=0.5), True)), "in 1.0 s, and"),
    ],
)
def test_one_that_a_node_could_take_may_not(found: Refusals, says: str) -> None:
    with pytest.raises(InternalError, match=says):
        end(found, FULL, A, B)


def test_a_node_that_is_asked_again_has_not_refused() -> None:
    found = books((A, FULL, True))
    found.on_reserve("r1", A, may_wait=True)
    found.on_refusal("r1", A, FULL, is_prompt=True)
    with pytest.raises(InternalError, match="which a#1 can take"):
        end(found, FULL, A)


def test_a_node_that_refused_a_prompt_and_decodes_since_has_not_refused() -> None:
    found = books((A, FULL, True))
    found.on_refusal("r1", B, FULL, is_prompt=True)
    with pytest.raises(InternalError, match="which b#2 can take"):
        end(found, FULL, A, B)


def test_a_node_refuses_for_want_of_room_while_it_has_something_to_do() -> None:
    shape = replace(a_shape(), max_queued=1, sheds=True)
    late = DeadlineUnreachable("late")
    check_refusal(shape, FULL, is_empty=False, num_waiting=0)
    check_refusal(shape, late, is_empty=False, num_waiting=1)
    check_refusal(shape, Draining("it leaves"), is_empty=True, num_waiting=0)
    for error, is_empty, num_waiting, of in (
        (FULL, True, 0, shape),
        (late, False, 0, shape),
        (late, False, 1, replace(shape, sheds=False)),
        (Overloaded("", retry_after_s=0.0), False, 1, shape),
    ):
        with pytest.raises(InternalError):
            check_refusal(of, error, is_empty=is_empty, num_waiting=num_waiting)


def a_sequence(number: int) -> Any:
    return SimpleNamespace(
        sequence_id=number,
        queue_key=(0, number, 0),
        status=SequenceStatus.WAITING,
        num_bypassed=0,
        request=SimpleNamespace(id=f"r{number}"),
    )


def test_those_that_were_passed_are_counted_here_too() -> None:
    passes, first, second, third = Passes(), a_sequence(1), a_sequence(2), a_sequence(3)
    passes.take([first, second], [])
    first.num_bypassed = 1
    passes.take([first], [second])
    passes.take([first], [second])
    first.num_bypassed = 2
    passes.take([first], [third])
    passes.take([], [first])
    passes.take([second], [first])
    with pytest.raises(InternalError, match="r2 was passed by 1, and the node counts 0"):
        passes.take([second], [third])


def test_no_more_requests_wait_than_may_and_none_is_passed_too_often() -> None:
    shape = replace(a_shape(), max_queued=2, skip_ahead_limit=3)
    attempts = [SimpleNamespace(sequence=a_sequence(number)) for number in range(3)]
    first, second, third = (one.sequence for one in attempts)
    third.status = SequenceStatus.RUNNING_DECODE
    second.num_bypassed, third.num_bypassed = 3, 4
    waiting: Any = attempts
    check_waiting(shape, waiting)
    first.num_bypassed = 4
    with pytest.raises(InternalError, match="r0 was passed by 4, and 3 may"):
        check_waiting(shape, waiting)
    first.num_bypassed, third.num_bypassed, third.status = 0, 0, SequenceStatus.WAITING
    with pytest.raises(InternalError, match="3 requests wait on a node that queues 2"):
        check_waiting(shape, waiting)


def test_how_requests_may_end_follows_from_the_queues() -> None:
    assert refusals_of(a_shape()) == set()
    assert refusals_of(replace(a_shape(), max_queued=2, sheds=True)) == {
        "overloaded",
        "deadline_unreachable",
    }
