"""What a router does with strangers, bad records, its own bugs, and streams open at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from common.errors import InternalError, PdserveError
from common.ids import Incarnation
from common.nodes import Role
from common.request import SamplingParams
from pdserve.local_cluster.local_cluster import STOP_TIMEOUT_S
from placement.store import LiveNode
from router.cluster.view import DispatcherView
from router.core.request_flow import RequestFlow
from router.dispatch import node_pool
from router.dispatch.dispatcher import CLOSE_TIMEOUT_S, Dispatcher
from router.dispatch.liveness.pace import ALARM_TICKS, WIDE_NODES
from router.http.server import GRACE_S, bind_http, serve_http
from tests.integration.fake_node import IDLE, FakeNode, record_of
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually, raw_request
from tests.support.http.read_answer import read
from tests.support.http.scripted_generator import never_ends
from tests.support.nodes.node_views import placing
from tests.support.observing.live_readings import scaling
from tests.support.stores.memory_store import MemoryStore

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Store(MemoryStore):
    """A store that can also list what no codec would let through, or fail by a bug."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.more: list[LiveNode] = []
        self.bug: Exception | None = None

    async def live_nodes(self) -> list[LiveNode]:
        if self.bug is not None:
            raise self.bug
        return self.more + await super().live_nodes()


class World:
    """One decode node, one router, and what the router reported."""

    def __init__(self) -> None:
        self.store = Store()
        self.failed = asyncio.Event()
        self.node = FakeNode("d0", Role.DECODE)
        self.router = Dispatcher(
            self.store,
            # The lease runs out in no test.
            placing("round_robin", lease_s=600.0),
            router_id="router-0",
            registry=CollectorRegistry(),
            on_failed=self.failed.set,
        )
        self.view = DispatcherView(self.router, scaling)

    def add_record(self, node_id: str, **changes: Any) -> None:
        record = record_of(Incarnation(node_id, 1), Role.DECODE, "127.0.0.1:1")
        self.store.more.append(LiveNode(record=replace(record, **changes), load=IDLE))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.router.close()
    await world.store.close()


@asynccontextmanager
async def node_of(world: World) -> AsyncIterator[FakeNode]:
    await world.node.start(world.store)
    try:
        yield world.node
    finally:
        await world.node.die()


async def test_nodes_of_another_model_are_left_out_and_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.add_record("other-0", model="big")
    with caplog.at_level(logging.WARNING, "pdserve.router.nodes"):
        for _ in range(3):
            await world.router.pool.refresh(world.router.incarnation)
    assert world.router.pool.membership.records() == []
    assert [record.getMessage() for record in caplog.records] == [
        "other-0#1 is left out: it serves big, not tiny"
    ]
    assert "nodes serve big, this router tiny" in world.view.why_not_ready()
    async with node_of(world):
        await world.router.start()
        await eventually(world.router.pool.nodes)
        assert world.view.why_not_ready() == ""
        world.store.more.clear()
        await world.router.pool.refresh(world.router.incarnation)
        assert world.router.pool.membership.other_models == []


async def test_many_nodes_are_asked_for_fewer_heartbeats(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "TICK_S", 0.0)
    pool = world.router.pool
    seen: list[bool] = []
    for num_nodes in (WIDE_NODES - 1, WIDE_NODES):
        clients = {Incarnation(f"d{n}", 1): Mock() for n in range(num_nodes)}
        for client in clients.values():
            client.liveness.rest.return_value = False
        monkeypatch.setattr(pool, "_clients", clients)
        watching = asyncio.create_task(pool.watch_silence())
        first, *_, last = clients.values()
        await eventually(partial(getattr, last.tick, "called"))
        watching.cancel()
        seen += [client.tick.call_args.kwargs["is_wide"] for client in (first, last)]
        assert first.tick.call_args.kwargs["is_used"] is (num_nodes < WIDE_NODES)
    assert seen == [False, False, True, True]


async def test_one_that_falls_silent_has_all_others_asked_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "TICK_S", 0.0)
    pool = world.router.pool
    seen: list[bool] = []

    def tick(*, is_wide: bool, is_used: bool, is_alarm: bool) -> None:
        seen.append(is_alarm)

    node = Incarnation("d0", 1)
    monkeypatch.setattr(pool, "_clients", {node: Mock(tick=tick)})
    pool.on_suspected(node, "cut off in one direction", is_heard=True)
    watching = asyncio.create_task(pool.watch_silence())
    await eventually(lambda: len(seen) > 3)
    assert not any(seen)
    num_before = len(seen)
    pool.on_suspected(node, "silent", is_heard=False)
    await eventually(lambda: len(seen) > num_before + 2 * ALARM_TICKS)
    watching.cancel()
    assert sum(seen) == ALARM_TICKS


