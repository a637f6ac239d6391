"""How a node ends: while it loads, with a step that hangs, and with one that outlasts the stop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from engine.core.step.step_in_flight import PlannedStep
from kv_transfer.connector import shell
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.contract import OnEvent
from kv_transfer.receiving.effects import ReceiverEffect
from kv_transfer.receiving.machine import Receiver
from node.control.control_port import SERVER_OPTIONS
from node.flow.landing_place import NewLeaseToken
from node.flow.node_flow import NodeFlow
from node.life import connector_watch, engine_node, step_thread
from node.life.engine_node import EngineNode
from node.life.make_flow import flow_maker
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from placement import first_answer
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope, request_to_proto
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import HashRunner
from tests.support.kv.loopback_connector import LoopbackConnector, LoopbackNetwork
from tests.support.nodes.node_caller import NodeCaller
from tests.support.stores.memory_store import MemoryStore

WAIT_S = 20.0
ROUTER = Incarnation("router", 1)


class World:
    """A node whose loading, or whose first step, waits until it is let go."""

    def __init__(self, *, waits_in: str = "") -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.stop = asyncio.Event()
        self.arrived, self.let_go = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self._waits_in = waits_in
        config = Config(role=Role.DECODE)
        self.config = replace(config, server=replace(config.server, host="127.0.0.1", node_id="d"))

    def pass_by(self, place: str) -> None:
        """Every place is passed by; the one to wait in is waited in once."""
        if place == self._waits_in:
            self._waits_in = ""
            self.threads.append(threading.current_thread())
            self.arrived.set()
            assert self.let_go.wait(WAIT_S)

    async def has_arrived(self) -> None:
        assert await asyncio.to_thread(self.arrived.wait, WAIT_S)

    def load(self) -> LoadedModel:
        self.pass_by("load")
        return HashRunner(num_blocks=16, block_size=self.config.engine.block_size)

    def connect(
        self, model: LoadedModel, incarnation: Incarnation, on_event: OnEvent
    ) -> NodeConnector:
        assert isinstance(model, HashRunner)
        self.pass_by("connect")
        network = LoopbackNetwork()
        self.connector = LoopbackConnector(
            model.kv_bytes, model.layout, incarnation, on_event, network=network
        )
        return self.connector

    def flow(
        self,
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
        new_lease_token: NewLeaseToken,
    ) -> NodeFlow:
        make = flow_maker(self.config)
        flow = make(scheduler, model, incarnation, connector, new_lease_token)
        begin_step = flow.begin_step

        def begin_late(now_s: float) -> tuple[PlannedStep, Any]:
            self.pass_by("step")
            return begin_step(now_s)

        flow.begin_step = begin_late  # type: ignore[method-assign]
        return flow

    def start(self) -> asyncio.Task[int]:
        parts = NodeParts(
            load_model=self.load,
            make_connector=self.connect,
            make_flow=self.flow,
            store=self.store,
            clock=self.clock,
        )
        return asyncio.create_task(EngineNode(self.config, parts).run(self.stop))

    async def end(self, running: asyncio.Task[int]) -> int:
        async with asyncio.timeout(WAIT_S):
            return await running

    async def finish_threads(self) -> None:
        self.let_go.set()
        for thread in self.threads:
            await asyncio.to_thread(thread.join, WAIT_S)
            assert not thread.is_alive()


async def test_a_stop_while_the_model_loads_does_not_wait_for_it() -> None:
    world = World(waits_in="load")
    running = world.start()
    await world.has_arrived()
    world.stop.set()
    assert await world.end(running) == 0
    assert await world.store.live_nodes() == []
    await world.finish_threads()


async def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    world = World()

    def fail() -> LoadedModel:
        raise RuntimeError("no weights")

    world.load = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no weights"):
        await world.end(world.start())


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_node_waits_for_its_store_until_it_is_stopped(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_answer, "PAUSE_S", 0.0)
    world = World(waits_in="load")
    was_asked, is_back = asyncio.Event(), asyncio.Event()
    next_epoch = world.store.next_epoch

    async def away(node_id: str) -> int:
        was_asked.set()
        if not is_back.is_set():
            raise PlacementUnavailable("refused")
        return await next_epoch(node_id)

    monkeypatch.setattr(world.store, "next_epoch", away)
    running = world.start()
    await was_asked.wait()
    if comes_back:
        is_back.set()
        await world.has_arrived()
    world.stop.set()
    assert await world.end(running) == 0
    await world.finish_threads()


@pytest.mark.covers("F75")
@pytest.mark.parametrize("away_s", [0.0, 10.0])
async def test_a_node_knows_that_nobody_could_renew_a_lease_before_it_started(
    away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(waits_in="load")
    next_epoch, knows = world.store.next_epoch, []

    async def late(node_id: str) -> int:
        world.clock.advance(away_s)
        return await next_epoch(node_id)

    async def looked(*_: object, was_away: bool, **__: object) -> None:
        knows.append(was_away)

    monkeypatch.setattr(world.store, "next_epoch", late)
    monkeypatch.setattr(engine_node, "refuse_second_life", looked)
    running = world.start()
    await world.has_arrived()
    world.stop.set()
    assert await world.end(running) == 0
    await world.finish_threads()
    assert knows == [away_s > 0]


@pytest.mark.covers("F71")
async def test_a_step_that_hangs_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_thread, "TICK_S", 0.0)
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.01)
    world = World(waits_in="step")
    running = world.start()
    await world.has_arrived()
    with caplog.at_level(logging.CRITICAL, "pdserve.node"):
        assert await world.end(running) == 1
    assert await world.store.live_nodes() == []
    await world.finish_threads()


@pytest.mark.covers("F79")
async def test_a_bug_in_the_kv_connector_ends_the_node_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for anything yet, and the lease alone would keep it looking healthy."""
    world = World(waits_in="step")
    running = world.start()
    await world.has_arrived()
    world.let_go.set()

    def fail(_: ReceivingEnd) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ReceivingEnd, "tick", fail)
    with caplog.at_level(logging.CRITICAL, "pdserve"):
        world.connector.revoke(0)
        assert await world.end(running) == 1
    assert await world.store.live_nodes() == []


