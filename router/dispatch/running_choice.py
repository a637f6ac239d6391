"""One choice in progress: the flow that decides, the sink that takes its tokens, its two timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.observing.clock import Clock
from router.core.generation import Sink, TokenChunk
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.watch.choice_trace import ChoiceTrace

_LATE_TIMER_S = 0.001
EARLY_S = 0.1
"""An answer that is given up so shortly before its deadline was given up for it: the HTTP edge has
the same deadline, by a timer of its own."""


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

    def take(self, chunk: TokenChunk, clock: Clock) -> None:
        """Keep a chunk until it is pushed; one with token 0 says where its time went."""
        found = None if chunk.first_index else chunk.of_prompt
        if found is not None:
            stages = self.trace.on_first_token(
                clock.now_s(), queue_s=found.queue_s, compute_s=found.compute_s
            )
            chunk = chunk._replace(of_prompt=replace(found, stages=stages))
        self.chunks.append(chunk)

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
