"""Calls to one node that wait for their replies, each no longer than its request has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

from common.errors import DeadlineExceeded, NodeLost, PdserveError, PeerProtocolError
from common.ids import Incarnation
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_error
from router.core.request_flow import DecodeGrant, PrefillGrant

Reply_contra = TypeVar("Reply_contra", contravariant=True)


class Caller(Protocol[Reply_contra]):
    """Receives the outcome of a call, once: on the event loop, never before the call returned."""

    def on_reply(self, reply: Reply_contra) -> None:
        """Take the node's reply; an error is its refusal."""

    def on_failed(self, error: PdserveError) -> None:
        """Take a failure: the node is lost, broke the protocol, or let the deadline pass."""


ReadReply = Callable[[Incarnation, pb.Reply], Any]


@dataclass(slots=True)
class _Waiting:
    caller: Caller[Any]
    read: ReadReply
    timer: asyncio.TimerHandle


class WaitingCalls:
    """Calls by their number on the stream."""

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

    def fail_all(self, reason: str) -> None:
        """Fail every call: the node is lost."""
        calls, self._calls = self._calls, {}
        for waiting in calls.values():
            waiting.timer.cancel()
            self._loop.call_soon(waiting.caller.on_failed, NodeLost(reason))

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
