"""A node falls silent: a second attempt runs beside the first, and each index is emitted once."""

from __future__ import annotations

import pytest

from common.errors import (
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
)
from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import FinishReason, SamplingParams
from placement.store import LiveNode
from router.core.attempts import State
from router.core.candidates import WAIT_S
from router.core.effects import (
    Choose,
    Finish,
    LegClosed,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
    Wait,
)
from router.core.membership import Membership
from router.core.request_flow import RequestFlow
from tests.support.nodes.node_views import node as node_view
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
    output,
    prefilling,
    reserving,
    running,
    suspected,
)

D2 = Incarnation("d2", 1)
THIRD = AttemptId("req", 3)


def test_the_second_attempt_wins_where_it_sends_the_next_token_first() -> None:
    flow = suspected()
    effects = flow.on_output(D1, output(SECOND, 1, 11))
    assert emitted(effects) == [11]
    assert aborts(effects) == {(D0, FIRST)}
    assert Unplace(FIRST) in effects
    assert flow.on_output(D0, output(FIRST, 1, 11, 12, 13)) == []
    assert flow.on_node_lost(D0) == []
    effects = flow.on_output(D1, output(SECOND, 2, 12, finish=FinishReason.STOP))
    assert emitted(effects) == [12]
    assert effects[-1] == Finish(FinishReason.STOP)


def test_the_first_attempt_wins_where_its_node_is_heard_first() -> None:
    flow = suspected()
    assert flow.on_node_trusted(D0) == [], "no token came yet, and the second one computes"
    effects = flow.on_output(D0, output(FIRST, 1, 11, 12))
    assert emitted(effects) == [11, 12]
    assert aborts(effects) == {(D1, SECOND)}
    assert Unplace(SECOND) in effects
    assert flow.on_output(D1, output(SECOND, 1, 11)) == []
    assert emitted(flow.on_output(D0, output(FIRST, 3, 13))) == [13]


def test_a_first_attempt_that_ends_the_answer_ends_both() -> None:
    effects = suspected().on_output(D0, output(FIRST, 1, 11, finish=FinishReason.STOP))
    assert aborts(effects) == {(D1, SECOND)}
    assert effects[-1] == Finish(FinishReason.STOP)


def test_the_second_attempt_takes_the_place_of_a_lost_first_one() -> None:
    flow = suspected()
    effects = flow.on_node_lost(D0)
    assert aborts(effects) == {(D0, FIRST)}
    assert not any(isinstance(effect, Choose) for effect in effects)
    assert (flow.decode, flow.attempt) == (D1, SECOND)
    assert emitted(flow.on_output(D1, output(SECOND, 1, 11))) == [11]


@pytest.mark.parametrize("error", [NodeLost("x"), InternalError("x"), PeerProtocolError("x")])
def test_a_second_attempt_that_fails_ends_alone(error: PdserveError) -> None:
    flow = suspected()
    effects = flow.on_output(D1, output(SECOND, 0, error=error))
    assert effects == [LegClosed(D1, has_prompt=True), Unplace(SECOND), Wait(WAIT_S)]
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11))) == [11]
    flow.on_node_lost(D0)
    (reserve,) = flow.on_choice(D2, None, "why", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.id == THIRD, "no number is used twice"


def test_without_another_node_the_first_attempt_is_waited_for() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    assert flow.on_no_choice(Overloaded("nobody")) == [Wait(WAIT_S)]
    assert flow.state is State.RUNNING
    assert flow.on_node_trusted(D1) == [Choose(None, frozenset({D0}))], "another one has come"
    flow.on_choice(D1, None, "new", 0.0)
    ending = [SendAbort(D1, THIRD), LegClosed(D1, has_prompt=True)]
    assert flow.on_node_trusted(D0) == ending, "none computed yet"
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11))) == [11]


