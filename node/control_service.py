"""The node's gRPC service: messages in, values to the step thread, answers back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import grpc
import grpc.aio

from common.clock import Clock
from common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LayoutMismatch,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    StaleEpoch,
)
from common.ids import Incarnation
from common.logs import about
from common.nodes import Role
from node.drain import NodeDrain
from node.inbox import Inbox
from node.messages import (
    Abort,
    Accepted,
    Answer,
    NodeStatus,
    Refused,
    Reserved,
    StartedLocally,
    StatusQuery,
    Submit,
)
from node.output_streams import OutputStreams
from node.tickets import ticket_from_proto, ticket_to_proto
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import (
    attempt_from_proto,
    check_envelope,
    output_to_proto,
    refusal_to_proto,
    request_from_proto,
    to_ms,
)
from protos.rpc_errors import status_of

log = logging.getLogger("pdserve.node.attempts")

MAX_MESSAGE_BYTES = 16 << 20
MAX_ABORTS_PER_CALL = 4096
STATUS_TIMEOUT_S = 60.0
USUAL_REFUSALS = (DeadlineExceeded, Draining, InvalidRequest, LayoutMismatch, Overloaded)
Context = grpc.aio.ServicerContext[Any, Any]


class Replies:
    """Calls that wait for the step thread. On the event loop; `resolve` is thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._futures: dict[int, asyncio.Future[Answer]] = {}
        self._ids = count(1)

    def new(self) -> tuple[int, asyncio.Future[Answer]]:
        """A place for one answer."""
        reply_to = next(self._ids)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._futures[reply_to] = future
        return reply_to, future

    def forget(self, reply_to: int) -> None:
        """The call ended; a late answer finds nobody."""
        self._futures.pop(reply_to, None)

    def resolve(self, reply_to: int, answer: Answer) -> None:
        """Answer a call; thread-safe."""
        self._loop.call_soon_threadsafe(self._set, reply_to, answer)

    def _set(self, reply_to: int, answer: Answer) -> None:
        future = self._futures.pop(reply_to, None)
        if future is not None and not future.done():
            future.set_result(answer)


