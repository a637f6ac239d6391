"""The attempts on a node, by id, router, lease and deadline."""

from __future__ import annotations

import pytest

from common.ids import AttemptId, Incarnation
from engine.core.sequences.sequence import Sequence
from node.flow.attempts import attempt_table
from node.flow.attempts.attempt_table import AttemptTable, NodeAttempt
from tests.support.engine.build import make_request

R1, R2 = Incarnation("r", 1), Incarnation("r", 2)


def make_attempt(
    name: str, *, router: Incarnation = R1, until_s: float = 10.0, number: int = 1
) -> NodeAttempt:
    request = make_request(3, name=name)
    return NodeAttempt(request.id, router, Sequence(number, request), until_s, 0.0)


def test_an_attempt_is_found_by_every_name_it_has() -> None:
    table = AttemptTable()
    one = make_attempt("a")
    table.add(one)
    table.set_lease(one, 77)
    assert table.get(AttemptId("a", 1)) is one
    assert table.of_sequence(one.sequence) is one
    assert table.of_lease(77) is one
    assert table.of_router(R1) == [one]
    assert table.all() == [one]
    assert (len(table), table.num_leases) == (1, 1)
    assert table.of_router(R2) == []
    assert table.get(AttemptId("a", 2)) is None


def test_what_is_removed_is_forgotten_under_every_name_but_known_as_closed() -> None:
    table = AttemptTable()
    one = make_attempt("a")
    table.add(one)
    table.set_lease(one, 77)
    table.remove(one)
    assert table.get(one.id) is None
    assert table.of_sequence(one.sequence) is None
    assert table.of_lease(77) is None
    assert table.of_router(R1) == []
    assert (len(table), table.num_leases, one.lease_token) == (0, 0, None)
    assert table.is_closed(one.id)
    assert table.num_routers == 0, "no empty entry is left for a router"


def test_an_attempt_that_comes_with_its_lease_is_found_by_it() -> None:
    table = AttemptTable()
    one = make_attempt("a")
    one.lease_token = 5
    table.add(one)
    assert table.of_lease(5) is one
    table.clear_lease(one)
    table.clear_lease(one)
    assert table.of_lease(5) is None
    assert table.get(one.id) is one


def test_an_attempt_is_held_once() -> None:
    table = AttemptTable()
    table.add(make_attempt("a"))
    with pytest.raises(ValueError, match="a/1 is in the table already"):
        table.add(make_attempt("a", number=2))


def test_routers_are_told_apart_by_their_incarnation() -> None:
    table = AttemptTable()
    one, two = make_attempt("a"), make_attempt("b", router=R2, number=2)
    table.add(one)
    table.add(two)
    assert table.of_router(R1) == [one]
    assert table.of_router(R2) == [two]


def test_each_passed_deadline_is_reported_once_in_order() -> None:
    table = AttemptTable()
    late, soon, same = (
        make_attempt("l", until_s=9.0),
        make_attempt("s", until_s=3.0),
        make_attempt("t", until_s=3.0),
    )
    for number, one in enumerate((late, soon, same), 1):
        one.sequence.sequence_id = number
        table.add(one)
    assert table.next_deadline_s() == 3.0
    assert table.expired(2.9) == []
    assert table.expired(3.0) == [soon, same]
    assert table.expired(8.9) == []
    assert table.next_deadline_s() == 9.0
    assert table.expired(100.0) == [late]
    assert table.next_deadline_s() is None


def test_what_was_removed_has_no_deadline_any_more() -> None:
    table = AttemptTable()
    one, two = make_attempt("a", until_s=3.0), make_attempt("b", until_s=5.0, number=2)
    table.add(one)
    table.add(two)
    table.remove(one)
    assert table.next_deadline_s() == 5.0
    assert table.expired(4.0) == []


@pytest.mark.parametrize("first_until_s", [2.0, 3.0, 4.0])
def test_one_that_was_refused_and_asked_again_expires_once(first_until_s: float) -> None:
    table = AttemptTable()
    refused = make_attempt("a", until_s=first_until_s)
    table.add(refused)
    table.remove(refused)
    table.reopen(refused.id)
    again = make_attempt("a", until_s=3.0, number=2)
    table.add(again)
    assert table.next_deadline_s() == 3.0
    assert table.expired(2.0) == []
    assert table.expired(3.0) == [again]
    assert table.expired(4.0) == []


@pytest.mark.covers("F59")
def test_closed_attempts_are_remembered_up_to_a_bound_oldest_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_table, "MAX_CLOSED_ATTEMPTS", 3)
    table = AttemptTable()
    ids = [AttemptId(name, 1) for name in "abcd"]
    for attempt in ids[:3]:
        table.close(attempt)
    table.close(ids[0])
    table.close(ids[3])
    assert [table.is_closed(attempt) for attempt in ids] == [True, False, True, True]


def test_deadlines_of_what_has_ended_do_not_pile_up() -> None:
    # Requests with a deadline far away that end soon, behind one that stays.
    table = AttemptTable()
    stays = make_attempt("stays", until_s=5.0)
    table.add(stays)
    for number in range(2, 5000):
        one = make_attempt(f"r{number}", until_s=86_400.0, number=number)
        table.add(one)
        table.remove(one)
        assert table.num_deadlines <= 2 * len(table) + attempt_table.MAX_DEAD_DEADLINES
    assert table.next_deadline_s() == 5.0
    assert table.expired(5.0) == [stays]
