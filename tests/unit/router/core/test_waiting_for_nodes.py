"""Requests for which no node can be chosen: which of them wait, how long, and what ends it.

Where nodes are there but full, a request waits in the queue of one of them. Where they are all too
short for it (its prompt has 3 tokens, and its answer at most 8), it may be cut.
"""

from __future__ import annotations

import pytest

from common.errors import (
    DeadlineExceeded,
    Draining,
    HandoffFailed,
    InvalidRequest,
    LayoutMismatch,
    NodeLost,
    Overloaded,
    PdserveError,
    PoolExhausted,
    StaleEpoch,
)
from common.ids import AttemptId, Incarnation
from common.request import FinishReason
from router.core.attempts import State
from router.core.candidates import (
    MAX_DEATHS,
    MAX_FAILURES,
    WAIT_S,
    WAITS_AFTER_DEATHS,
    WAITS_FOR_LONGER,
    WAITS_OF_NEW,
)
from router.core.effects import (
    Choose,
    Effect,
    Fail,
    Finish,
    LegClosed,
    SendPrefill,
    SendReserve,
    Wait,
)
from router.core.policies.query import NoneStays, TooLong
from router.core.request_flow import RequestFlow
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

NOBODY = Overloaded("no decode or mixed node is there", retry_after_s=3.0)
WAITING = [Wait(WAIT_S)]
FULL = Overloaded("no room", retry_after_s=2.0)
NONE_LEFT = Overloaded("every decode node was tried", retry_after_s=1.0)
NONE_STAYS = NoneStays("every decode or mixed node is draining", retry_after_s=3.0)
ANYBODY = [Choose(None, frozenset())]


def node(number: int) -> Incarnation:
    return Incarnation(f"d{number}", 1)


def waiting() -> RequestFlow:
    """An answer of which a token was emitted, and whose only decode node was lost."""
    flow = running()
    flow.on_node_lost(D0)
    assert flow.on_no_choice(NOBODY) == WAITING
    assert flow.state is State.WAITING
    return flow


def fail_before_any_token(flow: RequestFlow, number: int, error: PdserveError) -> list[Effect]:
    """Node `number` takes attempt `number` and fails it."""
    attempt = AttemptId("req", number)
    flow.on_choice(node(number), None, "why", 0.0)
    flow.on_reserve_reply(node(number), attempt, LOCAL, 0.0)
    if isinstance(error, NodeLost) and not isinstance(error, Draining):
        return flow.on_node_lost(node(number))
    return flow.on_output(node(number), output(attempt, 0, error=error))


def test_an_answer_waits_for_a_node_until_its_deadline_and_says_why() -> None:
    flow = waiting()
    for _ in range(50):
        assert flow.on_waited() == ANYBODY
        assert flow.on_no_choice(NOBODY) == WAITING
    assert flow.on_time(59.0) == []
    error = failure(flow.on_time(60.0))
    assert isinstance(error, DeadlineExceeded)
    assert "d0#1 was lost" in str(error)


def test_an_answer_goes_on_where_its_node_is_heard_again() -> None:
    flow = waiting()
    assert flow.on_node_trusted(D0) == ANYBODY
    (reserve,) = flow.on_choice(D0, None, "back", 20.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.output_token_ids == (10,)
    flow.on_reserve_reply(D0, SECOND, LOCAL, 20.0)
    assert emitted(flow.on_output(D0, output(SECOND, 1, 11, 12))) == [11, 12]
    assert flow.on_waited() == [], "the time ran out after the waiting had ended"


def test_an_answer_goes_on_where_a_prefill_node_begins_to_decode() -> None:
    flow = waiting()
    (choose,) = flow.on_node_decodes(P0)
    assert choose == Choose(None, frozenset({D0}))


@pytest.mark.covers("F67")
def test_a_node_that_is_heard_again_is_a_candidate_while_another_one_runs() -> None:
    flow = running()
    flow.on_node_lost(D0)
    flow.on_choice(D1, None, "next", 0.0)
    assert flow.on_node_trusted(D0) == []
    assert flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)[-1] == Choose(
        None, frozenset({D1})
    )


