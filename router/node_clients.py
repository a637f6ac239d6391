"""The router's end of one node: a channel, one long-lived stream, and calls with deadlines.

The stream carries every token of the node for this router, and a heartbeat each second: a broken
or silent stream means that the node is lost, at once, for all that ran there. It is opened again
for as long as the node is a member. The heartbeats make HTTP/2 keepalive pings superfluous.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

import grpc

from common.errors import NodeLost, PdserveError, PeerProtocolError, StaleEpoch
from common.ids import AttemptId, Incarnation
from common.keys_folder import Keys
from common.logs import about
from common.nodes import NodeRecord
from common.request import GenerationRequest, RequestOutput
from protos import pdserve_node_pb2 as pb
from protos.codec import make_envelope, output_from_proto, refusal_to_error, request_to_proto
from protos.pdserve_node_pb2_grpc import NodeStub
from protos.rpc_errors import error_of
from protos.transport_security import open_channel
from router.core.request_flow import Reservation

log = logging.getLogger("pdserve.router.nodes")

ABORT_TIMEOUT_S = 3.0
DRAIN_CALL_TIMEOUT_S = 5.0
SILENCE_S = 5.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
UNHEARD_BEFORE_WARNING = 3
MAX_PENDING_ABORTS = 65_536
ABORTS_PER_CALL = 512
ABORT_TRIES = 3
OUTPUTS_AT_ONCE = 64
FEW_OUTPUTS = 8
PARTS_PER_MESSAGE = 8
TURNS_FOR_OTHERS = 2
"""A message is passed on in parts of so many outputs, larger ones where it would take more parts
than that. Behind a part of more than a few outputs the event loop turns so often for all others."""
_MAX_MESSAGE_BYTES = 16 << 20

_EOF: object = cast(Any, grpc.aio).EOF
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A later life at the same address must not inherit a connection or a back-off of this one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class NodeListener(Protocol):
    """Who is told; called on the event loop, never blocks."""

    def on_heard(self, node: Incarnation, outputs: list[RequestOutput]) -> None:
        """A message came: outputs in the node's order, or none (a heartbeat)."""

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """The stream broke after it had been heard."""


def backoff_s(num_failures: int) -> float:
    """The pause before the next try to open a stream: doubles, up to `LAST_BACKOFF_S`."""
    return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures, 10))


