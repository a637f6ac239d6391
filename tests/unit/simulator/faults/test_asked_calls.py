"""Calls of a router beside its streams: what is wrong in them is not taken for a refusal, and the
store answers some time after it was asked."""

from __future__ import annotations

import pytest

from common.errors import Draining, InternalError
from common.ids import Incarnation
from simulator.faults.awaited import AwaitedReply, drive
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
