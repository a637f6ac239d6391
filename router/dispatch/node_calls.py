"""Calls to nodes on behalf of a choice: replies and failures become events of its flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow


@dataclass(frozen=True, slots=True)
class NodeCall:
    """One call. It may outlive its choice: a late grant is aborted.

    `feed` applies an event of the flow, with its arguments.
    """

    feed: Callable[..., None]
    flow: RequestFlow
    node: Incarnation
    attempt: AttemptId

    def on_failed(self, error: PdserveError) -> None:
        """Feed the failure: no reply came."""
        self.feed(self.flow.on_call_failed, self.node, self.attempt, error)


@dataclass(frozen=True, slots=True)
class ReserveCall(NodeCall):
    """A decode or mixed node was asked for a reservation."""

    now_s: Callable[[], float]

    def on_reply(self, reply: DecodeGrant | PdserveError) -> None:
        """Feed the grant or the refusal."""
        self.feed(self.flow.on_reserve_reply, self.node, self.attempt, reply, self.now_s())


class PrefillCall(NodeCall):
    """A prefill node was asked to take a prompt."""

    __slots__ = ()

    def on_reply(self, reply: PrefillGrant | PdserveError) -> None:
        """Feed the acceptance or the refusal."""
        self.feed(self.flow.on_prefill_reply, self.node, self.attempt, reply)
