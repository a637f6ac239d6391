"""The calls on the stream to one node: those that wait to be sent, and those that wait for a reply.

What waits to be sent are also pulls, aborts and an echo number. A call waits for its reply no
longer than its request has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeVar

from common.errors import DeadlineExceeded, NodeLost, PdserveError, PeerProtocolError
from common.ids import AttemptId, Incarnation
from common.observing.logs import log_fields
from protos import pdserve_node_pb2 as pb
from protos.codec import attempts_to_proto, refusal_to_error
from router.core.request_flow import DecodeGrant, PrefillGrant

log = logging.getLogger("pdserve.router.nodes")

MAX_PENDING_ABORTS = 65_536
CALLS_PER_MESSAGE = 512
BYTES_PER_MESSAGE = 1 << 20
"""Calls of so many bytes get no further one in their message: far less than a node takes."""
ABORTS_PER_MESSAGE = 512
REFUSED_PER_MESSAGE = 512
MOST_PULLS = 512
MOST_REFUSED = 4096
PULLS_PER_MESSAGE = 32
"""Each has at most 8192 blocks, and so some 150 KiB."""


class UnsentCalls:
    """What waits to be sent, in order: an abort leaves after the call that it may end.

    A call is written into the message in which it leaves: to put it there later would copy its
    prompt.
    """

    def __init__(self, node: Incarnation) -> None:
        self._node = node
        self._messages: deque[pb.RouterMessage] = deque()
        """The messages with calls. The last one takes the next call, if it has room."""
        self._num_bytes = 0
        """Bytes of all calls in the last message but its last one."""
        self._pulls: list[pb.Pull] = []
        self._fetches: list[pb.Fetch] = []
        self._refused: list[int] = []
        self._new_nodes: list[pb.NewNode] = []
        self._aborts: dict[AttemptId, None] = {}
        self._echo = self._beat_ms = 0
        self._wants_blocks = False
        self._has_news = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    def __bool__(self) -> bool:
        """Return whether a message is due."""
        wants = self._echo or self._wants_blocks or self._refused or self._new_nodes
        return bool(self._messages or self._pulls or self._fetches or self._aborts or wants)

    def add_call(self, write: Callable[[pb.Call], None]) -> pb.Call:
        """Queue the call that `write` writes, and return it. Raises what `write` raises, and then
        queues nothing."""
        if not self._has_room():
            self._messages.append(pb.RouterMessage())
        calls = self._messages[-1].calls
        try:
            write(calls.add())
        except BaseException:
            del calls[-1]
            if not calls:
                self._messages.pop()
            raise
        self._on_added()
        return calls[-1]

    def add_pull(self, pull: pb.Pull) -> bool:
        """Queue a pull; return whether there was room for it."""
        has_room = len(self._pulls) < MOST_PULLS
        if has_room:
            self._pulls.append(pull)
            self._on_added()
        return has_room

    def add_refused_pull(self, lease_token: int) -> None:
        """Queue that nobody answers a pull of the node; where too many wait, it finds out late."""
        if len(self._refused) < MOST_REFUSED:
            self._refused.append(lease_token)
            self._on_added()

    def add_fetch(self, fetch: pb.Fetch) -> None:
        """Queue blocks of another node; they are dropped where too many wait."""
        if len(self._fetches) < PULLS_PER_MESSAGE:
            self._fetches.append(fetch)
            self._on_added()

    def add_new_node(self, new: pb.NewNode) -> None:
        """Queue which new node wants the node's blocks; where too many wait, it starts cold."""
        if len(self._new_nodes) < PULLS_PER_MESSAGE:
            self._new_nodes.append(new)
            self._on_added()

    def add_abort(self, attempt: AttemptId) -> None:
        """Queue an abort; it is dropped, with a warning, where too many wait."""
        if len(self._aborts) >= MAX_PENDING_ABORTS:
            log.warning(
                "%s: abort dropped, %d wait",
                self._node,
                len(self._aborts),
                extra=log_fields(attempt),
            )
            return
        self._aborts[attempt] = None
        self._on_added()

    def set_echo(self, number: int, beat_ms: int) -> None:
        """Put this number into the next message, and the node's longest silence, if one is wanted.

        No task waits until it is sent.
        """
        self._echo, self._beat_ms = number, beat_ms
        self._has_news.set()

    def ask_blocks(self) -> None:
        """Ask the node, in the next message, to report all of its blocks."""
        self._wants_blocks = True
        self._has_news.set()

    def clear(self) -> None:
        """Drop everything."""
        self._echo = self._beat_ms = 0
        self._wants_blocks = False
        self._messages.clear()
        self._pulls.clear()
        self._fetches.clear()
        self._refused.clear()
        self._new_nodes.clear()
        self._aborts.clear()
        self._all_sent.set()

    def wake(self) -> None:
        """End the present or next `wait`."""
        self._has_news.set()

    async def wait(self) -> None:
        """Return when something was added since the last call, or at `wake`."""
        await self._has_news.wait()
        self._has_news.clear()

    def note_sent(self) -> None:
        """End `wait_sent`: the transport has every message."""
        self._all_sent.set()

    async def wait_sent(self) -> None:
        """Return when everything was sent or dropped."""
        await self._all_sent.wait()

    def next_message(self) -> pb.RouterMessage:
        """Return the next message, with as many calls as it has room for."""
        message = self._messages.popleft() if self._messages else pb.RouterMessage()
        message.echo, message.resend_blocks = self._echo, self._wants_blocks
        message.beat_ms = self._beat_ms
        if self._pulls:
            message.pulls.extend(self._pulls[:PULLS_PER_MESSAGE])
            del self._pulls[:PULLS_PER_MESSAGE]
        if self._fetches:
            message.fetches.extend(self._fetches)
            self._fetches.clear()
        if self._refused:
            message.refused_pulls.extend(self._refused[:REFUSED_PER_MESSAGE])
            del self._refused[:REFUSED_PER_MESSAGE]
        if self._new_nodes:
            message.new_nodes.extend(self._new_nodes)
            self._new_nodes.clear()
        self._echo = self._beat_ms = 0
        self._wants_blocks = False
        if self._aborts and not self._messages:  # after all calls: an abort may end one of them
            aborts = list(islice(self._aborts, ABORTS_PER_MESSAGE))
            for attempt in aborts:
                del self._aborts[attempt]
            message.aborts.CopyFrom(attempts_to_proto(aborts))
        return message

    def _has_room(self) -> bool:
        """Return whether the next call may leave in the last message. A lone call is not measured,
        which takes as long as sending it."""
        if not self._messages:
            return False
        calls = self._messages[-1].calls
        if len(calls) == 1:
            self._num_bytes = 0
        self._num_bytes += calls[-1].ByteSize()
        return len(calls) < CALLS_PER_MESSAGE and self._num_bytes < BYTES_PER_MESSAGE

    def _on_added(self) -> None:
        self._all_sent.clear()
        self._has_news.set()


