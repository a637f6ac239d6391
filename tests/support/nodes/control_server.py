"""The control service on a real server, with an inbox that answers by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from common.grammar import Grammar
from common.ids import Incarnation
from common.nodes import Role
from common.request import GenerationRequest
from kv_transfer.contract import Ticket
from node.control.control_service import ControlService
from node.control.drain import NodeDrain
from node.control.output_streams import OutputStreams
from node.control.role import NodeRole
from node.control.router_calls import IgnoredPriorities, Replies
from node.control.tickets import ticket_to_proto
from node.flow.inbox import Inbox
from node.flow.messages import Answer, Message, RouterGone, SendOutput, Submit
from node.flow.step_progress import StepProgress
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope, request_to_proto
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.build import make_request
from tests.support.nodes.node_caller import NodeCaller
from tests.support.nodes.node_outputs import node_output

ME, ROUTER = Incarnation("node", 3), Incarnation("router", 1)
RECEIVED_AT_S = 12.5
REQUEST = make_request(5, name="a", deadline_s=60.0)
TICKET = Ticket(
    attempt=REQUEST.id,
    decode_node=ME,
    kv_endpoint="tcp://127.0.0.1:1",
    lease_token=9,
    generation=1,
    target_block_ids=(1, 2),
    num_cached_tokens=0,
    fingerprint="f",
    lease_s=30.0,
)


class NotedReplies(Replies):
    """Says when a call is over for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.forgotten = asyncio.Event()

    def forget(self, reply_to: int) -> None:
        super().forget(reply_to)
        self.forgotten.set()


class AnsweringInbox(Inbox):
    """An inbox that answers calls at once, as `answer_with` says; without it nobody answers."""

    def __init__(self, replies: Replies) -> None:
        super().__init__(max_requests=3)
        self.seen: list[Message] = []
        self.has_seen = asyncio.Event()
        self.answer_with: Answer | None = None
        self._replies = replies

    def put(self, message: Message) -> None:
        super().put(message)
        self.seen.append(message)
        self.has_seen.set()
        if isinstance(message, Submit) and self.answer_with is not None:
            self._replies.resolve(message.reply_to, self.answer_with)
            self.take_all()


class Service:
    """A server on a free port and a client of it."""

    def __init__(self, role: Role) -> None:
        loop = asyncio.get_running_loop()
        self.replies = NotedReplies(loop)
        self.inbox = AnsweringInbox(self.replies)
        self.streams = OutputStreams(loop, lambda router: self.inbox.put(RouterGone(router)))
        self.drain = NodeDrain(asyncio.Event(), timeout_s=7.0)
        self.role = NodeRole(role, self.drain, {})
        self.progress = StepProgress(0.0)
        self.prepared: list[Grammar] = []
        self.server = grpc.aio.server()
        self.service = ControlService(
            incarnation=ME,
            role=self.role,
            inbox=self.inbox,
            replies=self.replies,
            streams=self.streams,
            clock=ManualClock(RECEIVED_AT_S),
            drain=self.drain,
            progress=self.progress,
            prepare_grammar=self.prepared.append,
            priorities=IgnoredPriorities(are_enabled=True),
        )
        pb_grpc.add_NodeServicer_to_server(self.service, self.server)  # type: ignore[no-untyped-call]
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub: Any = pb_grpc.NodeStub(self.channel)  # type: ignore[no-untyped-call]

    async def subscribe(self) -> NodeCaller:
        """An open stream: its first heartbeat was heard."""
        caller = NodeCaller(self.stub, make_envelope(ROUTER, ME))
        await caller.greet()
        return caller

    def say(self, number: int, router: Incarnation = ROUTER, **more: Any) -> None:
        output = node_output(REQUEST.id, number, (40 + number,), **more)
        self.streams.add(SendOutput(router, output))
        self.streams.flush()


def reserve(request: GenerationRequest = REQUEST, **more: Any) -> pb.ReserveRequest:
    return pb.ReserveRequest(request=request_to_proto(request), **more)


def prefill(ticket: Ticket | None = TICKET) -> pb.PrefillRequest:
    message = pb.PrefillRequest(request=request_to_proto(REQUEST))
    if ticket is not None:
        message.ticket.CopyFrom(ticket_to_proto(ticket))
    return message


GOOD = make_envelope(ROUTER, ME)


def spoiled(**fields: Any) -> pb.Envelope:
    envelope = make_envelope(ROUTER, ME)
    for name, value in fields.items():
        setattr(envelope, name, value)
    return envelope
