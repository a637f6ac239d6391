"""Answers that go on at another node, behind what the client has."""

from __future__ import annotations

import pytest

from common.errors import Draining, InvalidRequest, Overloaded, PeerProtocolError
from common.ids import AttemptId, Incarnation
from common.request import FinishReason, RequestOutput
from router.core.candidates import MAX_FAILURES, WAIT_S
from router.core.effects import Choose, Finish, LegClosed, SendPrefill, SendReserve, Wait
from router.core.generation import TokenChunk
from router.core.request_flow import DecodeGrant, RequestFlow
from tests.unit.router.core.flow_events import (
    D0,
    D1,
    FIRST,
    LOCAL,
    P0,
    P1,
    SECOND,
    TICKET,
    aborts,
    emitted,
    failure,
    new_flow,
    output,
    prefilling,
    reserving,
    running,
)


def test_an_answer_may_be_continued_twice() -> None:
    flow = running()
    flow.on_output(D0, output(FIRST, 1, 11, 12, num_drafted=4, num_accepted=1))
    flow.on_node_lost(D0)
    flow.on_choice(D1, P0, "again", 0.0)
    flow.on_reserve_reply(D1, SECOND, DecodeGrant(None, 96), 0.0)
    _, emit = flow.on_output(D1, output(SECOND, 3, 13, 14, num_drafted=3, num_accepted=1))
    assert isinstance(emit, TokenChunk)
    assert emit.counts is not None
    assert emit.counts[1:] == (7, 2), "counted over attempts"
    assert emit.counts.num_cached_tokens == 64, "as much as was cached where the answer began"
    effects = flow.on_output(D1, output(SECOND, 0, error=Draining("late")))
    assert effects[-1] == Choose(None, frozenset({D1})), "its tokens are since the loss of d0"
    (reserve,) = flow.on_choice(Incarnation("d2", 1), None, "again", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.output_token_ids == (10, 11, 12, 13, 14)


@pytest.mark.covers("F138")
def test_an_answer_asks_for_nodes_of_the_layout_that_drew_its_last_token() -> None:
    flow = new_flow()

    def lose(node: Incarnation) -> str:
        (choose,) = [one for one in flow.on_node_lost(node) if isinstance(one, Choose)]
        return choose.layout

    flow.on_choice(D0, None, "first", 0.0, None, "old")
    flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    assert lose(D0) == "", "it has no token"
    flow.on_choice(D1, None, "again", 0.0, None, "new")
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    flow.on_output(D1, output(SECOND, 0, 10, is_started=True))
    assert lose(D1) == "new"
    third, fourth = AttemptId("req", 3), AttemptId("req", 4)
    flow.on_choice(D0, None, "nobody else", 0.0, None, "old")
    flow.on_reserve_reply(D0, third, LOCAL, 0.0)
    assert lose(D0) == "new", "the last attempt drew none"
    flow.on_choice(D1, None, "back", 0.0, None, "old")
    flow.on_reserve_reply(D1, fourth, LOCAL, 0.0)
    flow.on_output(D1, output(fourth, 1, 11, is_started=True))
    assert lose(D1) == "old"


@pytest.mark.covers("F138")
@pytest.mark.parametrize("is_second_first", [False, True])
def test_of_two_attempts_the_one_that_goes_on_has_the_layout(is_second_first: bool) -> None:
    flow = new_flow()
    flow.on_choice(D0, None, "first", 0.0, None, "old")
    flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    flow.on_output(D0, output(FIRST, 0, 10, is_started=True))
    assert flow.on_node_suspected(D0) == [Choose(None, frozenset({D0}), "old")]
    flow.on_choice(D1, None, "beside", 0.0, None, "new")
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    node, attempt = (D1, SECOND) if is_second_first else (D0, FIRST)
    flow.on_output(node, output(attempt, 1, 11, is_started=True))
    choose = flow.on_node_lost(node)[-1]
    assert isinstance(choose, Choose)
    assert choose.layout == ("new" if is_second_first else "old")


@pytest.mark.parametrize("has_token", [False, True])
def test_a_node_that_drains_is_the_one_to_avoid(has_token: bool) -> None:
    flow = prefilling()
    if has_token:
        flow.on_output(P0, output(FIRST, 0, 10))
    effects = flow.on_output(D0, output(FIRST, 0, error=Draining("its time is over")))
    assert effects[-1] == Choose(None, frozenset({D0})), "the prefill node did its part"
    assert (P0, FIRST) in aborts(effects)


def test_any_number_of_nodes_may_drain_one_after_the_other() -> None:
    flow = prefilling()
    flow.on_output(P0, output(FIRST, 0, 10))
    flow.on_output(D0, output(FIRST, 0, error=Draining("late")))
    for number in range(2, 3 * MAX_FAILURES):
        node, attempt = Incarnation(f"d{number}", 1), AttemptId("req", number)
        flow.on_choice(node, None, "again", 0.0)
        flow.on_reserve_reply(node, attempt, LOCAL, 0.0)
        effects = flow.on_output(node, output(attempt, 0, error=Draining("late")))
        assert isinstance(effects[-1], Choose)
    assert flow.on_no_choice(Overloaded("nobody")) == [Wait(WAIT_S)]


def test_a_refusal_for_draining_leads_to_the_next_node_and_to_no_queue() -> None:
    flow = reserving()
    effects = flow.on_reserve_reply(D0, FIRST, Draining("leaving"), 0.0)
    assert effects == [LegClosed(D0), LegClosed(P0, has_prompt=True), Choose(None, frozenset({D0}))]
    flow.on_choice(D1, P0, "next", 0.0)
    flow.on_reserve_reply(D1, FIRST, Overloaded("full"), 0.0)
    effects = flow.on_no_choice(Overloaded("nobody"))
    assert effects == [Choose(None, frozenset({D0}))], "only the full one is asked to queue it"


def test_a_continued_answer_may_be_refused() -> None:
    flow = running()
    flow.on_node_lost(D0)
    flow.on_choice(D1, None, "again", 0.0)
    effects = flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))


