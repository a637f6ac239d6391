"""Calls of a router beside its streams: what is wrong in them is not taken for a refusal, requests
hear of a role when their router does, and the store answers some time after it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Draining, InternalError, PdserveError
from common.ids import Incarnation
from common.nodes import Role
from router.core.known.member_effects import MembershipEffect, NodeDecodes
from simulator.faults.awaited import AwaitedReply, drive
from simulator.faults.beside import AdministratorCalls
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.store.calls import StoreCalls
from simulator.faults.store.leading import Leading
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline
from tests.support.nodes.node_views import node


async def waiting(reply: AwaitedReply, then: Exception | None = None) -> None:
    await reply
    if then is not None:
        raise then


def test_what_is_wrong_in_a_call_is_raised_and_a_refusal_ends_it() -> None:
    ended: list[str] = []
    reply = AwaitedReply()
    drive(waiting(reply), on_end=lambda: ended.append("refused"))
    reply.end(Draining("it leaves"))
    assert ended == ["refused"]
    reply = AwaitedReply()
    drive(waiting(reply, InternalError("wrong")), on_end=lambda: ended.append("wrong"))
    with pytest.raises(InternalError, match="wrong"):
        reply.end(None)
    assert ended == ["refused"]


class OneNode:
    """A prefill node, with its membership at a router; `seen` is what happens to both, in order."""

    def __init__(self, wrong: InternalError | None = None) -> None:
        self.timeline, self.seen = Timeline(), list[str]()
        self._wrong = wrong
        router, self.me = Incarnation("router", 1), Incarnation("p", 1)
        life = SimpleNamespace(
            set_role=lambda role, number, others: None, num_moves=1, role=Role.PREFILL
        )
        lives: Any = {
            self.me: SimpleNamespace(me=self.me, clock=ProcessClock(self.timeline), life=life)
        }
        membership: Any = self
        self._calls = AdministratorCalls(
            *(router, ProcessClock(self.timeline), self.timeline, Paths(), 0.01, lives),
            membership,
            follow=self.follow,
            refresh_soon=lambda: self.seen.append("refreshed"),
        )

    def on_role(self, one: Incarnation, role: Role) -> list[MembershipEffect]:
        self.seen.append(f"{one} becomes {role.value}")
        return [NodeDecodes(one)]

    def follow(self, effects: Sequence[MembershipEffect]) -> None:
        assert effects == [NodeDecodes(self.me)]
        self.seen.append("requests are told")
        if self._wrong is not None:
            raise self._wrong

    async def let_decode(self) -> None:
        try:
            await self._calls.set_role(self.me, Role.DECODE)
        except PdserveError:
            self.seen.append("refused")


def test_requests_hear_of_a_role_at_the_moment_at_which_their_router_does() -> None:
    one = OneNode()
    drive(one.let_decode())
    one.timeline.run()
    assert one.seen == ["p#1 becomes decode", "requests are told", "refreshed"]


def test_what_is_wrong_in_requests_that_hear_of_a_role_is_no_refusal_of_the_node() -> None:
    one = OneNode(InternalError("wrong"))
    drive(one.let_decode())
    with pytest.raises(InternalError, match="wrong"):
        one.timeline.run()
    assert one.seen == ["p#1 becomes decode", "requests are told", "refreshed"]


def test_the_store_answers_later_with_what_it_had_when_it_was_asked() -> None:
    timeline, leases = Timeline(), Leases(2.0)
    router = Incarnation("router", 1)
    clock = ProcessClock(timeline)
    store = StoreCalls(router, clock, timeline, Paths(), leases, Leading(leases), 0.01, seed=1)
    found: list[tuple[float, int]] = []

    async def ask() -> None:
        found.append((timeline.now_s(), len(await store.live_nodes())))

    view = node("d")
    leases.heartbeat(view.record, view.load, 0.0)
    drive(ask())
    timeline.run()
    assert found == [(0.0, 1)]
    assert timeline.now_s() >= 0.02