def full_node_that_leaves(*others: Incarnation) -> RequestFlow:
    """A new request that waits in the queue of a full node, as all are full, until that drains."""
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, FULL, 0.0)
    for other in others:
        flow.on_choice(other, None, "why", 0.0)
        flow.on_reserve_reply(other, FIRST, Overloaded("no room", retry_after_s=1.0), 0.0)
    assert flow.on_no_choice(NONE_LEFT) == ANYBODY
    for other in others:
        flow.on_choice(other, None, "to wait", 0.0)
        flow.on_reserve_reply(other, FIRST, Overloaded("too many wait", retry_after_s=5.0), 0.0)
    flow.on_choice(D0, None, "to wait", 0.0)
    assert isinstance(flow.on_reserve_reply(D0, FIRST, Draining("it leaves"), 0.0)[-1], Choose)
    return flow


def test_a_new_request_waits_where_the_only_full_node_leaves() -> None:
    flow = full_node_that_leaves()
    for _ in range(WAITS_OF_NEW):
        assert flow.on_no_choice(NOBODY) == WAITING
        assert flow.on_waited() == ANYBODY
    assert isinstance(failure(flow.on_no_choice(NOBODY)), Overloaded)


@pytest.mark.parametrize("num_asked", [1, 2], ids=["full", "with a full queue"])
def test_a_new_request_waits_where_all_full_nodes_leave_without_a_word_to_it(
    num_asked: int,
) -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, FULL, 0.0)
    assert flow.on_no_choice(NONE_STAYS if num_asked == 1 else NONE_LEFT) == ANYBODY
    if num_asked == 2:
        flow.on_choice(D0, None, "to wait", 0.0)
        flow.on_reserve_reply(D0, FIRST, Overloaded("too many wait", retry_after_s=5.0), 0.0)
    for _ in range(WAITS_OF_NEW):
        assert flow.on_no_choice(NONE_STAYS) == WAITING
        assert flow.on_waited() == ANYBODY
    error = failure(flow.on_no_choice(NONE_STAYS))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == NONE_STAYS.retry_after_s


def test_a_new_request_does_not_wait_where_a_full_node_stays() -> None:
    error = failure(full_node_that_leaves(D1).on_no_choice(NONE_LEFT))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.0, "the shortest time of a node that stays"


def test_a_request_without_tokens_whose_node_was_lost_waits_too() -> None:
    flow = reserving()
    flow.on_call_failed(D0, FIRST, NodeLost("d0 is gone"))
    assert flow.on_no_choice(NOBODY) == WAITING


@pytest.mark.parametrize(
    "failure_of_handoff",
    [HandoffFailed("d0 is closed"), LayoutMismatch("other KV"), StaleEpoch("d0 lives again")],
    ids=lambda one: one.code,
)
def test_one_whose_handoff_failed_waits_where_no_node_stays(
    failure_of_handoff: PdserveError,
) -> None:
    """The decode node may have left, and its peer is heard before it."""
    flow = prefilling()
    effects = flow.on_output(P0, output(FIRST, 0, error=failure_of_handoff))
    assert effects[-1] == Choose(None, frozenset({P0}))
    for _ in range(20):
        assert flow.on_no_choice(NONE_STAYS) == WAITING
        assert flow.on_waited() == ANYBODY
    assert flow.on_no_choice(NONE_STAYS) == WAITING
    assert flow.on_node_trusted(D1) == ANYBODY
    assert isinstance(flow.on_choice(D1, None, "it came", 20.0)[0], SendReserve)


