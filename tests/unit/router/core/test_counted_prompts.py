"""On which node the leg and the prompt count from the choice on, and until when."""

from __future__ import annotations

import pytest

from common.errors import Overloaded
from common.nodes import NodeLoad, Role
from common.request import FinishReason, RequestCounts
from placement.store import LiveNode
from router.core.counted_legs import CountedEffect, count_legs
from router.core.effects import (
    Effect,
    LegClosed,
    PromptComputed,
    PromptKept,
    SendPrefill,
    SendReserve,
)
from router.core.generation import TokenChunk
from router.core.membership import Membership
from router.core.request_flow import DecodeGrant
from tests.support.nodes.node_records import record
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
    new_flow,
    output,
    reserving,
)


def test_a_prefill_node_counts_from_its_choice_on() -> None:
    flow = new_flow()
    (reserve,) = flow.on_choice(D0, P0, "why", 10.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.prefill == P0
    prefill, _ = flow.on_reserve_reply(D0, FIRST, TICKET, 12.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.is_counted
    flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    prefill, _ = flow.on_choice(D0, P1, "next", 13.0)
    assert isinstance(prefill, SendPrefill)
    assert not prefill.is_counted


@pytest.mark.parametrize("end", ["client gone", "lost", "output"])
def test_a_planned_prefill_node_is_given_up_once(end: str) -> None:
    flow = reserving()
    if end == "client gone":
        effects = flow.on_client_gone()
    elif end == "lost":
        effects = flow.on_node_lost(D0)
    else:
        effects = flow.on_output(D0, output(FIRST, 0, 10, is_started=True))
        effects += flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    assert effects.count(LegClosed(P0, has_prompt=True)) == 1
    assert (P0, FIRST) not in aborts(effects), "it was not asked"


def prompts(effects: list[Effect]) -> list[Effect]:
    """Return those that tell until when the prompt counts on D0."""
    return [
        one
        for one in effects
        if one in (PromptKept(D0), PromptComputed(D0))
        or (isinstance(one, LegClosed) and one.node == D0)
    ]


def test_a_prompt_counts_on_the_node_that_goes_on_with_it_until_its_first_token() -> None:
    flow = reserving(prefill=None)
    assert prompts(flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)) == []
    assert prompts(flow.on_output(D0, output(FIRST, 0, is_started=True))) == []
    assert prompts(flow.on_output(D0, output(FIRST, 0, 10))) == [PromptComputed(D0)]
    ending = flow.on_output(D0, output(FIRST, 1, 11, finish=FinishReason.STOP))
    assert prompts(ending) == [LegClosed(D0)]


def test_a_prompt_that_a_decode_node_keeps_moves_to_it_from_the_planned_node() -> None:
    flow = reserving()
    effects = flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    assert effects.index(LegClosed(P0, has_prompt=True)) < effects.index(PromptKept(D0))
    assert prompts(flow.on_output(D0, output(FIRST, 0, 10))) == [PromptComputed(D0)]
    assert prompts(flow.on_client_gone()) == [LegClosed(D0)]


def test_a_prompt_that_a_decode_node_keeps_is_in_the_books_of_that_node() -> None:
    load = NodeLoad(free_blocks=100, free_seats=4, num_running=0, num_waiting=0, queued_tokens=0)
    nodes = [
        LiveNode(record=record("d0"), load=load),
        LiveNode(record=record("p0", Role.PREFILL), load=load),
    ]
    members = Membership(model="m", lease_s=5.0)
    members.on_listing(nodes, 0.0)
    for node in (D0, P0):
        members.on_heard(node)
    flow = new_flow()
    seen = []
    for effects in (
        flow.on_choice(D0, P0, "why", 0.0),
        flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0),
        flow.on_output(D0, output(FIRST, 0, 10)),
        flow.on_client_gone(),
    ):
        for effect in effects:
            if isinstance(effect, CountedEffect):
                count_legs(members, effect, 900)
        seen.append([(one.num_requests, one.num_queued_tokens) for one in members.nodes()])
    assert seen == [[(1, 0), (1, 900)], [(1, 900), (0, 0)], [(1, 0), (0, 0)], [(0, 0), (0, 0)]]


@pytest.mark.parametrize("end", ["client gone", "lost"])
def test_a_prompt_that_a_decode_node_keeps_counts_until_its_leg_is_over(end: str) -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    effects = flow.on_client_gone() if end == "client gone" else flow.on_node_lost(D0)
    assert prompts(effects) == [LegClosed(D0, has_prompt=True)]


@pytest.mark.parametrize("reply", [LOCAL, TICKET])
def test_a_reply_behind_the_first_token_counts_no_prompt(reply: DecodeGrant) -> None:
    flow = reserving()
    effects = flow.on_output(D0, output(FIRST, 0, 10, is_started=True))
    effects += flow.on_reserve_reply(D0, FIRST, reply, 0.0)
    assert prompts(effects + flow.on_client_gone()) == [LegClosed(D0)]


def test_an_output_without_a_token_in_front_of_the_reply_moves_the_prompt_to_its_node() -> None:
    flow = reserving()
    effects = flow.on_output(D0, output(FIRST, 0, is_started=True))
    assert effects.index(LegClosed(P0, has_prompt=True)) < effects.index(PromptKept(D0))
    assert prompts(flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)) == []
    (chunk,) = [
        one for one in flow.on_output(D0, output(FIRST, 0, 10)) if isinstance(one, TokenChunk)
    ]
    assert chunk.counts == RequestCounts(LOCAL.num_cached_tokens), "as the client is told"
    assert prompts(flow.on_client_gone()) == [LegClosed(D0)]


@pytest.mark.parametrize("end", ["client gone", "lost", "refused", "one token"])
def test_a_prompt_without_a_token_counts_until_its_leg_is_over(end: str) -> None:
    flow = reserving(prefill=None)
    if end == "client gone":
        effects = flow.on_client_gone()
    elif end == "lost":
        effects = flow.on_node_lost(D0)
    elif end == "refused":
        effects = flow.on_reserve_reply(D0, FIRST, Overloaded("full"), 0.0)
    else:
        effects = flow.on_output(D0, output(FIRST, 0, 10, finish=FinishReason.STOP))
    assert prompts(effects) == [LegClosed(D0, has_prompt=True)]


def test_a_prompt_that_another_node_computes_does_not_count_on_the_decode_node() -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, TICKET, 0.0)
    effects = flow.on_output(P0, output(FIRST, 0, 10))
    effects += flow.on_output(D0, output(FIRST, 0, is_started=True))
    effects += flow.on_output(D0, output(FIRST, 1, 11, finish=FinishReason.STOP))
    assert prompts(effects) == [LegClosed(D0)]
    assert effects.count(LegClosed(P0, has_prompt=True)) == 1


def test_an_attempt_that_begins_again_counts_its_prompt_again() -> None:
    flow = reserving(prefill=None)
    flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    flow.on_output(D0, output(FIRST, 0, 10))
    assert LegClosed(D0) in flow.on_node_lost(D0)
    (reserve,) = flow.on_choice(D1, None, "again", 0.0)
    assert isinstance(reserve, SendReserve)
    assert PromptComputed(D1) in flow.on_output(D1, output(SECOND, 1, 11))
