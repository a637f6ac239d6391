"""The node's gRPC service: messages to values for the step thread, its answers back to messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from common.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    LastInRole,
    LayoutMismatch,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    PlacementUnavailable,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from common.observing.clock import Clock
from node.control.drain import NodeDrain
from node.control.output_streams import OutputStreams, RouterStream
from node.control.role import NodeRole
from node.control.router_calls import IgnoredPriorities, PrepareGrammar, Replies, RouterCalls
from node.control.tickets import ticket_to_proto
from node.flow.inbox import Inbox
from node.flow.messages import (
    Answer,
    CallRefused,
    PromptAccepted,
    Reserved,
    StartedLocally,
)
from node.flow.step_progress import StepProgress
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import check_envelope, refusal_to_proto, to_ms
from protos.rpc_errors import status_of

MAX_MESSAGE_BYTES = 16 << 20
GREETING_TIMEOUT_S = 5.0
USUAL_REFUSALS = (DeadlineExceeded, Draining, InvalidRequest, LayoutMismatch, Overloaded)
_KEEPS_ROLE = (Draining, InvalidRequest, LastInRole, PlacementUnavailable, StaleEpoch)
Context = grpc.aio.ServicerContext[Any, Any]


class ControlService(pb_grpc.NodeServicer):
    """Checks the envelopes, passes calls to `RouterCalls`, and sends answers and outputs back.

    `refusals` counts refused reservations and prompts by the error's code; it belongs to the event
    loop.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        role: NodeRole,
        inbox: Inbox,
        replies: Replies,
        streams: OutputStreams,
        clock: Clock,
        drain: NodeDrain,
        progress: StepProgress,
        prepare_grammar: PrepareGrammar,
        priorities: IgnoredPriorities,
    ) -> None:
        self._incarnation = incarnation
        self._role = role
        self._inbox = inbox
        self._replies = replies
        self._streams = streams
        self._clock = clock
        self._drain = drain
        self._progress = progress
        self._prepare_grammar = prepare_grammar
        self._priorities = priorities
        # Zero from the start, so that Prometheus sees the first refusal as a rise.
        self.refusals = Counter({error.code: 0 for error in USUAL_REFUSALS})

    async def Stream(  # noqa: N802
        self, messages: AsyncIterator[pb.RouterMessage], context: Context
    ) -> AsyncIterator[pb.NodeMessage]:
        """Take one router's calls; yield replies, outputs, and heartbeats."""
        try:
            router = check_envelope(await _first_envelope(messages), self._incarnation)
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        stream = self._streams.open(router)
        calls = RouterCalls(
            router,
            self._inbox,
            self._replies,
            self._clock,
            answer=partial(self._answer, stream),
            prepare_grammar=self._prepare_grammar,
            priorities=self._priorities,
        )
        listening = asyncio.create_task(self._listen(messages, calls, stream))
        try:
            async for message in self._streams.read(stream):
                message.stuck_ms = round(1000 * self._progress.stuck_s)
                yield message
        finally:
            listening.cancel()
            calls.close()
        if self._streams.fault:  # one that ends in order says that no request has ended the node
            await context.abort(status_of(InternalError()), self._streams.fault)
        if listening.done() and not listening.cancelled():
            wrong = listening.result()
            if wrong is not None:
                await context.abort(status_of(wrong), str(wrong))

    async def _listen(
        self, messages: AsyncIterator[pb.RouterMessage], calls: RouterCalls, stream: RouterStream
    ) -> PdserveError | None:
        """Take messages until the router ends the stream; return the error of an invalid one."""
        try:
            async for message in messages:
                if stream.is_cut:
                    break  # Its router has another stream by now, and gave up what it asked here.
                stream.take_echo(message.echo, message.beat_ms)
                if message.resend_blocks:
                    stream.reports.restart()
                await calls.take(message)
        except PdserveError as wrong:
            return wrong
        finally:
            self._streams.close(stream)
        return None

    def _answer(self, stream: RouterStream, call_id: int, answer: Answer) -> None:
        match answer:
            case Reserved(ticket):
                reply = pb.Reply(call_id=call_id, ticket=ticket_to_proto(ticket))
            case StartedLocally(num_cached_tokens):
                local = pb.LocalStart(num_cached_tokens=num_cached_tokens)
                reply = pb.Reply(call_id=call_id, local=local)
            case PromptAccepted():
                reply = pb.Reply(call_id=call_id, accepted=pb.Accepted())
            case CallRefused():
                reply = pb.Reply(call_id=call_id, refusal=self._refusal(answer))
        self._streams.reply(stream, reply)

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainReply:
        """Begin to drain: the node ends when it holds nothing any more."""
        try:
            check_envelope(request.envelope, self._incarnation)
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        self._drain.requested.set()
        return pb.DrainReply(timeout_ms=to_ms(self._drain.timeout_s))

    async def SetRole(  # noqa: N802
        self, request: pb.RoleRequest, context: Context
    ) -> pb.RoleReply:
        """Change the role of new work; the reply follows when the placement store has it."""
        try:
            check_envelope(request.envelope, self._incarnation)
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        try:
            others = list(request.others.node_ids) if request.HasField("others") else None
            earlier = await self._role.change(_role(request.role), request.number, others)
        except _KEEPS_ROLE as refused:
            return pb.RoleReply(refusal=refusal_to_proto(refused))
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        return pb.RoleReply(earlier=earlier.value)

    def _refusal(self, refused: CallRefused) -> pb.Refusal:
        self.refusals[refused.error.code] += 1
        return refusal_to_proto(
            refused.error, free_blocks=refused.free_blocks, free_seats=refused.free_seats
        )


async def _first_envelope(messages: AsyncIterator[pb.RouterMessage]) -> pb.Envelope:
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            return (await anext(messages)).envelope
    except StopAsyncIteration:
        raise PeerProtocolError("the stream ended before its first envelope") from None
    except TimeoutError:
        raise PeerProtocolError(
            f"the stream sent no envelope within {GREETING_TIMEOUT_S:g} s"
        ) from None


def _role(name: str) -> Role:
    wanted = [role.value for role in Role if role is not Role.ROUTER]
    if name not in wanted:
        raise InvalidRequest(
            f"{name[:32]!r} is no role of a node: wanted {', '.join(wanted)}", param="role"
        )
    return Role(name)