def test_one_whose_handoff_failed_ends_where_nodes_stay_and_none_can_take_it() -> None:
    flow = prefilling()
    flow.on_output(P0, output(FIRST, 0, error=HandoffFailed("no route")))
    assert flow.on_no_choice(NONE_STAYS) == WAITING
    flow.on_waited()
    flow.on_choice(D1, None, "it came", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    assert flow.on_no_choice(NONE_LEFT) == ANYBODY, "a full node may queue it"
    flow.on_choice(D1, None, "again", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full queue"), 0.0)
    assert isinstance(failure(flow.on_no_choice(NONE_LEFT)), HandoffFailed)


def test_one_that_a_node_could_never_finish_does_not_wait_for_others() -> None:
    flow = new_flow()
    fail_before_any_token(flow, 1, PoolExhausted("4 blocks"))
    assert isinstance(failure(flow.on_no_choice(NONE_STAYS)), PoolExhausted)


def test_it_waits_too_where_another_node_has_no_room_for_its_grammar() -> None:
    flow = reserving()
    flow.on_call_failed(D0, FIRST, NodeLost("d0 is gone"))
    fail_before_any_token(flow, 2, Overloaded("256 grammars wait"))
    assert flow.on_no_choice(NOBODY) == WAITING


def test_a_new_request_waits_for_a_short_time() -> None:
    flow = new_flow()
    for _ in range(WAITS_OF_NEW):
        assert flow.on_no_choice(NOBODY) == WAITING
        assert flow.on_waited() == ANYBODY
    error = failure(flow.on_no_choice(NOBODY))
    assert isinstance(error, Overloaded)
    assert (str(error), error.retry_after_s) == (str(NOBODY), 3.0)


def test_a_node_that_joins_takes_a_new_request_that_waits() -> None:
    flow = new_flow()
    flow.on_no_choice(NOBODY)
    assert flow.on_node_trusted(D0) == ANYBODY


def test_a_new_request_that_every_node_refused_does_not_wait() -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0)
    assert flow.on_no_choice(NOBODY) == ANYBODY, "a full node may queue it"
    flow.on_choice(D0, None, "again", 0.0)
    flow.on_reserve_reply(D0, FIRST, Overloaded("full queue"), 0.0)
    assert isinstance(failure(flow.on_no_choice(NOBODY)), Overloaded)


@pytest.mark.parametrize("refusal", [Draining("leaving"), StaleEpoch("another life")])
def test_a_new_request_that_only_a_leaving_node_refused_waits(refusal: PdserveError) -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, refusal, 0.0)
    assert flow.on_no_choice(NOBODY) == WAITING