@pytest.mark.covers("F79")
async def test_a_hung_connector_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs inside its lock, and the event loop still serves metrics and the lease."""
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(shell, "CLOSE_WITHIN_S", 0.01)
    world = World(waits_in="step")
    running = world.start()
    await world.has_arrived()
    world.let_go.set()
    hangs, may_go_on = threading.Event(), threading.Event()

    def hang(_: Receiver, now_s: float) -> list[ReceiverEffect]:
        world.threads.append(threading.current_thread())
        hangs.set()
        assert may_go_on.wait(WAIT_S)
        return []

    monkeypatch.setattr(Receiver, "on_tick", hang)
    world.connector.revoke(0)
    assert await asyncio.to_thread(hangs.wait, WAIT_S)
    assert world.connector.statistics().landings_open == 0
    # Not before: a connector without work makes one turn in a second.
    monkeypatch.setattr(connector_watch, "MOST_TURN_S", 0.5)
    with caplog.at_level(logging.ERROR, "pdserve"):
        assert await world.end(running) == 1
    assert await world.store.live_nodes() == []
    assert "the KV connector's thread has hung for 0.5 s: the node stops" in caplog.messages
    assert "the KV connector's thread did not end in 0.01 s" in caplog.messages
    may_go_on.set()
    await world.finish_threads()


@pytest.mark.covers("F09")
async def test_an_error_between_allocating_and_recording_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is allocated and not recorded is never allocated again: no code goes on after it."""
    world = World(waits_in="step")
    running = world.start()
    await world.has_arrived()
    world.let_go.set()
    (node,) = await world.store.live_nodes()
    num_asked = 0

    def fail(*_: object, **__: object) -> None:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("a metric that raises")

    monkeypatch.setattr(world.connector, "expect", fail)
    request = make_request(200)  # Too long to compute here: it waits for KV.
    with caplog.at_level(logging.CRITICAL, "pdserve"):
        async with grpc.aio.insecure_channel(node.record.control_address) as channel:
            stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            caller = NodeCaller(stub, make_envelope(ROUTER, node.record.incarnation))
            await caller.greet()
            for _ in range(2):
                await caller.begin(pb.ReserveRequest(request=request_to_proto(request)))
            assert await world.end(running) == 1
            with pytest.raises(grpc.aio.AioRpcError, match="the node ends by a fault"):
                await caller.skip()
    assert num_asked == 1
    assert await world.store.live_nodes() == []


async def test_a_step_that_outlasts_the_stop_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests would be answered, its crash told, over what is closed by then."""
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.01)
    world = World(waits_in="step")
    running = world.start()
    await world.has_arrived()
    world.stop.set()
    assert await world.end(running) == 0
    assert ["a step goes on" in message for message in caplog.messages].count(True) == 1
    caplog.clear()
    await world.finish_threads()
    assert caplog.messages == []


class Cable:
    """A TCP connection to a port that can be pulled out: then nothing is heard, nothing closes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._is_out = False

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def pull(self) -> None:
        self._is_out = True

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not self._is_out:
                sink.write(data)


class Endless(pb_grpc.NodeServicer):
    """A stream that says one word and then nothing, and notes its end."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    async def Stream(  # noqa: N802
        self, messages: Any, context: Any
    ) -> AsyncIterator[pb.NodeMessage]:
        try:
            yield pb.NodeMessage()
            await asyncio.Event().wait()
        finally:
            self.is_over.set()


async def test_a_router_that_vanishes_without_a_word_is_noticed() -> None:
    """With the node's own options, at a tenth of their times."""
    quick = [
        (name, value // 10 if name.endswith("_ms") else value) for name, value in SERVER_OPTIONS
    ]
    servicer = Endless()
    server = grpc.aio.server(options=quick)
    pb_grpc.add_NodeServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    cable = Cable(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{await cable.open()}")
    try:
        stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Stream()
        await call.read()
        cable.pull()
        async with asyncio.timeout(WAIT_S):
            await servicer.is_over.wait()
    finally:
        await channel.close(None)
        await cable.close()
        await server.stop(None)