async def test_a_node_whose_lease_has_ended_is_asked_often_and_no_other_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "TICK_S", 0.0)
    pool = world.router.pool
    nodes = [Incarnation("d0", 1), Incarnation("d1", 1)]
    ticks: dict[Incarnation, list[bool]] = {node: [] for node in nodes}
    listing = [
        LiveNode(record=record_of(node, Role.DECODE, "127.0.0.1:1"), load=IDLE) for node in ticks
    ]
    clients = {
        node: Mock(tick=lambda seen=seen, **asked: seen.append(asked["is_alarm"]))
        for node, seen in ticks.items()
    }
    monkeypatch.setattr(pool, "_clients", clients)

    async def ticks_after(listed: list[LiveNode], times_s: range) -> list[bool]:
        for now_s in times_s:
            pool.membership.on_asking()
            pool.membership.on_listing(listed, float(now_s))
        for seen in ticks.values():
            seen.clear()
        watching = asyncio.create_task(pool.watch_silence())
        await eventually(lambda: all(ticks.values()))
        watching.cancel()
        return [seen[-1] for seen in ticks.values()]

    pool.membership.on_listing(listing, 0.0)
    for node in nodes:
        pool.membership.on_heard(node)
    assert await ticks_after(listing[:1], range(300, 601, 300)) == [False, False]
    assert await ticks_after(listing[:1], range(900, 1201, 300)) == [False, True]
    assert await ticks_after(listing, range(1500, 1501)) == [False, False]


@pytest.mark.parametrize("turns", range(4))
async def test_a_node_lost_at_the_very_end_does_not_keep_the_router(
    world: World, turns: int
) -> None:
    pool = world.router.pool
    following = asyncio.create_task(pool.run(world.router.incarnation))
    for _ in range(10):
        await asyncio.sleep(0)
    pool.on_lost(Incarnation("d0", 1), "just now")
    for _ in range(turns):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait([following], timeout=30)
    assert following.cancelled()


async def test_the_longest_node_that_can_finish_sets_the_limit(world: World) -> None:
    assert world.view.max_model_len() is None
    for node_id, role, length in (
        ("p0", Role.PREFILL, 900),
        ("d0", Role.DECODE, 300),
        ("m0", Role.MIXED, 400),
        ("d1", Role.DECODE, 500),
    ):
        world.add_record(node_id, role=role, max_model_len=length)
    pool = world.router.pool
    await pool.refresh(world.router.incarnation)
    for node_id in ("p0", "d0", "m0"):
        pool.membership.on_heard(Incarnation(node_id, 1))
    assert world.view.max_model_len() == 400


@pytest.mark.covers("F91")
async def test_a_bad_record_costs_nobody_else_anything(world: World) -> None:
    world.add_record("bad", control_address="\ud800:1")
    async with node_of(world):
        await world.router.start()
        await eventually(world.router.pool.nodes)
    assert not world.failed.is_set()


async def test_a_background_task_that_ends_by_a_bug_is_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.bug = KeyError("bug")
    await world.router.start()
    async with asyncio.timeout(30):
        await world.failed.wait()
    assert world.router.has_failed
    assert "membership ended by a bug" in caplog.text


async def test_a_router_that_is_closed_has_not_failed(world: World) -> None:
    await world.router.start()
    await world.router.close()
    assert not world.router.has_failed
    assert not world.failed.is_set()


async def test_a_client_hears_of_a_bug_that_kept_its_end_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node is alive, so the flow ends at once; what tells the client so does not work."""
    were_over: list[bool] = []

    def lose_effects(name: str) -> None:
        plain: Callable[[RequestFlow, PdserveError], object] = getattr(RequestFlow, name)

        def broken(flow: RequestFlow, error: PdserveError) -> None:
            plain(flow, error)
            were_over.append(flow.is_done)
            raise KeyError("bug")

        monkeypatch.setattr(RequestFlow, name, broken)

    lose_effects("on_no_choice")
    lose_effects("on_failure")
    stream: AsyncGenerator[Any, None] = read(world.router, (1, 2), GREEDY, deadline_s=60)
    async with asyncio.timeout(30):
        with pytest.raises(InternalError, match="an internal error ended"):
            await anext(stream)
    assert were_over[-1]
    assert len(were_over) == 2
    assert world.router.num_running == 0


async def test_a_stream_that_is_open_at_the_end_is_closed_within_the_grace() -> None:
    edge = make_edge(never_ends())
    body = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 200, "stream": true}'
    listener, stop = bind_http("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    serving = asyncio.create_task(serve_http(edge.app, listener, stop=stop, grace_s=0.1))
    async with raw_request(port, "/v1/completions", body) as (reader, _):
        await reader.readuntil(b"data: ")
        stop.set()
        async with asyncio.timeout(30):
            await serving
    assert edge.generator.calls[0].closed.is_set()


def test_a_router_has_the_time_to_tell_its_nodes_before_it_is_killed() -> None:
    assert GRACE_S + CLOSE_TIMEOUT_S + 2.0 <= STOP_TIMEOUT_S