def test_refusals_lead_a_second_attempt_to_the_next_node_and_to_no_queue() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    effects = flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    assert effects == [LegClosed(D1, has_prompt=True), Choose(None, frozenset({D0, D1}))]
    flow.on_choice(D2, None, "why", 0.0)
    effects = flow.on_reserve_reply(D2, SECOND, InvalidRequest("too long"), 0.0)
    assert effects == [LegClosed(D2, has_prompt=True), Wait(WAIT_S)]
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11))) == [11]


def test_while_a_node_is_suspected_another_one_is_asked_again_and_again() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    effects = flow.on_call_failed(D1, SECOND, NodeLost("it has gone"))
    assert effects[-1] == Wait(WAIT_S)
    assert flow.on_waited() == [Choose(None, frozenset({D0, D1}))], "others first"
    assert flow.on_no_choice(Overloaded("nobody")) == [Choose(None, frozenset({D0}))]
    flow.on_choice(D1, None, "why", 2.0)
    flow.on_reserve_reply(D1, THIRD, LOCAL, 2.0)
    assert flow.on_waited() == [], "it computes"
    assert emitted(flow.on_output(D1, output(THIRD, 1, 11))) == [11]


def test_an_attempt_that_is_begun_again_asks_one_node() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_no_choice(Overloaded("all are full"))
    assert flow.on_waited() == [Choose(None, frozenset({D0}))]
    flow.on_choice(D1, None, "why", 2.0)
    closed = [LegClosed(D1, has_prompt=True)]
    effects = flow.on_reserve_reply(D1, THIRD, Overloaded("full"), 2.0)
    assert effects == [*closed, Wait(WAIT_S)]
    assert flow.on_waited() == [Choose(None, frozenset({D0, D1}))], "the next one"
    again = flow.on_no_choice(Overloaded("none is left"))
    assert again == [Choose(None, frozenset({D0}))], "and all of them again"
    assert flow.on_no_choice(Overloaded("none is there")) == [Wait(WAIT_S)]


def test_attempts_beside_that_fail_leave_the_first_one_its_own_failures() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    for number in range(2, 5):
        flow.on_choice(D1, None, "why", 0.0)
        effects = flow.on_call_failed(D1, AttemptId("req", number), HandoffFailed("no KV"))
        assert effects[-1] == Wait(WAIT_S)
        again = flow.on_waited()
    assert again == [], "three are enough"
    flow.on_node_lost(D0)
    flow.on_choice(D2, None, "why", 0.0)
    flow.on_reserve_reply(D2, AttemptId("req", 5), LOCAL, 0.0)
    assert emitted(flow.on_output(D2, output(AttemptId("req", 5), 1, 11))) == [11]


def test_a_planned_prefill_node_that_is_lost_counts_no_more_and_another_one_is_asked() -> None:
    flow = reserving()
    assert flow.on_node_lost(P0) == [LegClosed(P0, has_prompt=True)]
    assert flow.on_reserve_reply(D0, FIRST, TICKET, 11.0)[-1] == Choose(D0, frozenset())
    effects = flow.on_choice(D0, P1, "another one", 11.0)
    assert any(isinstance(one, SendPrefill) and one.node == P1 for one in effects)


def test_a_trusted_node_is_waited_for_alone() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_no_choice(Overloaded("nobody"))
    flow.on_node_trusted(D0)
    assert flow.on_waited() == []
    flow.on_client_gone()
    assert flow.on_waited() == []


def test_a_second_node_that_falls_silent_is_replaced() -> None:
    flow = suspected()
    effects = flow.on_node_suspected(D1)
    assert aborts(effects) == {(D1, SECOND)}
    assert effects[-1] == Choose(None, frozenset({D0, D1}))


def test_a_second_attempt_on_a_lost_node_ends_alone() -> None:
    flow = suspected()
    assert aborts(flow.on_node_lost(D1)) == {(D1, SECOND)}
    assert flow.on_output(D1, output(SECOND, 1, 11)) == []
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11))) == [11]


