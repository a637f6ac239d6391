"""What is asked of one node: calls with deadlines, aborts, pulls and more, on its present stream.

Calls of one turn of the event loop, those made while a message is on its way, and under load those
made within 3 ms of the message before, travel in one message: a gRPC call for each would cost more
than the rest of a request. Order is kept, so an abort never overtakes the call that it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from common.errors import NodeLost, Overloaded, PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import NodeRecord
from common.request import GenerationRequest
from protos import pdserve_node_pb2 as pb
from protos.codec import request_to_proto, source_to_proto
from router.core.candidates import NodeAway
from router.core.request_flow import DecodeGrant, PrefillGrant
from router.dispatch.client.fairness import message_pause_s
from router.dispatch.client.stream_calls import (
    Caller,
    ReadReply,
    UnsentCalls,
    WaitingCalls,
    read_acceptance,
    read_reservation,
)
from router.dispatch.liveness.node_liveness import NodeLiveness

MAX_WAITING_CALLS = 8192
"""Calls to one node without a reply; as many as a node takes of a router."""


class NodeCalls:
    """Calls and messages to one node. While it is not heard, calls fail and the rest is dropped.

    `num_running` returns the requests in progress, on whatever node.
    """

    def __init__(
        self,
        record: NodeRecord,
        envelope: pb.Envelope,
        liveness: NodeLiveness,
        num_running: Callable[[], int],
    ) -> None:
        self._node = record.incarnation
        self.sends_blocks = record.sends_blocks
        self._envelope = envelope
        self._liveness = liveness
        self._num_running = num_running
        self._loop = asyncio.get_running_loop()
        self._waiting = WaitingCalls(record.incarnation)
        self._unsent = UnsentCalls(record.incarnation)
        self.is_heard = False
        """Whether the present stream has brought a message."""
        self.is_closing = False

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
        """Queue another node's pull of this node's cache; False: the node does not get it."""
        is_added = self.is_heard and self.sends_blocks and self._unsent.add_pull(pull)
        if is_added:
            self._ask_echo()
        return is_added

    def refuse_pull_nowait(self, lease_token: int) -> None:
        """Queue that nobody answers a pull of the node."""
        if self.is_heard:
            self._unsent.add_refused_pull(lease_token)

    def fetch_nowait(self, fetch: pb.Fetch) -> None:
        """Queue blocks of another node, which this one may pull."""
        if self.is_heard:
            self._unsent.add_fetch(fetch)

    def offer_nowait(self, new: Incarnation) -> None:
        """Queue that a new node wants the blocks that this one has used last."""
        if self.is_heard:
            self._unsent.add_new_node(pb.NewNode(node_id=new.node_id, epoch=new.epoch))

    def abort_nowait(self, attempt: AttemptId) -> None:
        """Queue an abort. Without a stream none is needed: the node itself aborts the calls of a
        stream that ended."""
        if self.is_heard:
            self._unsent.add_abort(attempt)

    def ask_blocks_nowait(self) -> None:
        """Queue that the node is to report all of its blocks."""
        self._unsent.ask_blocks()

    def echo_nowait(self, number: int) -> None:
        """Queue a number for the node to repeat."""
        self._unsent.set_echo(number, self._liveness.pace.beat_ms)

    async def wait_sent(self) -> None:
        """Return when the transport has every queued call and abort, or the stream is lost."""
        await self._unsent.wait_sent()

    # Called by the owner of the stream.

    def on_reply(self, reply: pb.Reply) -> None:
        """Pass on the reply to a call."""
        self._waiting.on_reply(reply)

    def begin_close(self) -> None:
        """End the stream when all that is queued was sent, and take no more calls."""
        self.is_closing = True
        self._unsent.wake()

    def fail_all(self, kind: type[NodeLost], reason: str) -> None:
        """Fail every call, and drop what is queued."""
        self._unsent.clear()
        self._waiting.fail_all(kind, reason)

    async def send(self, stream: Any) -> None:
        """Send what is queued, in order, for as long as the stream lasts."""
        try:
            await stream.write(pb.RouterMessage(envelope=self._envelope))
            sent_at_s = self._loop.time()
            while True:
                await self._unsent.wait()
                since_s = self._loop.time() - sent_at_s
                pause_s = message_pause_s(self._num_running(), since_s)
                if pause_s and self._unsent and not self.is_closing:
                    await asyncio.sleep(pause_s)
                while self._unsent:
                    await stream.write(self._unsent.next_message())
                sent_at_s = self._loop.time()
                self._unsent.note_sent()
                if self.is_closing:
                    await stream.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # Reading the stream raises what ended it.

    def _ask(
        self,
        write: Callable[[pb.Call], None],
        request: GenerationRequest,
        caller: Caller[Any],
        read: ReadReply,
    ) -> None:
        try:
            if self.is_closing:
                raise NodeAway(f"{self._node} has left")
            if not self.is_heard:
                raise NodeAway(f"{self._node} is not heard")
            if len(self._waiting) >= MAX_WAITING_CALLS:
                raise Overloaded(f"{len(self._waiting)} calls wait for replies of {self._node}")
            call = self._unsent.add_call(write)
        except PdserveError as failed:
            self._loop.call_soon(caller.on_failed, failed)
            return
        call.id = self._waiting.add(caller, read, request.deadline_s)
        self._ask_echo()

    def _ask_echo(self) -> None:
        """Ask a node that was idle whether it lives: a request waits for it from now on."""
        number = self._liveness.use()
        if number:
            self.echo_nowait(number)