Outcome = TypeVar("Outcome")


class Caller(NamedTuple, Generic[Outcome]):
    """What takes the outcome of a call: one of the two is called, once, on the event loop.

    Neither is called before the call returned. `on_reply` takes the node's reply, which may be an
    error: its refusal. `on_failed` takes why there is none: the node is lost, broke the protocol,
    or let the deadline pass.
    """

    on_reply: Callable[[Outcome], None]
    on_failed: Callable[[PdserveError], None]


ReadReply = Callable[[Incarnation, pb.Reply], Any]


@dataclass(slots=True)
class _Waiting:
    caller: Caller[Any]
    read: ReadReply
    timer: asyncio.TimerHandle


class WaitingCalls:
    """Calls that wait for their replies, by their number on the stream."""

    def __init__(self, node: Incarnation) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._calls: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, caller: Caller[Any], read: ReadReply, deadline_s: float) -> int:
        """Add a call whose reply `read` decodes; return its number."""
        call_id = next(self._ids)
        # No shorter bound: a node replies between two steps, a step may be long, and the request
        # may be queued there. The stream shows when a node died.
        timer = self._loop.call_later(deadline_s, self._on_deadline, call_id)
        self._calls[call_id] = _Waiting(caller, read, timer)
        return call_id

    def on_reply(self, reply: pb.Reply) -> None:
        """Pass on a reply; one that comes after its deadline is dropped."""
        waiting = self._calls.pop(reply.call_id, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        try:
            outcome = waiting.read(self._node, reply)
        except PdserveError as wrong:
            waiting.caller.on_failed(wrong)
        else:
            waiting.caller.on_reply(outcome)

    def fail_all(self, kind: type[NodeLost], reason: str) -> None:
        """Fail every call with an error of its own: the node is lost, or has left."""
        calls, self._calls = self._calls, {}
        for waiting in calls.values():
            waiting.timer.cancel()
            self._loop.call_soon(waiting.caller.on_failed, kind(reason))

    def _on_deadline(self, call_id: int) -> None:
        late = f"{self._node} did not answer before the request's deadline"
        self._calls.pop(call_id).caller.on_failed(DeadlineExceeded(late))


def read_reservation(node: Incarnation, reply: pb.Reply) -> DecodeGrant | PdserveError:
    """Decode the reply to a reservation. Raises `PeerProtocolError` for any other message."""
    match reply.WhichOneof("outcome"):
        case "ticket":
            return DecodeGrant(reply.ticket, reply.ticket.num_cached_tokens)
        case "local":
            return DecodeGrant(None, reply.local.num_cached_tokens)
        case "refusal":
            return refusal_to_error(reply.refusal)
        case other:
            raise PeerProtocolError(f"{node} answered a reservation with {other or 'nothing'}")


def read_acceptance(node: Incarnation, reply: pb.Reply) -> PrefillGrant | PdserveError:
    """Decode the reply to a prompt. Raises `PeerProtocolError` for any other message."""
    match reply.WhichOneof("outcome"):
        case "accepted":
            return PrefillGrant()
        case "refusal":
            return refusal_to_error(reply.refusal)
        case other:
            raise PeerProtocolError(f"{node} answered a prompt with {other or 'nothing'}")