def test_a_suspected_prefill_node_before_token_0() -> None:
    flow = prefilling()
    assert flow.on_node_suspected(P0) == [Choose(None, frozenset({P0}))]
    flow.on_choice(D0, P1, "the same decode node", 0.0)
    flow.on_reserve_reply(D0, SECOND, TICKET, 0.0)
    effects = flow.on_output(P1, output(SECOND, 0, 10))
    assert emitted(effects) == [10]
    assert aborts(effects) == {(P0, FIRST), (D0, FIRST)}
    flow.on_output(D0, output(SECOND, 1, is_started=True))
    assert emitted(flow.on_output(D0, output(SECOND, 1, 11))) == [11]
    assert flow.on_output(D0, output(FIRST, 1, 99)) == []


def test_tokens_that_a_first_attempt_holds_back_do_not_mix_with_the_second() -> None:
    flow = running(first_token=False)
    flow.on_output(D0, output(FIRST, 1, 11, 12))
    flow.on_node_suspected(P0)
    flow.on_choice(D1, None, "why", 0.0)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    assert emitted(flow.on_output(D1, output(SECOND, 0, 10))) == [10]
    assert emitted(flow.on_output(D1, output(SECOND, 1, 11))) == [11]


def test_a_refused_first_attempt_leaves_the_second_one() -> None:
    flow = reserving()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    assert flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0) == [
        LegClosed(D0),
        LegClosed(P0, has_prompt=True),
    ]
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    assert emitted(flow.on_output(D1, output(SECOND, 0, 10))) == [10]


def test_a_fault_of_the_first_attempt_that_is_final_ends_both() -> None:
    effects = suspected().on_output(D0, output(FIRST, 1, error=PeerProtocolError("checksum")))
    assert isinstance(failure(effects), PeerProtocolError)
    assert aborts(effects) == {(D1, SECOND)}


def test_a_client_that_leaves_and_the_deadline_end_both() -> None:
    assert aborts(suspected().on_client_gone()) == {(D0, FIRST), (D1, SECOND)}
    assert aborts(suspected().on_time(60.0)) == {(D0, FIRST), (D1, SECOND)}


def test_a_prefill_node_that_did_its_part_is_not_missed() -> None:
    assert running().on_node_suspected(P0) == []
    assert running().on_node_suspected(D2) == []


def test_a_grant_for_a_second_attempt_that_was_dropped_is_given_back() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    flow.on_output(D0, output(FIRST, 1, 11))
    assert flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0) == [SendAbort(D1, SECOND)]


# --- a node that is heard and not reached ---------------------------------------------------------


@pytest.mark.covers("F121")
def test_a_request_whose_node_may_not_have_it_is_asked_elsewhere_too() -> None:
    for flow, node in ((reserving(), D0), (prefilling(), P0)):
        assert flow.on_node_suspected(node, True) == [Choose(None, frozenset({node}))]
        flow.on_choice(D1, None, "another node", 0.0)
        flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
        assert emitted(flow.on_output(D1, output(SECOND, 0, 10))) == [10]


def test_an_answer_that_runs_on_a_node_that_is_heard_needs_no_second_attempt() -> None:
    flow = running()
    assert flow.on_node_suspected(D0, True) == []
    assert flow.on_node_trusted(D1) == []
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11))) == [11]
    assert flow.on_node_suspected(D0, False) == [Choose(None, frozenset({D0}))], "now it is silent"


def test_a_second_attempt_goes_on_where_its_node_is_heard() -> None:
    flow = suspected()
    assert flow.on_node_suspected(D1, True) == []
    assert emitted(flow.on_output(D1, output(SECOND, 1, 11))) == [11]


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_planned_prefill_node_that_is_suspected_before_the_ticket_comes_is_not_asked(
    is_heard: bool,
) -> None:
    flow = reserving()
    assert flow.on_node_suspected(P0, is_heard) == []
    (choose,) = flow.on_reserve_reply(D0, FIRST, TICKET, 11.0)
    assert choose == Choose(D0, frozenset({P0}))
    closed, asked, *_ = flow.on_choice(None, P1, "another prefill node", 11.0)
    assert closed == LegClosed(P0, has_prompt=True)
    assert isinstance(asked, SendPrefill)
    assert asked.node == P1


