"""Who asked for what, until when."""

from __future__ import annotations

import pytest

from common.ids import AttemptId, Incarnation
from engine.core.sequence import Sequence
from node import request_book
from node.request_book import Held, RequestBook
from tests.unit.engine_core.build import make_request

R1, R2 = Incarnation("r", 1), Incarnation("r", 2)


def held(name: str, *, router: Incarnation = R1, until_s: float = 10.0, number: int = 1) -> Held:
    request = make_request(3, name=name)
    return Held(request.id, router, Sequence(number, request), until_s, 0.0)


def test_an_attempt_is_found_by_every_name_it_has() -> None:
    book = RequestBook()
    one = held("a")
    book.add(one)
    book.set_lease(one, 77)
    assert book.get(AttemptId("a", 1)) is one
    assert book.of_sequence(one.sequence) is one
    assert book.of_lease(77) is one
    assert book.of_router(R1) == [one]
    assert book.all() == [one]
    assert (len(book), book.num_leases) == (1, 1)
    assert book.of_router(R2) == []
    assert book.get(AttemptId("a", 2)) is None


def test_what_is_removed_is_forgotten_under_every_name_but_known_as_closed() -> None:
    book = RequestBook()
    one = held("a")
    book.add(one)
    book.set_lease(one, 77)
    book.remove(one)
    assert book.get(one.attempt) is None
    assert book.of_sequence(one.sequence) is None
    assert book.of_lease(77) is None
    assert book.of_router(R1) == []
    assert (len(book), book.num_leases, one.lease_token) == (0, 0, None)
    assert book.is_closed(one.attempt)
    assert not book._by_router, "no empty entry is left for a router"


def test_an_attempt_that_comes_with_its_lease_is_found_by_it() -> None:
    book = RequestBook()
    one = held("a")
    one.lease_token = 5
    book.add(one)
    assert book.of_lease(5) is one
    book.clear_lease(one)
    book.clear_lease(one)
    assert book.of_lease(5) is None
    assert book.get(one.attempt) is one


def test_an_attempt_is_held_once() -> None:
    book = RequestBook()
    book.add(held("a"))
    with pytest.raises(ValueError, match="a/1 is held already"):
        book.add(held("a", number=2))


def test_routers_are_told_apart_by_their_incarnation() -> None:
    book = RequestBook()
    one, two = held("a"), held("b", router=R2, number=2)
    book.add(one)
    book.add(two)
    assert book.of_router(R1) == [one]
    assert book.of_router(R2) == [two]


def test_each_passed_deadline_is_reported_once_in_order() -> None:
    book = RequestBook()
    late, soon, same = held("l", until_s=9.0), held("s", until_s=3.0), held("t", until_s=3.0)
    for number, one in enumerate((late, soon, same), 1):
        one.sequence.sequence_id = number
        book.add(one)
    assert book.next_deadline_s() == 3.0
    assert book.expired(2.9) == []
    assert book.expired(3.0) == [soon, same]
    assert book.expired(8.9) == []
    assert book.next_deadline_s() == 9.0
    assert book.expired(100.0) == [late]
    assert book.next_deadline_s() is None


def test_what_was_removed_has_no_deadline_any_more() -> None:
    book = RequestBook()
    one, two = held("a", until_s=3.0), held("b", until_s=5.0, number=2)
    book.add(one)
    book.add(two)
    book.remove(one)
    assert book.next_deadline_s() == 5.0
    assert book.expired(4.0) == []


def test_closed_attempts_are_remembered_up_to_a_bound_oldest_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_book, "MAX_CLOSED_ATTEMPTS", 3)
    book = RequestBook()
    ids = [AttemptId(name, 1) for name in "abcd"]
    for attempt in ids[:3]:
        book.close(attempt)
    book.close(ids[0])
    book.close(ids[3])
    assert [book.is_closed(attempt) for attempt in ids] == [True, False, True, True]


def test_deadlines_of_what_has_ended_do_not_pile_up() -> None:
    # Requests with a deadline far away that end soon, behind one that stays.
    book = RequestBook()
    stays = held("stays", until_s=5.0)
    book.add(stays)
    for number in range(2, 5000):
        one = held(f"r{number}", until_s=86_400.0, number=number)
        book.add(one)
        book.remove(one)
    assert len(book._deadlines) < 200
    assert book.next_deadline_s() == 5.0
    assert book.expired(5.0) == [stays]