class NodeClient:
    """One node in one life. `start` opens the stream, `close` ends everything."""

    def __init__(
        self,
        record: NodeRecord,
        router: Incarnation,
        listener: NodeListener,
        *,
        keys: Keys | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._node = record.incarnation
        self._listener = listener
        self._silence_s = silence_s
        self._envelope = make_envelope(router, record.incarnation)
        self._channel = open_channel(record.control_address, _CHANNEL_OPTIONS, keys)
        self._stub: Any = cast(Any, NodeStub)(self._channel)
        self._is_heard = False
        self._aborts: dict[AttemptId, None] = {}
        self._has_aborts = asyncio.Event()
        self._aborts_sent = asyncio.Event()
        self._aborts_sent.set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Open the stream, now and again whenever it breaks."""
        self._tasks = [
            asyncio.create_task(self._keep_stream(), name=f"stream {self._node}"),
            asyncio.create_task(self._send_aborts(), name=f"aborts {self._node}"),
        ]

    async def close(self) -> None:
        """End the stream, the pending aborts and the channel."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def reserve(
        self, request: GenerationRequest, *, must_prefill_locally: bool, may_wait: bool
    ) -> Reservation | PdserveError:
        """The node's answer; a refusal is returned. Raises a typed error when there is none."""
        message = pb.ReserveRequest(
            envelope=self._envelope,
            request=request_to_proto(request),
            must_prefill_locally=must_prefill_locally,
            may_wait=may_wait,
        )
        reply: pb.ReserveReply = await self._call(self._stub.Reserve, message, request.deadline_s)
        match reply.WhichOneof("outcome"):
            case "ticket":
                return Reservation(reply.ticket, reply.ticket.num_cached_tokens)
            case "local":
                return Reservation(None, reply.local.num_cached_tokens)
            case "refusal":
                return refusal_to_error(reply.refusal)
        raise PeerProtocolError(f"{self._node} answered Reserve with nothing")

    async def prefill(
        self, request: GenerationRequest, ticket: pb.Ticket | None
    ) -> PdserveError | None:
        """None: accepted; a refusal is returned. Raises a typed error when there is no answer."""
        message = pb.PrefillRequest(
            envelope=self._envelope, request=request_to_proto(request), ticket=ticket
        )
        reply: pb.PrefillReply = await self._call(self._stub.Prefill, message, request.deadline_s)
        return refusal_to_error(reply.refusal) if reply.HasField("refusal") else None

    async def drain(self) -> float:
        """Ask the node to leave; how many seconds it gives what runs. Raises a typed error."""
        message = pb.DrainRequest(envelope=self._envelope)
        reply: pb.DrainReply = await self._call(self._stub.Drain, message, DRAIN_CALL_TIMEOUT_S)
        return reply.timeout_ms / 1000

    def abort_nowait(self, attempt: AttemptId) -> None:
        """Tell the node soon; aborts that come together travel together."""
        if len(self._aborts) >= MAX_PENDING_ABORTS:
            log.warning(
                "%s: abort dropped, %d wait", self._node, len(self._aborts), extra=about(attempt)
            )
            return
        self._aborts[attempt] = None
        self._aborts_sent.clear()
        self._has_aborts.set()

    async def wait_aborts_sent(self) -> None:
        """Return when every abort was acknowledged or given up."""
        await self._aborts_sent.wait()

    async def _call(self, method: Any, message: object, deadline_s: float) -> Any:
        try:
            # No shorter bound: a node answers between two steps, and a step may be long or the
            # request may wait for room there. That a node died shows on its stream.
            return await method(message, timeout=deadline_s)
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed.code(), f"{self._node}: {failed.details()}") from failed
        except grpc.aio.UsageError as closed:
            raise NodeLost(f"{self._node} has left: {closed}") from closed
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The channel was closed under the call.
            raise NodeLost(f"{self._node} has left") from None

    async def _keep_stream(self) -> None:
        num_failures = 0
        while True:
            try:
                await self._read_stream()
                reason = "the node ended the stream"
            except TimeoutError:
                reason = f"nothing was heard for {self._silence_s} s"
            except PdserveError as wrong:
                reason = str(wrong)
            except Exception as bug:
                log.exception("the stream to %s broke by a bug", self._node)
                reason = f"a bug: {bug!r}"
            if self._is_heard:
                self._is_heard = False
                num_failures = 0
                log.warning("lost %s: %s", self._node, reason)
                self._listener.on_lost(self._node, reason)
            else:
                level = logging.WARNING if num_failures == UNHEARD_BEFORE_WARNING else logging.DEBUG
                log.log(level, "no stream to %s: %s", self._node, reason)
            await asyncio.sleep(backoff_s(num_failures))
            num_failures += 1

    async def _read_stream(self) -> None:
        call = self._stub.Stream(pb.StreamRequest(envelope=self._envelope))
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    batch = await call.read()
                if batch is _EOF:
                    return
                if batch is None:
                    raise PeerProtocolError("the stream carried bytes that are no message")
                await self._take(batch)
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed.code(), failed.details() or failed.code().name) from failed
        finally:
            call.cancel()

    async def _take(self, batch: pb.OutputBatch) -> None:
        """Pass a message on in parts, so that other requests' first tokens, and all that has to
        happen before these, wait for none of it. A node that is far ahead sends large messages,
        and is caught up with."""
        num_outputs = len(batch.outputs)
        size = max(OUTPUTS_AT_ONCE, -(-num_outputs // PARTS_PER_MESSAGE))
        for first in range(0, max(1, num_outputs), size):
            outputs = [output_from_proto(output) for output in batch.outputs[first : first + size]]
            self._is_heard = True
            self._listener.on_heard(self._node, outputs)
            if len(outputs) > FEW_OUTPUTS:
                for _ in range(TURNS_FOR_OTHERS):
                    await asyncio.sleep(0)

    async def _send_aborts(self) -> None:
        while True:
            await self._has_aborts.wait()
            self._has_aborts.clear()
            while self._aborts:
                batch = list(self._aborts)[:ABORTS_PER_CALL]
                for attempt in batch:
                    del self._aborts[attempt]
                try:
                    await self._abort(batch)
                except Exception:
                    log.exception("%s: %d aborts were lost by a bug", self._node, len(batch))
            self._aborts_sent.set()

    async def _abort(self, attempts: list[AttemptId]) -> None:
        message = pb.AbortRequest(
            envelope=self._envelope,
            attempts=[
                pb.AbortRequest.Attempt(request_id=a.request_id, attempt=a.attempt)
                for a in attempts
            ],
        )
        for num_failures in range(ABORT_TRIES):
            try:
                await self._call(self._stub.Abort, message, ABORT_TIMEOUT_S)
                return
            except StaleEpoch:
                return  # That life of the node is over, and all it held with it.
            except PdserveError as wrong:
                error = wrong
            if not self._is_heard:
                break  # A node whose stream to this router broke aborts by itself.
            await asyncio.sleep(backoff_s(num_failures))
        log.warning("%s: %d aborts were not acknowledged: %s", self._node, len(attempts), error)