# --- nodes that were suspected before the request came, and full ones -----------------------------


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_heard", [False, True])
def test_a_request_knows_which_nodes_are_suspected_when_it_comes(is_heard: bool) -> None:
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=60.0
    )
    assert flow.start({D0: is_heard}) == [Choose(None, frozenset({D0}))]
    assert flow.on_no_choice(Overloaded("nobody else")) == [Choose(None, frozenset())]
    reserve, wait = flow.on_choice(D0, None, "the only one", 10.0)
    assert wait == Wait(WAIT_S)
    assert isinstance(reserve, SendReserve)
    effects = flow.on_node_trusted(D1)
    assert effects == [Choose(None, frozenset({D0}))], "another one has come"
    flow.on_choice(D1, None, "new", 10.0)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 10.0)
    assert emitted(flow.on_output(D1, output(SECOND, 0, 10))) == [10]


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_heard", [False, True])
def test_a_request_is_asked_elsewhere_where_a_prefill_node_begins_to_decode(is_heard: bool) -> None:
    flow = reserving()
    flow.on_node_suspected(D0, is_heard)
    assert flow.on_no_choice(Overloaded("nobody")) == [Wait(WAIT_S)]
    assert flow.on_node_decodes(P0) == [Choose(None, frozenset({D0}))]
    flow.on_choice(P0, None, "it decodes now", 10.0)
    assert flow.on_node_decodes(P1) == [], "one second attempt is enough"
    flow.on_reserve_reply(P0, THIRD, LOCAL, 10.0)
    assert emitted(flow.on_output(P0, output(THIRD, 0, 10, finish=FinishReason.STOP))) == [10]
    assert flow.on_node_decodes(P1) == []


def test_a_node_that_refused_a_prompt_is_asked_where_it_decodes_from_then_on() -> None:
    flow = prefilling()
    assert flow.on_prefill_reply(P0, FIRST, Overloaded("full"))[-1] == Choose(D0, frozenset({P0}))
    flow.on_choice(D0, None, "no prefill node is left", 10.0)
    flow.on_node_suspected(D0, True)
    assert flow.on_no_choice(Overloaded("nobody")) == [Wait(WAIT_S)]
    assert flow.on_node_decodes(P0) == [Choose(None, frozenset({D0}))]


def test_a_refusal_of_a_prompt_by_a_node_that_decodes_since_excludes_it_once_it_is_repeated() -> (
    None
):
    flow = prefilling()
    assert flow.on_node_decodes(P0) == []
    refused = flow.on_prefill_reply(P0, FIRST, Overloaded("its role moved"))
    assert refused[-1] == Choose(D0, frozenset())
    flow.on_choice(D0, P0, "it is mixed", 10.0)
    refused = flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    assert refused[-1] == Choose(D0, frozenset({P0})), "once"


def test_a_request_that_no_suspected_node_holds_up_needs_no_node_that_begins_to_decode() -> None:
    flow = reserving()
    assert flow.on_node_decodes(P1) == []
    flow.on_node_suspected(D1)
    assert flow.on_node_decodes(P1) == []


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_full_node_queues_a_request_before_a_suspected_one_is_asked(is_heard: bool) -> None:
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=60.0
    )
    flow.start({D0: is_heard})
    flow.on_choice(D1, None, "why", 10.0)
    effects = flow.on_reserve_reply(D1, FIRST, Overloaded("full"), 10.0)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D0}))]
    (reserve,) = flow.on_choice(D1, None, "it queues", 10.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.may_wait) == (D1, True)
    effects = flow.on_reserve_reply(D1, FIRST, Overloaded("its queue is full"), 10.0)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D1}))]
    reserve = flow.on_choice(D0, None, "nobody else is left", 10.0)[0]
    assert isinstance(reserve, SendReserve)
    assert reserve.node == D0


