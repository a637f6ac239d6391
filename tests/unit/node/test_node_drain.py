"""How a node leaves: what it says, what it refuses, what it finishes, and when it is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.clock import MonotonicClock
from common.request import FinishReason, RequestOutput
from common.settings.config import Config
from engine.core.runner_contract import OnLayer, OnQueued
from kv_transfer.contract import OnEvent
from node.control import drain as drain_module
from node.flow.inbox import Inbox
from node.flow.messages import Drain, Message, Submit
from node.life import engine_node
from node.life.decode_node import decode_flow_maker
from node.life.engine_node import EngineNode
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope, request_to_proto
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.loopback_connector import LoopbackConnector, LoopbackNetwork
from tests.fakes.memory_store import MemoryStore
from tests.fakes.node_caller import NodeCaller
from tests.fakes.stopped_time import StoppedTime
from tests.unit.engine_core.build import make_request

WAIT_S = 60.0
ROUTER = Incarnation("router", 1)


@pytest.fixture(autouse=True)
def graces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run out where a test says so, and not because the machine stood still."""
    monkeypatch.setattr(drain_module, "LAST_GRACE_S", 600.0)
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 600.0)
    monkeypatch.setattr(engine_node, "STREAMS_GRACE_S", 600.0)


class GatedRunner(HashRunner):
    """Computes one step for each time that it is let."""

    def __init__(self, block_size: int) -> None:
        super().__init__(num_blocks=16, block_size=block_size)
        self.lets = threading.Semaphore(0)

    def execute(
        self, batch: Any, on_layer: OnLayer | None = None, on_queued: OnQueued | None = None
    ) -> Any:
        if on_queued is not None:
            on_queued()  # so that the tokens of the step before leave
        assert self.lets.acquire(timeout=WAIT_S)
        return super().execute(batch, on_layer)

    def let_go_on(self) -> None:
        self.lets.release(1000)


class NotedInbox(Inbox):
    """Tells when the request `late` waits in it, and when the node is to drain."""

    has_late = threading.Event()
    has_drain = threading.Event()

    def put(self, message: Message) -> None:
        super().put(message)
        if isinstance(message, Submit) and message.request.id.choice_id == "late":
            self.has_late.set()
        if isinstance(message, Drain):
            self.has_drain.set()


class NotedStore(MemoryStore):
    """Keeps every load that was announced."""

    def __init__(self) -> None:
        super().__init__(MonotonicClock())
        self.loads: list[NodeLoad] = []
        self.is_announced = asyncio.Event()

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        await super().heartbeat(record, load, lease_s=lease_s)
        self.loads.append(load)
        if load.is_draining:
            self.is_announced.set()


class World:
    """One mixed node that computes when it may, and a router's calls to it."""

    def __init__(
        self, timeout_s: float, metrics_port: int = 0, *, stay_drained: bool = False
    ) -> None:
        config = Config(role=Role.MIXED)
        server = replace(
            config.server,
            node_id="n",
            drain_timeout_s=timeout_s,
            metrics_port=metrics_port,
            stay_drained=stay_drained,
        )
        # A heartbeat of its own accord comes long after the test.
        placement = replace(config.placement, node_lease_s=500.0)
        self.config = replace(config, server=server, placement=placement)
        self.store = NotedStore()
        self.stop, self.drain = asyncio.Event(), asyncio.Event()
        self.told_to_end = asyncio.Event()
        self.runner = GatedRunner(config.engine.block_size)
        self.loading, self.may_load = threading.Event(), threading.Event()
        self.may_load.set()
        self.stub: Any = None
        self.envelope = pb.Envelope()

    def load(self) -> LoadedModel:
        self.loading.set()
        assert self.may_load.wait(WAIT_S)
        return self.runner

    def start(self) -> asyncio.Task[int]:
        def connect(model: LoadedModel, me: Incarnation, on_event: OnEvent) -> NodeConnector:
            network = LoopbackNetwork()
            return LoopbackConnector(
                self.runner.kv_bytes, model.layout, me, on_event, network=network
            )

        parts = NodeParts(
            load_model=self.load,
            make_connector=connect,
            make_flow=decode_flow_maker(self.config),
            store=self.store,
            clock=MonotonicClock(),
        )
        running = EngineNode(self.config, parts).run(self.stop, self.drain, self.told_to_end)
        return asyncio.create_task(running)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[int]]:
        serving = self.start()
        try:
            async with asyncio.timeout(WAIT_S):
                while not (nodes := await self.store.live_nodes()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            record = nodes[0].record
            self.envelope = make_envelope(ROUTER, record.incarnation)
            async with grpc.aio.insecure_channel(record.control_address) as channel:
                self.stub = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
                yield serving
        finally:
            self.runner.let_go_on()
            self.stop.set()
            self.told_to_end.set()
            async with asyncio.timeout(WAIT_S):
                await serving

    async def start_answer(self) -> NodeCaller:
        """The router's stream, behind the first token of an answer of 8."""
        caller = NodeCaller(self.stub, self.envelope)
        await caller.greet()
        reply = await caller.ask(reservation("a"))
        assert reply.WhichOneof("outcome") == "local"
        self.runner.lets.release()
        (output,) = await caller.next_outputs()
        assert len(output.token_ids) == 1
        return caller


def reservation(name: str) -> pb.ReserveRequest:
    request = make_request(5, name=name, max_tokens=8, ignore_eos=True)
    return pb.ReserveRequest(request=request_to_proto(request), must_prefill_locally=True)


async def rest_of(caller: NodeCaller) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    async with asyncio.timeout(WAIT_S):
        while not outputs or outputs[-1].details.finish_reason is None:
            outputs += await caller.next_outputs()
    return outputs


async def ends(serving: asyncio.Task[int]) -> int:
    async with asyncio.timeout(WAIT_S):
        return await serving


async def test_what_runs_is_finished_and_what_is_new_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "Inbox", NotedInbox)
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        caller = await world.start_answer()
        reply = await world.stub.Drain(pb.DrainRequest(envelope=world.envelope))
        assert reply.timeout_ms == 60_000
        async with asyncio.timeout(WAIT_S):
            await world.store.is_announced.wait()
        asking = asyncio.create_task(caller.ask(reservation("late")))
        # The step under way waits meanwhile: the answer is still running.
        assert await asyncio.to_thread(NotedInbox.has_late.wait, WAIT_S)
        world.runner.let_go_on()
        refused = (await asking).refusal
        assert refused.code == "draining"
        outputs = await rest_of(caller)
        assert [t for o in outputs for t in o.token_ids] == right_answer()[1:]
        assert outputs[-1].details.finish_reason is FinishReason.LENGTH
        assert await ends(serving) == 0
        assert await world.store.live_nodes() == []