def test_an_answer_waits_for_a_node_that_has_room_for_its_grammar() -> None:
    flow = running()
    flow.on_node_lost(D0)
    for number in range(2, 3 * MAX_FAILURES):
        attempt = AttemptId("req", number)
        flow.on_choice(D1, None, "again", 0.0)
        flow.on_reserve_reply(D1, attempt, LOCAL, 0.0)
        effects = flow.on_output(D1, output(attempt, 0, error=Overloaded("256 grammars wait")))
        assert effects[-1] == Choose(None, frozenset({D0, D1} if number == 2 else {D1}))
        assert flow.on_no_choice(Overloaded("nobody")) == [Wait(WAIT_S)]
        assert flow.on_waited() == [Choose(None, frozenset())]
    flow.on_choice(D1, None, "again", 0.0)
    last = AttemptId("req", 3 * MAX_FAILURES)
    flow.on_reserve_reply(D1, last, LOCAL, 0.0)
    assert emitted(flow.on_output(D1, output(last, 1, 11, 12))) == [11, 12]


def handed_over_again() -> RequestFlow:
    """Tokens 0 to 2 are emitted, and p1 computes them with the prompt for d1."""
    flow = running()
    flow.on_output(D0, output(FIRST, 1, 11, 12))
    flow.on_node_lost(D0)
    (reserve,) = flow.on_choice(D1, P1, "again", 0.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.prefill, reserve.request.output_token_ids) == (P1, (10, 11, 12))
    prefill, _ = flow.on_reserve_reply(D1, SECOND, TICKET, 0.0)
    assert isinstance(prefill, SendPrefill)
    assert (prefill.node, prefill.request.output_token_ids) == (P1, (10, 11, 12))
    return flow


def test_a_long_answer_is_handed_over_like_a_prompt() -> None:
    flow = handed_over_again()
    assert flow.on_output(D1, output(SECOND, 4, 14, is_started=True)) == []
    effects = flow.on_output(P1, output(SECOND, 3, 13))
    assert emitted(effects) == [13, 14]
    assert LegClosed(P1, has_prompt=True) in effects, "decode has taken over"
    effects = flow.on_output(D1, output(SECOND, 5, 15, finish=FinishReason.STOP))
    assert (emitted(effects), effects[-1]) == ([15], Finish(FinishReason.STOP))


def test_the_token_of_a_second_prefill_may_end_the_answer() -> None:
    effects = handed_over_again().on_output(P1, output(SECOND, 3, 13, finish=FinishReason.STOP))
    assert emitted(effects) == [13]
    assert aborts(effects) == {(D1, SECOND)}


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        (P1, output(SECOND, 4, 14)),  # one token alone
        (P1, output(SECOND, 3, 13, 14)),
        (P1, output(SECOND, 0, finish=FinishReason.STOP)),  # an end without its token
        (D1, output(SECOND, 5, 15, finish=FinishReason.STOP)),  # an end with a gap behind it
    ],
)
def test_what_no_node_may_send_of_a_continued_answer(
    node: Incarnation, wrong: RequestOutput
) -> None:
    assert isinstance(failure(handed_over_again().on_output(node, wrong)), PeerProtocolError)


def test_a_prefill_node_that_cannot_continue_answers_costs_no_answer() -> None:
    """One of an earlier version: it refuses them as invalid."""
    flow = handed_over_again()
    effects = flow.on_prefill_reply(P1, SECOND, InvalidRequest("ask a decode node"))
    assert effects == [LegClosed(P1, has_prompt=True), Choose(D1, frozenset({P1, D0}))]
    (*_, reserve) = flow.on_choice(D1, None, "none left", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.must_prefill_locally