def test_after_a_wait_suspected_nodes_are_asked_last_again() -> None:
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=60.0
    )
    flow.start({D0: False})
    flow.on_no_choice(Overloaded("nobody else"))
    assert flow.on_no_choice(Overloaded("it drains")) == [Wait(WAIT_S)]
    assert flow.on_waited() == [Choose(None, frozenset({D0}))]


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_heard", [False, True])
def test_a_full_node_queues_a_request_that_a_suspected_one_has_not_answered(
    is_heard: bool,
) -> None:
    flow = reserving(prefill=None)
    flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0)
    flow.on_choice(D1, None, "another one", 0.0)
    assert flow.on_node_suspected(D1, is_heard) == [Choose(None, frozenset({D0, D1}))]
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D1}))]
    (reserve,) = flow.on_choice(D0, None, "it queues", 0.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.request.id, reserve.may_wait) == (SECOND, True)
    flow.on_reserve_reply(D0, SECOND, LOCAL, 5.0)
    effects = flow.on_output(D0, output(SECOND, 0, 10))
    assert emitted(effects) == [10]
    assert aborts(effects) == {(D1, FIRST)}


def test_an_answer_that_runs_on_a_suspected_node_waits_in_no_queue_beside() -> None:
    flow = reserving(prefill=None)
    flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0)
    flow.on_choice(D1, None, "another one", 0.0)
    flow.on_reserve_reply(D1, FIRST, LOCAL, 0.0)
    assert flow.on_node_suspected(D1) == [Choose(None, frozenset({D0, D1}))]
    assert flow.on_no_choice(Overloaded("all tried")) == [Wait(WAIT_S)]


def test_suspects_are_known_until_they_are_trusted_lost_or_forgotten() -> None:
    membership = Membership(model="m", lease_s=10.0)
    views = [node_view(name) for name in ("a", "b", "c")]
    a, b, c = (view.incarnation for view in views)
    membership.on_listing([LiveNode(record=one.record, load=one.load) for one in views], 0.0)
    for one in (a, b):
        membership.on_heard(one)
    membership.on_suspected(a, "silent", is_heard=False)
    membership.on_heard(b, unreached="unreached")
    membership.on_suspected(c, "silent", is_heard=False)
    assert membership.suspects == {a: False, b: True, c: False}
    membership.on_heard(a, unreached="unreached")
    assert membership.suspects[a]
    membership.on_heard(a)
    membership.on_lost(b, "broken")
    assert membership.suspects == {c: False}
    membership.on_lost(a, "broken")
    for now_s in (5.0, 10.0, 15.0, 20.0):
        membership.on_listing([], now_s)
    assert membership.suspects == {}


def unanswered(is_heard: bool = False) -> RequestFlow:
    """A new request that D1 refuses for want of room, and that waits for a suspected D0."""
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=600.0
    )
    flow.start({D0: is_heard})
    flow.on_choice(D1, None, "why", 10.0)
    flow.on_reserve_reply(D1, FIRST, Overloaded("full"), 10.0)
    flow.on_no_choice(Overloaded("all tried"))
    flow.on_choice(D1, None, "it queues", 10.0)
    flow.on_reserve_reply(D1, FIRST, Overloaded("its queue is full"), 10.0)
    flow.on_no_choice(Overloaded("all tried"))
    return flow


