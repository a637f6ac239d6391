"""A scripted node: a real gRPC server on a free port whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import grpc

from common.errors import PdserveError
from common.files.keys_folder import Keys
from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.request import GenerationRequest, RequestOutput
from node.control.control_port import SERVER_OPTIONS
from placement.store import PlacementStore
from protos import pdserve_node_pb2 as pb
from protos.codec import attempts_from_proto, check_envelope, request_from_proto
from protos.output_batches import outputs_to_proto
from protos.pdserve_node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from protos.rpc_errors import status_of
from protos.transport_security import add_port
from tests.support.kv.links import Link

Reserve = Callable[[GenerationRequest, bool], Awaitable[pb.Reply]]
Prefill = Callable[[GenerationRequest, pb.Ticket | None], Awaitable[pb.Reply]]


FINGERPRINT = "f" * 32


def record_of(node: Incarnation, role: Role, address: str, max_model_len: int = 1024) -> NodeRecord:
    return NodeRecord(
        node_id=node.node_id,
        epoch=node.epoch,
        role=role,
        control_address=address,
        model="tiny",
        fingerprint=FINGERPRINT,
        block_size=16,
        num_blocks=64,
        max_num_seqs=8,
        max_model_len=max_model_len,
    )


IDLE = NodeLoad(free_blocks=64, free_seats=8, num_running=0, num_waiting=0, queued_tokens=0)


class FakeNode(cast(Any, NodeServicer)):  # type: ignore[misc]
    """Set `on_reserve` and `on_prefill`; push outputs; look at `asked` and `aborted`."""

    def __init__(self, node_id: str, role: Role, epoch: int = 1, max_model_len: int = 1024) -> None:
        self.incarnation = Incarnation(node_id, epoch)
        self.role = role
        self.max_model_len = max_model_len
        self.stuck_ms = 0
        self.echo = 0
        """The latest number that a router sent; 0 in a node of an earlier release."""
        self.beat_ms = 0
        """The latest silence that a router allowed."""
        self.repeats_numbers = True
        self.sends_blocks = False
        self.fingerprint = FINGERPRINT
        self.link: Link | None = None
        """The network before its port, where a test put one."""
        self.is_unheard = False
        self.on_reserve: Reserve = self._grant
        self.on_prefill: Prefill = self._accept
        self.asked: list[GenerationRequest] = []
        self.aborted: list[AttemptId] = []
        self.pulls: list[pb.Pull] = []
        self.fetches: list[pb.Fetch] = []
        self.refused_pulls: list[int] = []
        self.new_nodes: list[pb.NewNode] = []
        self.sources: list[pb.PrefixSource | None] = []
        """What it was told of each prompt."""
        self.num_said = 0
        """Messages that it has sent, to all routers."""
        self.num_messages = 0
        self.num_calls_before_aborts = 0
        self.num_refused = 0
        self.num_drains = 0
        self.num_resends = 0
        """How often a router asked for all blocks again."""
        self.news = asyncio.Event()
        self.streams: list[asyncio.Queue[pb.NodeMessage | None]] = []
        self._answering: set[asyncio.Task[None]] = set()
        self._server: Any = None
        self._store: PlacementStore | None = None
        self.port = 0

    async def start(
        self, store: PlacementStore, *, port: int = 0, keys: Keys | None = None
    ) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        cast(Any, add_NodeServicer_to_server)(self, self._server)
        self.port = add_port(self._server, f"127.0.0.1:{port}", keys)
        await self._server.start()
        self._store = store
        await self.renew()

    async def renew(self) -> None:
        """Tell the store what the node is now."""
        assert self._store is not None, "it has started"
        address = f"127.0.0.1:{self.port}"
        record = record_of(self.incarnation, self.role, address, self.max_model_len)
        record = replace(record, sends_blocks=self.sends_blocks, fingerprint=self.fingerprint)
        await self._store.heartbeat(record, IDLE, lease_s=600)

    async def die(self) -> None:
        """Every connection is cut; nothing is said."""
        self.end_streams()
        await self.stop()

    async def stop(self, grace_s: float | None = None) -> None:
        """Close the port, and return when the streams have ended; after `grace_s` they are cut."""
        await self._server.stop(grace_s)

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.put_nowait(None)
        self.streams.clear()

    def push(self, *outputs: RequestOutput) -> None:
        """One message to every router that listens."""
        self.push_raw(outputs_to_proto(outputs))

    def push_raw(self, batch: pb.OutputBatch) -> None:
        for stream in self.streams:
            stream.put_nowait(pb.NodeMessage(outputs=batch, stuck_ms=self.stuck_ms, echo=self.echo))

    # The servicer.

    async def Stream(self, messages: Any, context: Any) -> Any:  # noqa: N802
        await self._check((await anext(messages)).envelope, context)
        stream: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self.streams.append(stream)
        listening = asyncio.create_task(self._listen(messages, stream))
        try:
            self.num_said += 1
            yield pb.NodeMessage()
            while (message := await stream.get()) is not None:
                self.num_said += 1
                yield message
        finally:
            listening.cancel()
            for answering in self._answering:
                answering.cancel()

    async def _listen(self, messages: Any, stream: asyncio.Queue[pb.NodeMessage | None]) -> None:
        async for message in messages:
            self.num_resends += message.resend_blocks
            self.num_messages += bool(message.calls or message.HasField("aborts"))
            if self.repeats_numbers:
                self.echo = max(self.echo, message.echo)
            self.beat_ms = message.beat_ms or self.beat_ms
            self.pulls += message.pulls
            self.fetches += message.fetches
            self.refused_pulls += message.refused_pulls
            self.new_nodes += message.new_nodes
            for call in message.calls:
                answering = asyncio.create_task(self._answer(call, stream))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                self.num_calls_before_aborts += not self.aborted
            if message.HasField("aborts"):
                self.aborted += attempts_from_proto(message.aborts)
                self.news.set()
        stream.put_nowait(None)  # the router has said all

    async def _answer(self, call: pb.Call, stream: asyncio.Queue[pb.NodeMessage | None]) -> None:
        asked = call.reserve if call.HasField("reserve") else call.prefill
        values = request_from_proto(asked.request)
        self.asked.append(values)
        self.news.set()
        if call.HasField("reserve"):
            named = call.reserve.HasField("source")
            self.sources.append(call.reserve.source if named else None)
            reply = await self.on_reserve(values, call.reserve.must_prefill_locally)
        else:
            ticket = call.prefill.ticket if call.prefill.HasField("ticket") else None
            named = call.prefill.HasField("source")
            self.sources.append(call.prefill.source if named else None)
            reply = await self.on_prefill(values, ticket)
        reply.call_id = call.id
        stream.put_nowait(pb.NodeMessage(replies=[reply]))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        await self._check(request.envelope, context)
        self.num_drains += 1
        return pb.DrainReply(timeout_ms=30_000)

    async def _check(self, envelope: pb.Envelope, context: Any) -> None:
        try:
            check_envelope(envelope, self.incarnation)
        except PdserveError as wrong:
            self.num_refused += 1
            await context.abort(status_of(wrong), str(wrong))

    async def _grant(self, request: GenerationRequest, is_local: bool) -> pb.Reply:
        if is_local or self.role is Role.MIXED:
            return pb.Reply(local=pb.LocalStart(num_cached_tokens=0))
        ticket = pb.Ticket(
            decode_node_id=self.incarnation.node_id,
            decode_epoch=self.incarnation.epoch,
            kv_endpoint="tcp://127.0.0.1:1",
            lease_token=7,
            generation=1,
            target_block_ids=[1, 2],
            num_cached_tokens=16,
            fingerprint="f" * 32,
            lease_ms=1000,
        )
        return pb.Reply(ticket=ticket)

    async def _accept(self, request: GenerationRequest, ticket: pb.Ticket | None) -> pb.Reply:
        return pb.Reply(accepted=pb.Accepted())