@pytest.mark.covers("F116")
async def test_what_is_left_at_the_time_out_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "Inbox", NotedInbox)
    world = World(timeout_s=0.0)
    async with world.running() as serving:
        caller = await world.start_answer()
        NotedInbox.has_drain.clear()
        world.drain.set()
        assert await asyncio.to_thread(NotedInbox.has_drain.wait, WAIT_S)
        world.runner.let_go_on()
        outputs = await rest_of(caller)
        assert (outputs[-1].details.finish_reason, outputs[-1].details.error_code) == (
            FinishReason.ERROR,
            "draining",
        )
        said = [t for o in outputs for t in o.token_ids]
        assert said == right_answer()[1 : 1 + len(said)]
        assert await ends(serving) == 0


async def test_the_last_grace_follows_the_time_to_finish() -> None:
    time, requested = StoppedTime(), asyncio.Event()
    requested.set()
    drain = drain_module.NodeDrain(requested, timeout_s=10.0)
    running = asyncio.create_task(drain.run(Inbox(max_requests=1), lambda: None))
    for by_s, is_over in ((0.0, False), (609.0, False), (1.0, True)):
        time.advance(by_s)
        for _ in range(5):
            await asyncio.sleep(0)
        assert running.done() is is_over
    time.go_on()


async def test_an_idle_node_is_gone_at_once() -> None:
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        world.drain.set()
        assert await ends(serving) == 0
    assert await world.store.live_nodes() == []


async def test_a_call_for_another_life_drains_nothing() -> None:
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        stale = pb.Envelope()
        stale.CopyFrom(world.envelope)
        stale.receiver_epoch += 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.stub.Drain(pb.DrainRequest(envelope=stale))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert not world.drain.is_set()
        assert not serving.done()


async def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.05)
    world = World(timeout_s=1000.0)
    async with world.running() as serving:
        await world.start_answer()
        world.drain.set()
        async with asyncio.timeout(WAIT_S):
            await world.store.is_announced.wait()
        assert not serving.done()
        world.stop.set()
        assert await ends(serving) == 0


@pytest.mark.covers("F116")
async def test_a_step_that_hangs_does_not_keep_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "LAST_GRACE_S", 0.05)
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.05)
    world = World(timeout_s=0.0)
    async with world.running() as serving:
        await world.start_answer()
        world.drain.set()
        assert await ends(serving) == 0


async def test_a_node_that_still_loads_has_nothing_to_drain() -> None:
    world = World(timeout_s=1000.0)
    world.may_load.clear()
    serving = world.start()
    assert await asyncio.to_thread(world.loading.wait, WAIT_S)
    world.drain.set()
    assert await ends(serving) == 0
    world.may_load.set()


def right_answer() -> list[int]:
    request = make_request(5, max_tokens=8, ignore_eos=True)
    return expected_tokens(request.prompt_token_ids, request.sampling)