@pytest.mark.parametrize("is_heard", [False, True])
def test_while_a_suspected_node_does_not_answer_those_that_refused_are_asked_again(
    is_heard: bool,
) -> None:
    flow = unanswered(is_heard)
    assert flow.on_choice(D0, None, "nobody else is left", 10.0)[-1] == Wait(WAIT_S)
    assert flow.on_waited() == [Choose(None, frozenset({D0, D1}))]
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D0}))]
    flow.on_choice(D1, None, "why", 11.0)
    assert flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 11.0)[-1] == Wait(WAIT_S)
    assert flow.on_waited() == [Choose(None, frozenset({D0, D1}))]
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D0}))]
    (reserve,) = flow.on_choice(D1, None, "it queues", 12.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.may_wait
    flow.on_reserve_reply(D1, THIRD, LOCAL, 12.0)
    effects = flow.on_output(D1, output(THIRD, 0, 10))
    assert emitted(effects) == [10]
    assert aborts(effects) == {(D0, FIRST)}


def test_nodes_that_refused_are_not_asked_again_once_a_node_that_is_heard_has_answered() -> None:
    flow = unanswered(is_heard=True)
    flow.on_choice(D0, None, "nobody else is left", 10.0)
    flow.on_reserve_reply(D0, FIRST, LOCAL, 10.5)
    assert flow.on_waited() == []


def test_a_node_that_refuses_late_is_asked_to_queue_what_others_were_asked_to_queue() -> None:
    flow = reserving(prefill=None)  # D0 is asked for room
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D0}))]
    flow.on_choice(D1, None, "it queues", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("its queue is full"), 0.0)
    assert flow.on_no_choice(Overloaded("all tried")) == [Wait(WAIT_S)]
    flow.on_node_trusted(D0)
    effects = flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.5)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))
    assert flow.on_no_choice(Overloaded("all tried")) == [Choose(None, frozenset({D1}))]
    (reserve,) = flow.on_choice(D0, None, "it queues", 0.5)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.may_wait) == (D0, True)
    effects = flow.on_reserve_reply(D0, FIRST, Overloaded("its queue is full"), 0.6)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))
    assert isinstance(failure(flow.on_no_choice(Overloaded("all tried"))), Overloaded)


def test_an_answer_that_goes_on_asks_nobody_again() -> None:
    flow = running()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, None, "why", 0.0)
    flow.on_reserve_reply(D1, SECOND, Overloaded("full"), 0.0)
    flow.on_no_choice(Overloaded("all tried"))
    flow.on_node_trusted(D0)
    assert flow.on_waited() == []


@pytest.mark.parametrize("is_full", [False, True])
def test_a_second_attempt_computes_its_prompt_where_no_prefill_node_takes_it(is_full: bool) -> None:
    flow = reserving()
    flow.on_node_suspected(D0)
    flow.on_choice(D1, P0, "another node", 11.0)
    if not is_full:
        assert flow.on_node_suspected(P0) == []
    effects = flow.on_reserve_reply(D1, SECOND, TICKET, 11.0)
    if is_full:
        effects = flow.on_prefill_reply(P0, SECOND, Overloaded("full"))
    assert isinstance(effects[-1], Choose)
    assert effects[-1].decode == D1
    effects = flow.on_choice(D1, None, "no prefill node is left", 12.0)
    assert aborts(effects) == {(D1, SECOND)}
    reserve = next(one for one in effects if isinstance(one, SendReserve))
    assert (reserve.node, reserve.request.id) == (D1, THIRD)
    assert reserve.must_prefill_locally
    flow.on_reserve_reply(D1, THIRD, LOCAL, 12.0)
    effects = flow.on_output(D1, output(THIRD, 0, 10))
    assert emitted(effects) == [10]
    assert aborts(effects) == {(D0, FIRST)}


def test_an_attempt_that_is_begun_again_still_asks_one_node_when_that_computes_its_prompt() -> None:
    flow = reserving()
    flow.on_node_suspected(D0)
    flow.on_no_choice(Overloaded("all are full"))
    flow.on_waited()
    flow.on_choice(D1, P0, "another node", 11.0)
    flow.on_node_suspected(P0)
    flow.on_reserve_reply(D1, THIRD, TICKET, 11.0)
    fourth = AttemptId("req", 4)
    effects = flow.on_choice(D1, None, "no prefill node is left", 12.0)
    reserve = next(one for one in effects if isinstance(one, SendReserve))
    assert (reserve.node, reserve.request.id) == (D1, fourth)
    effects = flow.on_reserve_reply(D1, fourth, Overloaded("full"), 12.0)
    assert effects == [LegClosed(D1, has_prompt=True), Wait(WAIT_S)]
