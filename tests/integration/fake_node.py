"""A scripted node: a real gRPC server on a free port whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.request import GenerationRequest, RequestOutput
from placement.store import PlacementStore
from protos import pdserve_node_pb2 as pb
from protos.codec import check_envelope, output_to_proto, request_from_proto
from protos.pdserve_node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from protos.rpc_errors import status_of

Reserve = Callable[[GenerationRequest, bool], Awaitable[pb.ReserveReply]]
Prefill = Callable[[GenerationRequest, pb.Ticket | None], Awaitable[pb.PrefillReply]]


def record_of(node: Incarnation, role: Role, address: str, max_model_len: int = 1024) -> NodeRecord:
    return NodeRecord(
        incarnation=node,
        role=role,
        control_address=address,
        model="tiny",
        fingerprint="f" * 32,
        block_size=16,
        num_blocks=64,
        max_num_seqs=8,
        max_model_len=max_model_len,
    )


IDLE = NodeLoad(free_blocks=64, free_seats=8, num_running=0, num_waiting=0, queued_tokens=0)


class FakeNode(cast(Any, NodeServicer)):  # type: ignore[misc]
    """Set `on_reserve` and `on_prefill`; push outputs; look at `asked` and `aborted`."""

    def __init__(self, node_id: str, role: Role, epoch: int = 1) -> None:
        self.incarnation = Incarnation(node_id, epoch)
        self.role = role
        self.on_reserve: Reserve = self._grant
        self.on_prefill: Prefill = self._accept
        self.asked: list[GenerationRequest] = []
        self.aborted: list[AttemptId] = []
        self.num_abort_calls = 0
        self.num_drains = 0
        self.may_abort = asyncio.Event()
        self.may_abort.set()
        self.news = asyncio.Event()
        self.streams: list[asyncio.Queue[pb.OutputBatch | None]] = []
        self._server: Any = None
        self.port = 0

    async def start(self, store: PlacementStore, *, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        cast(Any, add_NodeServicer_to_server)(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        record = record_of(self.incarnation, self.role, f"127.0.0.1:{self.port}")
        await store.heartbeat(record, IDLE, lease_s=60)

    async def die(self) -> None:
        """Every connection is cut; nothing is said."""
        self.end_streams()
        await self._server.stop(None)

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.put_nowait(None)
        self.streams.clear()

    def push(self, *outputs: RequestOutput) -> None:
        """One message to every router that listens."""
        self.push_raw(pb.OutputBatch(outputs=[output_to_proto(output) for output in outputs]))

    def push_raw(self, batch: pb.OutputBatch) -> None:
        for stream in self.streams:
            stream.put_nowait(batch)

    # The servicer.

    async def Stream(self, request: pb.StreamRequest, context: Any) -> Any:  # noqa: N802
        await self._check(request.envelope, context)
        stream: asyncio.Queue[pb.OutputBatch | None] = asyncio.Queue()
        self.streams.append(stream)
        yield pb.OutputBatch()
        while (batch := await stream.get()) is not None:
            yield batch

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:  # noqa: N802
        await self._check(request.envelope, context)
        values = request_from_proto(request.request)
        self._tell(values)
        return await self.on_reserve(values, request.must_prefill_locally)

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillReply:  # noqa: N802
        await self._check(request.envelope, context)
        values = request_from_proto(request.request)
        self._tell(values)
        ticket = request.ticket if request.HasField("ticket") else None
        return await self.on_prefill(values, ticket)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:  # noqa: N802
        await self._check(request.envelope, context)
        self.num_abort_calls += 1
        await self.may_abort.wait()
        self.aborted += [AttemptId(a.request_id, a.attempt) for a in request.attempts]
        self.news.set()
        return pb.AbortReply()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        await self._check(request.envelope, context)
        self.num_drains += 1
        return pb.DrainReply(timeout_ms=30_000)

    def _tell(self, values: GenerationRequest) -> None:
        self.asked.append(values)
        self.news.set()

    async def _check(self, envelope: pb.Envelope, context: Any) -> None:
        try:
            check_envelope(envelope, self.incarnation)
        except PdserveError as wrong:
            await context.abort(status_of(wrong), str(wrong))

    async def _grant(self, request: GenerationRequest, is_local: bool) -> pb.ReserveReply:
        if is_local or self.role is Role.MIXED:
            return pb.ReserveReply(local=pb.LocalStart(num_cached_tokens=0))
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
        return pb.ReserveReply(ticket=ticket)

    async def _accept(
        self, request: GenerationRequest, ticket: pb.Ticket | None
    ) -> pb.PrefillReply:
        return pb.PrefillReply()
