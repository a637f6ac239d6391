"""The router's end of one node: a channel with one long-lived stream, and calls with deadlines.

Calls and aborts of the router go one way. Replies, all tokens of the node for this router and a
heartbeat where there is none of them come the other way, as often as `liveness` says. A node that
is silent is suspected, until it is heard again. A stream that broke, or was silent for
`LOSS_S`, means that the node is lost, at once, for all that ran there and every call without a
reply. A node that is heard and does not repeat the numbers that it is sent is suspected too: it is
cut off from this router in one direction. The stream is opened again for as long as the node is a
member: on another connection where it brought no word for `LOSS_S`, because the network may have
forgotten the first one, and TCP tries for a quarter of an hour. Pings over a connection of their
own (`pings`) tell a busy node from one that is gone.

Calls of one turn of the event loop, those made while a message is on its way, and under load those
made within 3 ms of the message before, travel in one message: a gRPC call for each would cost more
than the rest of a request. Order is kept, so an abort
never overtakes the call that it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast
from zlib import crc32

import grpc

from common.errors import NodeLost, Overloaded, PdserveError, PeerProtocolError
from common.files.keys_folder import Keys
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import NodeRecord
from common.request import GenerationRequest, RequestOutput
from protos import pdserve_node_pb2 as pb
from protos.codec import make_envelope, request_to_proto, source_to_proto
from protos.output_batches import outputs_from_proto
from protos.pdserve_node_pb2_grpc import NodeStub
from protos.rpc_errors import error_of
from protos.transport_security import open_channel
from router.core.known.block_reports import ReportReader
from router.core.membership import ENDED_BY_NODE
from router.core.request_flow import DecodeGrant, PrefillGrant
from router.dispatch.calls_beside import CallsBeside
from router.dispatch.fairness import (
    FEW_OUTPUTS,
    TURNS_FOR_OTHERS,
    message_pause_s,
    part_end,
    part_size,
)
from router.dispatch.liveness.node_liveness import NodeLiveness, NodeVerdict
from router.dispatch.liveness.pace import PHASES
from router.dispatch.liveness.pings import PINGED_SINCE_PROTOCOL, Pings
from router.dispatch.node_listener import NodeListener, OnOutputs
from router.dispatch.stream_calls import (
    Caller,
    ReadReply,
    UnsentCalls,
    WaitingCalls,
    read_acceptance,
    read_reservation,
)

log = logging.getLogger("pdserve.router.nodes")

CLOSE_TIMEOUT_S = 1.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
UNHEARD_BEFORE_WARNING = 3
UNREACHED = "it is heard, but nothing that was sent reached it for more than a second"
MAX_WAITING_CALLS = 8192
"""Calls to one node without a reply; as many as a node takes of a router."""
MAX_WAITING_OUTPUTS = 65_536
"""Most outputs that wait to be passed on: with more, nothing is read from their node."""
_MAX_MESSAGE_BYTES = 16 << 20
_READ_AHEAD_BYTES = 1 << 20
"""What a node may send ahead on its stream: the tokens of thousands of answers."""

_EOF: object = cast(Any, grpc.aio).EOF
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # After a pause gRPC answers each message with a ping that measures the connection, to learn how
    # far to read ahead. That costs half as much again as the heartbeat of an idle node.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _READ_AHEAD_BYTES),
    # A later life at the same address must not inherit a connection or a back-off of this one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def backoff_s(num_failures: int) -> float:
    """Return the pause before a stream is opened again: it doubles, up to `LAST_BACKOFF_S`."""
    return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures, 10))


class NodeClient:
    """One node in one life. `start` opens the stream, `close` ends everything.

    Its owner calls `tick` every `TICK_S`.
    """

    def __init__(
        self,
        record: NodeRecord,
        router: Incarnation,
        listener: NodeListener,
        on_outputs: OnOutputs,
        *,
        keys: Keys | None = None,
    ) -> None:
        self._node = record.incarnation
        self.sends_blocks = record.sends_blocks
        self._listener = listener
        self._on_outputs = on_outputs
        self._address = record.control_address
        can_ping = record.protocol >= PINGED_SINCE_PROTOCOL
        self._pings = Pings(self._address, CHANNEL_OPTIONS, keys) if can_ping else None
        self.liveness = NodeLiveness(crc32(record.node_id.encode()) % PHASES)
        self._reports = ReportReader()
        self._is_silent = asyncio.Event()
        self._envelope = make_envelope(router, record.incarnation, record.protocol)
        self._keys = keys
        self._open_channel()
        self._is_mute = False
        """Whether a stream on the channel brought nothing: its connection may be dead."""
        self.beside = CallsBeside(self._node, self._envelope, lambda: self._stub)
        self._is_heard = False
        self._stuck_s = 0.0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._waiting = WaitingCalls(record.incarnation)
        self._unsent = UnsentCalls(record.incarnation)
        self._outputs: list[RequestOutput] = []
        self._has_outputs = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._task: asyncio.Task[None] | None = None

    def _open_channel(self) -> None:
        self._tls = self._keys.tls if self._keys else None
        self._channel = open_channel(self._address, CHANNEL_OPTIONS, self._keys)
        self._stub: Any = cast(Any, NodeStub)(self._channel)

    async def _renew_channel(self) -> None:
        """Open another channel if this one is mute, or its certificate an earlier one."""
        if self._is_mute or (self._keys is not None and self._keys.tls is not self._tls):
            earlier, self._is_mute = self._channel, False
            self._open_channel()
            await earlier.close(None)

    def start(self) -> None:
        """Open the stream, now and again whenever it breaks."""
        self._task = asyncio.create_task(self._keep_stream(), name=f"stream {self._node}")

    async def close(self) -> None:
        """Send what is queued, then end the stream, which ends everything on the node, and the
        channel. A node that does not end its side is not waited for."""
        self._is_closed = True
        self._unsent.wake()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S if self._is_heard else 0.0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget_all(f"{self._node} has left")
        if self._pings is not None:
            await self._pings.close()
        await self._channel.close(None)

    def tick(self, *, is_wide: bool = False, is_used: bool = True, is_alarm: bool = False) -> None:
        """Count the time in which nothing was heard, or repeated: see `NodeLiveness.tick`."""
        liveness = self.liveness
        number = liveness.tick(
            is_wide=is_wide, is_used=is_used, is_alarm=is_alarm, is_running=self.is_running
        )
        if self._pings is not None and not liveness.is_pinged:
            self._pings.rest()
        if not self._is_heard:
            if liveness.judge() is NodeVerdict.LOST:
                self._is_silent.set()  # A stream that is open brings a word at once.
            return
        if liveness.is_at_rest:
            return
        if number:
            self._unsent.set_echo(number, liveness.pace.beat_ms)
        match liveness.judge():
            case NodeVerdict.LOST:
                self._is_silent.set()
            case NodeVerdict.SUSPECTED:
                self._listener.on_suspected(self._node, liveness.reason, is_heard=False)
            case NodeVerdict.UNREACHED:
                self._listener.on_suspected(self._node, UNREACHED, is_heard=True)

    def is_running(self) -> bool:
        """Return whether the node's process shows that it runs. A lost node is not connected to."""
        return self._is_heard and self._pings is not None and self._pings.are_answered()

    def reserve_nowait(
        self,
        request: GenerationRequest,
        caller: Caller[DecodeGrant | PdserveError],
        *,
        must_prefill_locally: bool,
        may_wait: bool,
        source: PrefixSource | None = None,
    ) -> None:
        """Ask a decode or mixed node for a reservation; `source` has more of the prompt than it."""

        def write(call: pb.Call) -> None:
            request_to_proto(request, call.reserve.request)
            call.reserve.must_prefill_locally = must_prefill_locally
            call.reserve.may_wait = may_wait
            if source is not None:
                call.reserve.source.CopyFrom(source_to_proto(source))

        self._ask(write, request, caller, read_reservation)

    def prefill_nowait(
        self,
        request: GenerationRequest,
        caller: Caller[PrefillGrant | PdserveError],
        ticket: pb.Ticket | None,
        source: PrefixSource | None = None,
    ) -> None:
        """Ask a prefill node to take a prompt, of which `source` has more than it."""

        def write(call: pb.Call) -> None:
            request_to_proto(request, call.prefill.request)
            if ticket is not None:
                call.prefill.ticket.CopyFrom(ticket)
            if source is not None:
                call.prefill.source.CopyFrom(source_to_proto(source))

        self._ask(write, request, caller, read_acceptance)

    def pull_nowait(self, pull: pb.Pull) -> bool:
        """Queue what another node wants of the node's cache; False: the node does not get it."""
        is_added = self._is_heard and self.sends_blocks and self._unsent.add_pull(pull)
        if is_added:
            self._ask_echo()
        return is_added

    def refuse_pull_nowait(self, lease_token: int) -> None:
        """Queue that nobody answers a pull of the node."""
        if self._is_heard:
            self._unsent.add_refused_pull(lease_token)

    def fetch_nowait(self, fetch: pb.Fetch) -> None:
        """Queue blocks of another node, which this one may pull."""
        if self._is_heard:
            self._unsent.add_fetch(fetch)

    def offer_nowait(self, new: Incarnation) -> None:
        """Queue that a new node wants what this one has used last."""
        if self._is_heard:
            self._unsent.add_new_node(pb.NewNode(node_id=new.node_id, epoch=new.epoch))

    def abort_nowait(self, attempt: AttemptId) -> None:
        """Queue an abort. Without a stream none is needed: the node aborts by itself what was asked
        on a stream that ended."""
        if self._is_heard:
            self._unsent.add_abort(attempt)

    async def wait_sent(self) -> None:
        """Return when the transport has every queued call and abort, or the stream is lost."""
        await self._unsent.wait_sent()

    def _ask(
        self,
        write: Callable[[pb.Call], None],
        request: GenerationRequest,
        caller: Caller[Any],
        read: ReadReply,
    ) -> None:
        try:
            if self._is_closed:
                raise NodeLost(f"{self._node} has left")
            if not self._is_heard:
                raise NodeLost(f"{self._node} is not heard")
            if len(self._waiting) >= MAX_WAITING_CALLS:
                raise Overloaded(f"{len(self._waiting)} calls wait for replies of {self._node}")
            call = self._unsent.add_call(write)
        except PdserveError as failed:
            self._loop.call_soon(caller.on_failed, failed)
            return
        call.id = self._waiting.add(caller, read, request.deadline_s)
        self._ask_echo()

    def _ask_echo(self) -> None:
        """Ask a node that was idle whether it lives: somebody waits for it from now on."""
        number = self.liveness.use()
        if number:
            self._unsent.set_echo(number, self.liveness.pace.beat_ms)

    def _forget_all(self, reason: str) -> None:
        """Fail every call, and drop what is queued."""
        self._unsent.clear()
        self._waiting.fail_all(reason)

    async def _keep_stream(self) -> None:
        num_failures, has_ended = 0, False
        while True:
            try:
                await self._renew_channel()
                await self._run_stream()
                reason = ENDED_BY_NODE
            except TimeoutError:
                reason, self._is_mute = self.liveness.reason, not self._is_heard
            except PdserveError as wrong:
                reason = str(wrong)
            except Exception as bug:
                log.exception("the stream to %s broke by a bug", self._node)
                reason = f"a bug: {bug!r}"
            if self._is_closed:
                return
            if self._is_heard:
                self._is_heard = False
                num_failures, has_ended = 0, reason == ENDED_BY_NODE
                self._listener.on_lost(self._node, reason)
                self._forget_all(f"{self._node} was lost: {reason}")
            else:
                # A node that ended its stream in order causes no warning.
                is_news = num_failures == UNHEARD_BEFORE_WARNING and not has_ended
                level = logging.WARNING if is_news else logging.DEBUG
                log.log(level, "no stream to %s: %s", self._node, reason)
            await asyncio.sleep(backoff_s(num_failures))
            num_failures += 1

    async def _run_stream(self) -> None:
        """Run one stream, from its opening until every output of it was passed on."""
        call = self._stub.Stream()
        self.liveness.restart()
        self._reports = ReportReader()
        self._is_silent.clear()
        reading = asyncio.create_task(self._read(call), name=f"replies of {self._node}")
        sending = asyncio.create_task(self._send(call), name=f"calls to {self._node}")
        silence = asyncio.create_task(self._is_silent.wait(), name=f"watch {self._node}")
        tasks = (reading, sending, silence)
        for task in tasks:
            task.add_done_callback(lambda _: self._has_outputs.set())
        try:
            while self._outputs or not (reading.done() or silence.done()):
                if sending.done() and not sending.cancelled():
                    sending.result()  # raises a bug
                self._has_outputs.clear()
                if not self._outputs:
                    await self._has_outputs.wait()
                await self._pass_on()
            if not reading.done():
                raise TimeoutError
            if reading.cancelled():
                raise NodeLost("the call was cancelled under the stream")
            reading.result()
        finally:
            self._outputs.clear()
            self._has_room.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any) -> None:
        """Read until the node ends the stream. Raises the error that ends it otherwise."""
        try:
            while True:
                message = await call.read()
                self.liveness.heard()
                if message is _EOF:
                    return
                if message is None:
                    raise PeerProtocolError("the stream carried bytes that are no message")
                self._take(message)
                await self._has_room.wait()
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed.code(), failed.details() or failed.code().name) from failed

    def _take(self, message: pb.NodeMessage) -> None:
        """Take replies at once: those of new requests do not wait for a burst of tokens."""
        for reply in message.replies:
            self._waiting.on_reply(reply)
        outputs = outputs_from_proto(message.outputs) if message.HasField("outputs") else []
        self._is_heard = True
        self._stuck_s = message.stuck_ms / 1000
        self.liveness.repeated(message.echo)
        if message.HasField("blocks"):
            self._take_blocks(message.blocks)
        if self._outputs or len(outputs) > FEW_OUTPUTS:
            self._outputs += outputs
            self._has_outputs.set()
            if len(self._outputs) > MAX_WAITING_OUTPUTS:
                self._has_room.clear()
        else:
            self._tell(outputs)
        self._listener.on_for_others(self._node, message)

    def _take_blocks(self, message: pb.BlockReport) -> None:
        report = self._reports.take(message.number, message.tier, message.added, message.removed)
        if report is None:
            return
        self._listener.on_blocks(self._node, report)
        if self._reports.has_lost:
            log.warning("%s: a report of its blocks is missing, all are asked for", self._node)
            self._unsent.ask_blocks()

    def _tell(self, outputs: list[RequestOutput]) -> None:
        is_reached = self.liveness.is_reached
        self._listener.on_heard(self._node, self._stuck_s, is_reached=is_reached)
        self._on_outputs(self._node, outputs)

    async def _pass_on(self) -> None:
        """Pass on the waiting outputs in parts: first tokens of other requests, and the calls
        before them, do not wait for all of these."""
        size = part_size(self._listener.num_running, len(self._outputs))
        while self._outputs:
            end = part_end(self._outputs, size)
            part = self._outputs[:end]
            del self._outputs[:end]
            self.liveness.heard()  # Reading may be paused meanwhile.
            self._tell(part)
            for _ in range(TURNS_FOR_OTHERS):
                await asyncio.sleep(0)
        self._has_room.set()

    async def _send(self, call: Any) -> None:
        """Send queued calls and aborts, in order, for as long as the stream lasts."""
        try:
            await call.write(pb.RouterMessage(envelope=self._envelope))
            sent_at_s = self._loop.time()
            while True:
                await self._unsent.wait()
                since_s = self._loop.time() - sent_at_s
                pause_s = message_pause_s(self._listener.num_running, since_s)
                if pause_s and self._unsent and not self._is_closed:
                    await asyncio.sleep(pause_s)
                while self._unsent:
                    await call.write(self._unsent.next_message())
                sent_at_s = self._loop.time()
                self._unsent.note_sent()
                if self._is_closed:
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `_read` raises what ended the stream.
