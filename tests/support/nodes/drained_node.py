"""A node that is drained while a router asks it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.clock import MonotonicClock
from common.request import RequestOutput
from common.settings.config import Config
from engine.core.runner_contract import OnLayer, OnQueued
from kv_transfer.contract import OnEvent
from node.life.engine_node import EngineNode
from node.life.make_flow import flow_maker
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope, request_to_proto
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import HashRunner
from tests.support.kv.loopback_connector import LoopbackConnector, LoopbackNetwork
from tests.support.nodes.node_caller import NodeCaller
from tests.support.stores.memory_store import MemoryStore

WAIT_S = 60.0
ROUTER = Incarnation("router", 1)


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
            make_flow=flow_maker(self.config),
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
