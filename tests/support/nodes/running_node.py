"""A whole engine node over a hash runner: real gRPC and HTTP on loopback, no other process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio

from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from common.observing.clock import MonotonicClock
from common.request import GenerationRequest, RequestOutput
from common.settings.config import Config, SpeculationConfig
from kv_transfer.contract import OnEvent
from node.life.engine_node import EngineNode
from node.life.make_flow import flow_maker
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope, request_to_proto
from tests.support.engine.hash_runner import HashRunner
from tests.support.kv.loopback_connector import LoopbackConnector, LoopbackNetwork
from tests.support.nodes.node_caller import NodeCaller
from tests.support.stores.memory_store import MemoryStore

WAIT_S = 20.0
ROUTER = Incarnation("router", 1)


class RunningNode:
    """A node that serves, its record in the store, and what a router does with it."""

    def __init__(self, record: NodeRecord, runner: HashRunner, stub: Any) -> None:
        self.record = record
        self.runner = runner
        self._stub = stub
        self._num_answers = 0

    async def answer(
        self, request: GenerationRequest, router: Incarnation = ROUTER
    ) -> list[RequestOutput]:
        """Everything that the node says to one request, which it computes alone."""
        caller = NodeCaller(self._stub, make_envelope(router, self.record.incarnation))
        await caller.greet(is_first=not self._num_answers)
        self._num_answers += 1
        reply = await caller.ask(
            pb.ReserveRequest(request=request_to_proto(request), must_prefill_locally=True)
        )
        assert reply.WhichOneof("outcome") == "local", reply
        outputs: list[RequestOutput] = []
        async with asyncio.timeout(WAIT_S):
            while not outputs or outputs[-1].details.finish_reason is None:
                outputs += await caller.next_outputs()
        caller.call.cancel()
        return outputs


def node_config(role: Role = Role.MIXED, *, method: str = "none", **server: Any) -> Config:
    """A configuration on loopback."""
    config = Config(role=role, speculation=SpeculationConfig(speculative_method=method))
    return replace(config, server=replace(config.server, node_id="n", **server))


@asynccontextmanager
async def running_node(
    config: Config, runner: HashRunner | None = None, *, kv_secret: bytes = b""
) -> AsyncIterator[RunningNode]:
    """Start a node, wait for its lease, stop it behind the block."""
    store, stop = MemoryStore(MonotonicClock()), asyncio.Event()
    runner = runner or HashRunner(num_blocks=16, block_size=config.engine.block_size)

    def connect(model: LoadedModel, incarnation: Incarnation, on_event: OnEvent) -> NodeConnector:
        return LoopbackConnector(
            runner.kv_bytes, model.layout, incarnation, on_event, network=LoopbackNetwork()
        )

    parts = NodeParts(
        load_model=lambda: runner,
        make_connector=connect,
        make_flow=flow_maker(config),
        store=store,
        clock=MonotonicClock(),
        kv_secret=kv_secret,
    )
    serving = asyncio.create_task(EngineNode(config, parts).run(stop))
    try:
        async with asyncio.timeout(WAIT_S):
            # A store tells nobody by itself that a node has come.
            while not (nodes := await store.live_nodes()) and not serving.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        if serving.done():
            await serving
        record = nodes[0].record
        async with grpc.aio.insecure_channel(record.control_address) as channel:
            stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            yield RunningNode(record, runner, stub)
    finally:
        stop.set()
        async with asyncio.timeout(WAIT_S):
            assert await serving == 0
