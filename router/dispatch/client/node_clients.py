"""The router's end of one node: a channel with one long-lived stream, opened again when it ends.

`NodeCalls` sends what is asked of the node, and `NodeMessages` takes what is heard from it:
replies, all tokens of the node for this router, and a heartbeat where there is none of them, as
often as `liveness` says. A node that is silent is suspected, until it is heard again. A stream that
broke, or was silent for `LOSS_S`, means that the node is lost, at once, for all that ran there and
every call without a reply. A node that is heard and does not repeat the numbers that it is sent is
suspected too: it is cut off from this router in one direction. The stream is opened again for as
long as the node is a member: on another connection where it brought no word for `LOSS_S`, because
the network may have forgotten the first one, and TCP tries for a quarter of an hour. Pings over a
connection of their own (`pings`) tell a busy node from one that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast
from zlib import crc32

from common.errors import NodeLost, PdserveError
from common.files.keys_folder import Keys
from common.ids import Incarnation
from common.nodes import NodeRecord
from common.observing.clock import Clock
from common.observing.lasting_failure import LastingFailure
from protos.codec import make_envelope
from protos.pdserve_node_pb2_grpc import NodeStub
from protos.transport_security import open_channel, tls_hint
from router.core.candidates import NodeAway
from router.core.membership import ENDED_BY_NODE
from router.dispatch.client.calls_beside import CallsBeside
from router.dispatch.client.node_calls import NodeCalls
from router.dispatch.client.node_listener import NodeListener, OnOutputs
from router.dispatch.client.node_messages import NodeMessages
from router.dispatch.liveness.node_liveness import NodeLiveness, NodeVerdict
from router.dispatch.liveness.pace import PHASES
from router.dispatch.liveness.pings import PINGED_SINCE_PROTOCOL, Pings

log = logging.getLogger("pdserve.router.nodes")

CLOSE_TIMEOUT_S = 1.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
UNHEARD_BEFORE_WARNING = 3
UNREACHED = "it is heard, but nothing that was sent reached it for more than a second"
_MAX_MESSAGE_BYTES = 16 << 20
_READ_AHEAD_BYTES = 1 << 20
"""What a node may send ahead on its stream: the tokens of thousands of answers."""

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
        clock: Clock,
        keys: Keys | None = None,
    ) -> None:
        self._node = record.incarnation
        self._listener = listener
        self._on_outputs = on_outputs
        self._address = record.control_address
        can_ping = record.protocol >= PINGED_SINCE_PROTOCOL
        self._pings = Pings(self._address, CHANNEL_OPTIONS, keys) if can_ping else None
        self.liveness = NodeLiveness(crc32(record.node_id.encode()) % PHASES)
        self._is_silent = asyncio.Event()
        self._keys = keys
        self._open_channel()
        self._is_mute = False
        """Whether a stream on the channel brought nothing: its connection may be dead."""
        self._unheard = LastingFailure(clock)
        envelope = make_envelope(router, record.incarnation, record.protocol)
        self.beside = CallsBeside(self._node, envelope, lambda: self._stub)
        self.calls = NodeCalls(record, envelope, self.liveness, lambda: listener.num_running)
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
        self.calls.begin_close()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S if self.calls.is_heard else 0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.calls.fail_all(NodeAway, f"{self._node} has left")
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
        if not self.calls.is_heard:
            if liveness.judge() is NodeVerdict.LOST:
                self._is_silent.set()  # A stream that is open brings a word at once.
            return
        if liveness.is_at_rest:
            return
        if number:
            self.calls.echo_nowait(number)
        match liveness.judge():
            case NodeVerdict.LOST:
                self._is_silent.set()
            case NodeVerdict.SUSPECTED:
                self._listener.on_suspected(self._node, liveness.reason, is_heard=False)
            case NodeVerdict.UNREACHED:
                self._listener.on_suspected(self._node, UNREACHED, is_heard=True)

    def is_running(self) -> bool:
        """Return whether the node's process shows that it runs. A lost node is not connected to."""
        return self.calls.is_heard and self._pings is not None and self._pings.are_answered()

    async def _keep_stream(self) -> None:
        num_failures, has_ended, calls = 0, False, self.calls
        while True:
            try:
                await self._renew_channel()
                await self._run_stream()
                reason = ENDED_BY_NODE
            except TimeoutError:
                reason, self._is_mute = self.liveness.reason, not calls.is_heard
            except PdserveError as wrong:
                reason = str(wrong)
            except Exception as bug:
                log.exception("the stream to %s broke by a bug", self._node)
                reason = f"a bug: {bug!r}"
            if calls.is_closing:
                return
            if calls.is_heard:
                calls.is_heard = False
                num_failures, has_ended = 0, reason == ENDED_BY_NODE
                self._unheard.end()
                self._listener.on_lost(self._node, reason)
                calls.fail_all(NodeLost, f"{self._node} was lost: {reason}")
            else:
                # A node that ended its stream in order causes no warning.
                is_due = num_failures >= UNHEARD_BEFORE_WARNING and not has_ended
                level = logging.WARNING if is_due and self._unheard.is_news() else logging.DEBUG
                hint = tls_hint(reason, self._keys)
                log.log(level, "no stream to %s: %s%s", self._node, reason, hint)
            await asyncio.sleep(backoff_s(num_failures))
            num_failures += 1

    async def _run_stream(self) -> None:
        """Run one stream, from its opening until every output of it was passed on."""
        stream = self._stub.Stream()
        self.liveness.restart()
        self._is_silent.clear()
        heard = NodeMessages(
            self._node, self.calls, self.liveness, self._listener, self._on_outputs
        )
        reading = asyncio.create_task(heard.read(stream), name=f"replies of {self._node}")
        sending = asyncio.create_task(self.calls.send(stream), name=f"calls to {self._node}")
        silence = asyncio.create_task(self._is_silent.wait(), name=f"watch {self._node}")
        tasks = (reading, sending, silence)
        for task in tasks:
            task.add_done_callback(lambda _: heard.wake())
        try:
            while heard.has_outputs or not (reading.done() or silence.done()):
                if sending.done() and not sending.cancelled():
                    sending.result()  # raises a bug
                await heard.pass_on()
            if not reading.done():
                raise TimeoutError
            if reading.cancelled():
                raise NodeLost("the call was cancelled under the stream")
            reading.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.cancel()