class ControlService(pb_grpc.NodeServicer):
    """Checks every envelope, translates, and waits no longer than the request's deadline.

    `refusals` counts reservations and prompts that were refused, by the error's code. It belongs to
    the event loop.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        role: Role,
        inbox: Inbox,
        replies: Replies,
        streams: OutputStreams,
        clock: Clock,
        drain: NodeDrain,
    ) -> None:
        self._incarnation = incarnation
        self._role = role
        self._inbox = inbox
        self._replies = replies
        self._streams = streams
        self._clock = clock
        self._drain = drain
        # The usual ones are there from the start, so that the first of them is seen as a rise.
        self.refusals = Counter({error.code: 0 for error in USUAL_REFUSALS})

    async def Stream(  # noqa: N802
        self, request: pb.StreamRequest, context: Context
    ) -> AsyncIterator[pb.OutputBatch]:
        """One router's tokens, and a heartbeat a second."""
        try:
            router = check_envelope(request.envelope, self._incarnation)
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        async for batch in self._streams.read(router):
            yield pb.OutputBatch(outputs=[output_to_proto(output) for output in batch])

    async def Reserve(  # noqa: N802
        self, request: pb.ReserveRequest, context: Context
    ) -> pb.ReserveReply:
        """Hold blocks and a seat, or start a short prompt at once."""
        if self._role is Role.PREFILL:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "a prefill node takes no reservations"
            )
        answer = await self._submit(request, context)
        match answer:
            case Reserved(ticket):
                return pb.ReserveReply(ticket=ticket_to_proto(ticket))
            case StartedLocally(num_cached_tokens):
                return pb.ReserveReply(local=pb.LocalStart(num_cached_tokens=num_cached_tokens))
            case Refused():
                return pb.ReserveReply(refusal=self._refusal(answer))
        raise AssertionError(f"no answer to a reservation: {answer!r}")

    async def Prefill(  # noqa: N802
        self, request: pb.PrefillRequest, context: Context
    ) -> pb.PrefillReply:
        """Take a prompt."""
        if self._role is not Role.PREFILL:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"a {self._role.value} node takes no prompts"
            )
        answer = await self._submit(request, context)
        match answer:
            case Accepted():
                return pb.PrefillReply()
            case Refused():
                return pb.PrefillReply(refusal=self._refusal(answer))
        raise AssertionError(f"no answer to a prompt: {answer!r}")

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: Context
    ) -> pb.AbortReply:
        """Give attempts up; done when the step thread next reads its inbox."""
        try:
            router = check_envelope(request.envelope, self._incarnation)
            if len(request.attempts) > MAX_ABORTS_PER_CALL:
                raise InvalidRequest(
                    f"{len(request.attempts)} attempts: wanted at most {MAX_ABORTS_PER_CALL}"
                )
            attempts = tuple(attempt_from_proto(a.request_id, a.attempt) for a in request.attempts)
            self._inbox.put(Abort(router, attempts))
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        return pb.AbortReply()

    async def Status(  # noqa: N802
        self, request: pb.StatusRequest, context: Context
    ) -> pb.StatusReply:
        """The node's books."""
        reply_to, future = self._replies.new()
        try:
            check_envelope(request.envelope, self._incarnation)
            self._inbox.put(StatusQuery(reply_to))
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                answer = await future
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the step loop does not answer")
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        finally:
            self._replies.forget(reply_to)
        assert isinstance(answer, NodeStatus)
        return self._status_reply(answer)

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainReply:
        """Leave: the node ends by itself when nothing is left of what it holds."""
        try:
            check_envelope(request.envelope, self._incarnation)
        except PdserveError as error:
            await context.abort(status_of(error), str(error))
        self._drain.requested.set()
        return pb.DrainReply(timeout_ms=to_ms(self._drain.timeout_s))

    async def _submit(
        self, message: pb.ReserveRequest | pb.PrefillRequest, context: Context
    ) -> Answer:
        reply_to, future = self._replies.new()
        try:
            router = check_envelope(message.envelope, self._incarnation)
            submit = self._submit_message(message, router, reply_to)
            if not self._streams.is_open(router):
                # It may have ended a moment ago, with this node: another one may do.
                raise NodeLost(f"router {router} has no open token stream")
            self._inbox.put(submit)
            async with asyncio.timeout(submit.request.deadline_s):
                answer = await future
            _log_begin(submit, answer)
            return answer
        except TimeoutError:
            return Refused(DeadlineExceeded("the request's deadline passed on the node"))
        except (StaleEpoch, PeerProtocolError) as error:
            await context.abort(status_of(error), str(error))
        except PdserveError as error:
            return Refused(error)
        finally:
            self._replies.forget(reply_to)
        raise AssertionError("unreachable")

    def _submit_message(
        self, message: pb.ReserveRequest | pb.PrefillRequest, router: Incarnation, reply_to: int
    ) -> Submit:
        request = request_from_proto(message.request)
        if isinstance(message, pb.ReserveRequest):
            return Submit(
                request=request,
                router=router,
                reply_to=reply_to,
                received_at_s=self._clock.now_s(),
                must_prefill_locally=message.must_prefill_locally,
                may_wait=message.may_wait,
            )
        ticket = None
        if message.HasField("ticket"):
            ticket = ticket_from_proto(message.ticket, request.id)
        return Submit(
            request=request,
            router=router,
            reply_to=reply_to,
            received_at_s=self._clock.now_s(),
            ticket=ticket,
        )

    def _status_reply(self, status: NodeStatus) -> pb.StatusReply:
        blocks, load = status.blocks, status.load
        return pb.StatusReply(
            node_id=self._incarnation.node_id,
            epoch=self._incarnation.epoch,
            role=self._role.value,
            num_blocks=status.num_blocks,
            blocks=pb.BlockCounts(
                free=blocks.free,
                cached=blocks.cached,
                running=blocks.running,
                reserved=blocks.reserved,
                receiving=blocks.receiving,
                quarantined=blocks.quarantined,
            ),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_transfers=status.num_transfers,
            num_steps=status.num_steps,
            num_preemptions=load.num_preemptions,
            num_recomputed_tokens=load.num_recomputed_tokens,
            num_drafted=load.num_drafted,
            num_accepted=load.num_accepted,
            new_token_ratio=load.new_token_ratio,
        )

    def _refusal(self, refused: Refused) -> pb.Refusal:
        self.refusals[refused.error.code] += 1
        return refusal_to_proto(
            refused.error, free_blocks=refused.free_blocks, free_seats=refused.free_seats
        )


def _log_begin(submit: Submit, answer: Answer) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    refusal = answer.error.code if isinstance(answer, Refused) else None
    log.debug(
        "an attempt was %s",
        "refused" if refusal else "taken",
        extra=about(submit.request.id, router=str(submit.router), code=refusal),
    )
