"""One choice in progress: the flow that decides, the sink that takes its tokens, its two timers.

Its calls to nodes end as events of the flow: a reply, or a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from router.core.generation import Sink, TokenChunk
from router.core.policies.query import Query
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow
from router.watch.choice_trace import ChoiceTrace

_LATE_TIMER_S = 0.001


@dataclass(slots=True, eq=False)
class RunningChoice:
    """What the dispatcher keeps for a choice. `deadline_at_s` is a time of its clock."""

    flow: RequestFlow
    sink: Sink
    query: Query
    deadline_at_s: float
    trace: ChoiceTrace
    chunks: list[TokenChunk] = field(default_factory=list)
    """Chunks that came together, until they are pushed together."""
    _deadline: asyncio.TimerHandle | None = None
    _wait: asyncio.TimerHandle | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.query.prompt_token_ids)

    def set_deadline(self, now_s: float, on_deadline: Callable[[RunningChoice], None]) -> None:
        """Call `on_deadline` at the deadline."""
        delay_s = max(_LATE_TIMER_S, self.deadline_at_s - now_s)
        self._deadline = asyncio.get_running_loop().call_later(delay_s, on_deadline, self)

    def wait(self, wait_s: float, on_waited: Callable[[RunningChoice], None]) -> None:
        """Call `on_waited` after `wait_s`. A wait that still runs is not begun again."""

        def end_wait() -> None:
            self._wait = None
            on_waited(self)

        if self._wait is None:
            self._wait = asyncio.get_running_loop().call_later(wait_s, end_wait)

    def cancel_timers(self) -> None:
        """Call nobody any more."""
        for timer in (self._deadline, self._wait):
            if timer is not None:
                timer.cancel()


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
