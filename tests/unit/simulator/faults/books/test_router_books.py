"""What a router has counted and remembers is compared with what follows from its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import GenerationRequest, SamplingParams
from placement.store import LiveNode
from router.core.attempts import Attempt
from router.core.effects import Choose
from router.core.known.sessions import NO_NODES, SessionNodes
from router.core.membership import Membership
from router.core.placement import ChosenNodes
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.core.token_ledger import TokenLedger
from router.dispatch.liveness.pace import WIDE
from router.dispatch.liveness.silence import LOSS_TICKS
from simulator.faults.books.choices import SessionBooks, check_choice, check_goes_on, check_kept
from simulator.faults.books.requests import MOST_UNANSWERED_TICKS, Legs, Losses, Unanswered
from tests.support.nodes.node_views import node, prefill

D, P = Incarnation("d", 1), Incarnation("p", 1)
ASKED = AttemptId("r", 1)


def members() -> Membership:
    found = Membership(model="m", lease_s=10.0)
    views = (node("d"), prefill("p"))
    found.on_listing([LiveNode(record=one.record, load=one.load) for one in views], 0.0)
    return found


def reserved(planned: Incarnation | None) -> Attempt:
    sampling = SamplingParams(max_tokens=3)
    attempt = Attempt(ASKED, TokenLedger(sampling))
    request = GenerationRequest(id=ASKED, prompt_token_ids=(1, 2), sampling=sampling, deadline_s=1)
    attempt.reserve(D, planned, request, may_wait=False)
    return attempt


def test_what_counts_on_nodes_is_what_requests_have_there() -> None:
    found, legs = members(), Legs()
    legs.check(found)
    found.on_leg_opened(D, 0)
    found.on_leg_opened(P, 2)
    legs.take("r", 2, [reserved(P)])
    legs.check(found)
    legs.take("r", 0, [reserved(None)])
    with pytest.raises(InternalError, match=r"count on p#1, which has \(0, 0\)"):
        legs.check(found)
    legs.take("r", 2, [reserved(None)])
    with pytest.raises(InternalError, match=r"count on d#1, which has \(1, 2\)"):
        legs.check(found)
    found.on_leg_closed(D, 0)
    found.on_leg_closed(P, 1)
    legs.take("r", 2, [])
    with pytest.raises(InternalError, match=r"\(0, 1\) count on p#1"):
        legs.check(found)


def asked_of(decode: Incarnation) -> RequestFlow:
    flow = RequestFlow("r", PromptBlocks((1,)), SamplingParams(max_tokens=8), deadline_at_s=60.0)
    flow.start()
    flow.on_choice(decode, None, "", 0.0)
    return flow


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_loss_counts_for_the_requests_on_the_node_unless_its_stream_ended_in_order(
    is_orderly: bool,
) -> None:
    flows = [asked_of(D), asked_of(D), asked_of(P)]
    losses = Losses(D, flows, is_orderly=is_orderly)
    for flow in flows:
        flow.on_node_lost(D, is_orderly)
    losses.check()
    losses = Losses(D, [asked_of(P)], is_orderly=is_orderly)
    losses.check()
    wrong = asked_of(D)
    losses = Losses(D, [wrong], is_orderly=is_orderly)
    wrong.on_node_lost(D, not is_orderly)
    how = "in order, and counts for r as one that it lost"
    if not is_orderly:
        how = "was lost, and counts for r as one that left"
    with pytest.raises(InternalError, match=how):
        losses.check()


def test_a_session_is_known_for_its_time() -> None:
    books = SessionBooks(5.0)
    first = ChosenNodes(decode=D, prefill=P, reason="")
    alone = ChosenNodes(decode=D, prefill=None, reason="")
    books.check(Query((1,), 1, session=b"a"), first, 1, 0.0)
    books.check(Query((1, 2), 1, session=b"a", last=SessionNodes(D, P, 1)), alone, 1, 4.0)
    books.check(Query((1,), 1, session=b"b"), first, 2, 8.0)
    with pytest.raises(InternalError, match="the choice is told"):
        books.check(Query((1,), 1, session=b"a"), first, 2, 8.5)
    books.check(Query((1,), 1, session=b"a", last=SessionNodes(D, P, 2)), first, 2, 8.5)
    books.check(Query((1,), 1, session=b"b", last=NO_NODES), first, 2, 13.0)
    with pytest.raises(InternalError, match="3 sessions are known: 2 are not over"):
        books.check(Query((1,), 1, session=b"c"), first, 3, 14.0)


def test_a_session_stays_on_a_node_that_is_as_idle_as_any() -> None:
    query = Query((1, 2), 4, session=b"a", last=SessionNodes(D, None, 1))
    moved = ChosenNodes(decode=Incarnation("e", 1), prefill=None, reason="")
    anew = Choose(None, frozenset())
    with pytest.raises(InternalError, match="a session leaves d#1, which is as idle as any"):
        check_kept([node("d"), node("e")], query, anew, moved)
    check_kept([node("d"), node("e")], query, anew, replace(moved, decode=D))
    check_kept([node("d"), node("e")], query, Choose(None, frozenset({D})), moved)
    check_kept([node("d", num_requests=1), node("e")], query, anew, moved)
    check_kept([node("e")], query, anew, moved)


def test_an_answer_goes_on_in_its_layout_while_a_node_of_that_can_take_it() -> None:
    query, old = Query((1, 2), 4, layout="f"), Choose(None, frozenset(), "f")
    there, new = node("d"), node("e", fingerprint="new")
    moved = ChosenNodes(decode=new.incarnation, prefill=None, reason="", layout="new")
    with pytest.raises(InternalError, match="an answer of layout f goes on in another one"):
        check_goes_on([there, new], query, old, moved)
    check_goes_on([there, new], query, replace(old, layout=""), moved)
    check_goes_on([there, new], query, replace(old, excluded=frozenset({D})), moved)
    check_goes_on([there, new], query, old, replace(moved, decode=D, layout="f"))
    for other in (prefill("d"), node("d", is_suspected=True), node("d", is_draining=True)):
        check_goes_on([other, new], query, old, moved)
    kept = replace(query, session=b"a", last=SessionNodes(new.incarnation, None, 1))
    check_kept([there, new], kept, old, replace(moved, decode=D, layout="f"))


def test_a_chosen_node_can_take_the_request() -> None:
    nodes, pair = [node("d"), prefill("p")], ChosenNodes(decode=D, prefill=P, reason="")
    check_choice(nodes, Choose(None, frozenset()), pair)
    check_choice(nodes[1:], Choose(D, frozenset({D})), pair)
    leaving = [nodes[0], prefill("p", is_draining=True)]
    for there, excluded in ((nodes[1:], ()), (nodes, (P,)), (leaving, ())):
        with pytest.raises(InternalError, match="is gone, leaves or has refused it"):
            check_choice(there, Choose(None, frozenset(excluded)), pair)
    itself = ChosenNodes(decode=D, prefill=D, reason="")
    with pytest.raises(InternalError, match="d#1 is chosen to send to itself"):
        check_choice(nodes, Choose(None, frozenset()), itself)
    others = [node("d", fingerprint="another"), prefill("p")]
    with pytest.raises(InternalError, match="KV is to go between layouts"):
        check_choice(others, Choose(None, frozenset()), pair)


def test_a_request_may_wait_for_a_suspected_node_beside_an_idle_one_for_a_moment() -> None:
    flow = asked_of(D)
    unanswered, idle = Unanswered(), {Incarnation("e", 1): 9}
    assert LOSS_TICKS - WIDE.suspicion > MOST_UNANSWERED_TICKS, "the loss would end the wait"
    for _ in range(MOST_UNANSWERED_TICKS):
        unanswered.check({D: False}, [flow], lambda: idle)
    unanswered.check({D: False}, [flow], lambda: {Incarnation("e", 1): 8})
    for _ in range(MOST_UNANSWERED_TICKS):
        unanswered.check({D: False}, [flow], lambda: idle)
    with pytest.raises(InternalError, match="r/1 waits for a suspected node, and others are idle"):
        unanswered.check({D: False}, [flow], lambda: idle)
    flow.on_node_suspected(D)
    unanswered.check({D: False}, [flow], lambda: idle)