def test_a_continued_answer_that_every_node_refused_asks_all_of_them_again() -> None:
    flow = running()
    flow.on_node_lost(D0)
    flow.on_choice(D1, None, "next", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    flow.on_no_choice(NOBODY)
    flow.on_choice(D1, None, "next", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full queue"), 0.0)
    assert flow.on_no_choice(NOBODY) == WAITING
    assert flow.on_waited() == ANYBODY
    (reserve,) = flow.on_choice(D1, None, "next", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.id == AttemptId("req", 3)
    assert not reserve.may_wait, "every node is asked first whether it has room"


def test_tokens_forgive_all_failures() -> None:
    flow = running()
    effects = flow.on_node_lost(D0)
    for number in range(2, MAX_FAILURES + 2):
        assert len(effects[-1].excluded) == 1, "the node of the last attempt"  # type: ignore[union-attr]
        one, attempt = node(number % 3), AttemptId("req", number)
        flow.on_choice(one, None, "next", 0.0)
        flow.on_reserve_reply(one, attempt, LOCAL, 0.0)
        assert emitted(flow.on_output(one, output(attempt, number - 1, 9))) == [9]
        effects = flow.on_node_lost(one)


@pytest.mark.covers("F85")
def test_a_request_that_may_end_nodes_gets_no_fourth_one() -> None:
    """Three nodes died of it, as far as anybody can know."""
    flow = new_flow()
    for number in range(1, MAX_DEATHS):
        assert isinstance(fail_before_any_token(flow, number, NodeLost("died"))[-1], Choose)
    effects = fail_before_any_token(flow, MAX_DEATHS, NodeLost("died"))
    assert effects[-1] == Wait(WAIT_S)
    assert flow.on_node_trusted(node(9)) == WAITING, "another node is spared"
    for _ in range(WAITS_AFTER_DEATHS - 1):
        assert flow.on_waited() == WAITING
    assert isinstance(failure(flow.on_waited()), NodeLost)


@pytest.mark.covers("F85")
def test_nodes_that_left_in_order_did_not_die_of_the_request() -> None:
    """As when a prompt comes to one node after the other, each of which has just left."""
    flow = new_flow()
    for number in range(1, MAX_DEATHS + 2):
        flow.on_choice(node(number), None, "why", 0.0)
        effects = flow.on_node_lost(node(number), is_orderly=True)
        assert effects[-1] == Choose(None, frozenset(node(n) for n in range(1, number + 1)))
    assert flow.on_no_choice(NOBODY)[-1] == Wait(WAIT_S), "as for one whose node was lost"


def test_a_lost_node_that_is_heard_again_did_not_die_of_the_request() -> None:
    """As when this router stood still: its nodes cut all its streams, one after the other."""
    flow = new_flow()
    for number in range(1, MAX_DEATHS + 1):
        fail_before_any_token(flow, number, NodeLost("cut"))
    assert isinstance(flow.on_node_trusted(node(2))[-1], Choose)


@pytest.mark.covers("F122")
def test_a_lost_node_that_was_started_again_can_be_asked() -> None:
    flow = new_flow()
    for number in range(1, MAX_DEATHS + 1):
        fail_before_any_token(flow, number, NodeLost("died"))
    again = Incarnation(node(2).node_id, node(2).epoch + 1)
    assert isinstance(flow.on_node_trusted(again)[-1], Choose)
    assert isinstance(flow.on_choice(again, None, "again", 0.0)[0], SendReserve)


@pytest.mark.covers("F122")
def test_a_request_that_ends_whatever_is_started_again_is_bounded() -> None:
    flow = new_flow()
    for number in range(1, MAX_DEATHS + 1):
        effects = fail_before_any_token(flow, number, NodeLost("died"))
    for number in range(MAX_DEATHS + 1, MAX_FAILURES + 1):
        again = Incarnation(node(1).node_id, number)
        flow.on_node_trusted(again)
        flow.on_choice(again, None, "again", 0.0)
        effects = flow.on_node_lost(again)
    assert isinstance(failure(effects), NodeLost)


def test_failures_without_a_token_are_bounded() -> None:
    flow = new_flow()
    for number in range(1, MAX_FAILURES):
        effects = fail_before_any_token(flow, number, HandoffFailed("no route"))
        assert effects[-1] == Choose(None, frozenset(node(n) for n in range(1, number + 1)))
    error = failure(fail_before_any_token(flow, MAX_FAILURES, HandoffFailed("no route")))
    assert isinstance(error, HandoffFailed)


def test_a_pool_that_is_too_small_is_not_asked_again_after_a_wait() -> None:
    flow = new_flow()
    effects = fail_before_any_token(flow, 1, PoolExhausted("4 blocks"))
    assert effects[-1] == Choose(None, frozenset({node(1)}))
    fail_before_any_token(flow, 2, NodeLost("died"))
    flow.on_no_choice(NOBODY)
    assert flow.on_waited() == [Choose(None, frozenset({node(1)}))]


def test_a_client_may_leave_while_its_request_waits() -> None:
    flow = waiting()
    assert aborts(flow.on_client_gone()) == set()
    assert flow.on_waited() == flow.on_node_trusted(D0) == []


def both_full() -> tuple[RequestFlow, list[Effect]]:
    """Both decode nodes refused once; the effects of learning that no third one exists."""
    flow = new_flow()
    for node in (D0, D1):
        (reserve,) = flow.on_choice(node, P0, "why", 10.0)
        assert isinstance(reserve, SendReserve)
        assert not reserve.may_wait
        flow.on_reserve_reply(node, FIRST, FULL, 10.0)
    return flow, flow.on_no_choice(NONE_LEFT)


def test_all_full_means_waiting_at_one_of_them() -> None:
    flow, effects = both_full()
    assert effects == [Choose(None, frozenset())]
    (reserve,) = flow.on_choice(D1, P0, "why", 11.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.may_wait, reserve.request.id) == (D1, True, FIRST)
    effects = flow.on_reserve_reply(D1, FIRST, TICKET, 30.0)
    assert any(isinstance(effect, SendPrefill) for effect in effects)


def test_a_full_queue_leads_to_the_next_and_then_to_a_refusal() -> None:
    flow, _ = both_full()
    flow.on_choice(D1, P0, "why", 11.0)
    effects = flow.on_reserve_reply(D1, FIRST, FULL, 12.0)
    assert effects == [LegClosed(D1), LegClosed(P0, has_prompt=True), Choose(None, frozenset({D1}))]
    flow.on_choice(D0, P0, "why", 12.0)
    effects = flow.on_reserve_reply(D0, FIRST, FULL, 13.0)
    assert effects == [
        LegClosed(D0),
        LegClosed(P0, has_prompt=True),
        Choose(None, frozenset({D0, D1})),
    ]
    (failed,) = flow.on_no_choice(NONE_LEFT)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, Overloaded)
    assert failed.error.retry_after_s == 2.0
    assert str(failed.error) == "every decode node was tried; d0#1 said last: no room"


def too_long(longest: int) -> TooLong:
    return TooLong(f"wanted at most {longest}", longest=longest)


def lost(*, is_cut_to_fit: bool) -> RequestFlow:
    """An answer with one token whose node was lost."""
    flow = running(is_cut_to_fit=is_cut_to_fit)
    assert flow.on_node_lost(D0)[-1] == Choose(None, frozenset({D0}))
    return flow


def wait_in_vain(flow: RequestFlow, num_waits: int) -> None:
    for _ in range(num_waits):
        assert flow.on_no_choice(too_long(6)) == WAITING
        assert flow.on_waited() == ANYBODY


def test_an_answer_without_a_limit_of_its_own_goes_on_up_to_the_length_of_a_shorter_node() -> None:
    flow = lost(is_cut_to_fit=True)
    assert flow.max_tokens == 8
    assert flow.on_no_choice(too_long(6)) == [Choose(None, frozenset({D0}))]
    assert flow.max_tokens == 3
    (reserve,) = flow.on_choice(D1, P1, "shorter", 0.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.request.sampling.max_tokens, reserve.request.output_token_ids) == (3, (10,))
    prefill, *_ = flow.on_reserve_reply(D1, SECOND, TICKET, 0.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.request.sampling.max_tokens == 3
    flow.on_output(P1, output(SECOND, 1, 11))
    effects = flow.on_output(D1, output(SECOND, 2, 12, is_started=True, finish=FinishReason.LENGTH))
    assert emitted(effects) == [12]
    assert effects[-1] == Finish(FinishReason.LENGTH)


def test_it_has_its_whole_length_again_where_a_longer_node_takes_it_over() -> None:
    flow = lost(is_cut_to_fit=True)
    flow.on_no_choice(too_long(6))
    flow.on_choice(D1, None, "shorter", 0.0)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    flow.on_node_lost(D1)
    assert flow.max_tokens == 8
    (reserve,) = flow.on_choice(D0, None, "back", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.sampling.max_tokens == 8


@pytest.mark.parametrize("error", [too_long(4), too_long(3)])
def test_an_answer_that_is_longer_than_every_node_waits_for_a_longer_one(error: TooLong) -> None:
    flow = lost(is_cut_to_fit=True)
    assert flow.on_no_choice(error) == WAITING
    assert flow.max_tokens == 8


def test_fewer_tokens_than_an_answer_must_have_are_none() -> None:
    flow = running(is_cut_to_fit=True, min_tokens=4)
    flow.on_node_lost(D0)
    assert flow.on_no_choice(too_long(6)) == WAITING
    assert flow.on_waited() == ANYBODY
    assert flow.on_no_choice(too_long(7)) == ANYBODY


def test_a_new_request_without_a_limit_gets_what_the_nodes_have_at_once() -> None:
    flow = new_flow(is_cut_to_fit=True)
    assert flow.on_no_choice(too_long(4)) == ANYBODY
    ask, _ = flow.on_choice(None, P0, "one token: prefill alone", 0.0)
    assert isinstance(ask, SendPrefill)
    assert ask.request.sampling.max_tokens == 1


def test_a_second_attempt_is_not_cut_while_the_first_may_have_all() -> None:
    flow = running(is_cut_to_fit=True)
    flow.on_node_suspected(D0)
    assert flow.on_no_choice(too_long(6)) == [Wait(WAIT_S)]
    assert flow.attempt == SECOND
    assert flow.answering_attempt == FIRST


def test_a_second_attempt_gets_no_less_than_the_first() -> None:
    flow = lost(is_cut_to_fit=True)
    flow.on_no_choice(too_long(6))
    flow.on_choice(D1, None, "shorter", 0.0)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    assert flow.on_node_suspected(D1) == [Choose(None, frozenset({D0, D1}))]
    assert flow.max_tokens == 8
    assert flow.on_no_choice(too_long(5)) == [Wait(WAIT_S)]
    flow.on_node_trusted(D1)
    flow.on_node_suspected(D1)
    assert flow.on_no_choice(too_long(6))[-1] == Choose(None, frozenset({D0, D1}))
    assert flow.max_tokens == 3


def test_what_the_client_asked_for_waits_for_a_longer_node_for_a_minute() -> None:
    flow = lost(is_cut_to_fit=False)
    wait_in_vain(flow, WAITS_FOR_LONGER)
    error = failure(flow.on_no_choice(too_long(6)))
    assert isinstance(error, NodeLost)
    assert str(error) == "d0#1 was lost, and no node that is left holds it: wanted at most 6"


def test_it_goes_on_where_its_node_comes_back_meanwhile() -> None:
    flow = lost(is_cut_to_fit=False)
    wait_in_vain(flow, WAITS_FOR_LONGER - 1)
    (reserve,) = flow.on_choice(D0, None, "back", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.sampling.max_tokens == 8


def test_the_time_begins_when_shorter_nodes_are_there() -> None:
    """Where no node is there, all may be starting again: that has no limit of its own."""
    flow = lost(is_cut_to_fit=False)
    for _ in range(WAITS_FOR_LONGER + 5):
        assert flow.on_no_choice(NOBODY) == WAITING
        assert flow.on_waited() == ANYBODY
    wait_in_vain(flow, WAITS_FOR_LONGER)
    assert isinstance(failure(flow.on_no_choice(too_long(6))), NodeLost)


@pytest.mark.parametrize("error", [NodeLost("gone"), Draining("leaving"), HandoffFailed("cut")])
def test_a_request_that_was_accepted_is_not_told_that_it_is_too_long(error: NodeLost) -> None:
    flow = reserving(None)
    flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    flow.on_output(D0, output(FIRST, 0, error=error))
    if isinstance(error, NodeLost):
        wait_in_vain(flow, WAITS_FOR_LONGER)
    assert isinstance(failure(flow.on_no_choice(too_long(6))), NodeLost)


def test_a_new_request_that_no_node_holds_is_told_so() -> None:
    flow = new_flow()
    wait_in_vain(flow, WAITS_OF_NEW)
    assert isinstance(failure(flow.on_no_choice(too_long(6))), InvalidRequest)


def test_a_request_that_only_full_nodes_hold_is_not_too_long() -> None:
    # One token, which a prefill node answers alone; all nodes that decode are shorter.
    flow = new_flow(max_tokens=1)
    flow.on_choice(None, P0, "one token: prefill alone", 0.0)
    effects = flow.on_prefill_reply(P0, FIRST, Overloaded("full", retry_after_s=2.0))
    assert effects[-1] == Choose(None, frozenset({P0}))
    error = failure(flow.on_no_choice(too_long(3)))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    assert str(error) == "wanted at most 3; p0#1 said last: full"


def test_a_request_that_a_node_refused_which_has_left_since_is_not_too_long() -> None:
    flow = reserving(prefill=None)
    flow.on_reserve_reply(D0, FIRST, Draining("it leaves"), 0.0)
    for _ in range(WAITS_OF_NEW):
        assert flow.on_no_choice(too_long(6)) == WAITING
        assert flow.on_waited() == ANYBODY
    assert isinstance(failure(flow.on_no_choice(too_long(6))), Overloaded)


def test_a_request_for_which_all_nodes_are_full_was_not_shed() -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0)
    flow.on_no_choice(Overloaded("nobody"))
    flow.on_choice(D0, P0, "it may queue", 0.0)
    flow.on_reserve_reply(D0, FIRST, Overloaded("its queue is full"), 0.0)
    assert type(failure(flow.on_no_choice(Overloaded("nobody")))) is Overloaded
