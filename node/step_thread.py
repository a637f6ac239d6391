"""The step loop in its thread, and how a node lets go of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from common.clock import Clock
from engine.core.plan import Runner
from engine.step_loop import StepLoop, start_step_thread
from node.inbox import Inbox
from node.messages import Effect, Message
from node.node_flow import NodeFlow

log = logging.getLogger("pdserve.node")


class StepThread:
    """Runs from its making to `stop`. `on_crash` is called in the thread if it dies of an error."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        flow: NodeFlow,
        runner: Runner,
        perform: Callable[[Effect], None],
        flush: Callable[[], None],
        on_crash: Callable[[], object],
        clock: Clock,
    ) -> None:
        self._inbox = inbox
        self._perform_now = perform
        self._flush_now = flush
        self._on_crash = on_crash
        self._is_abandoned = False
        self._loop: StepLoop[Message, Effect] = StepLoop(
            inbox=inbox,
            flow=flow,
            runner=runner,
            perform=self._perform,
            flush=self._flush,
            clock=clock,
        )
        self._thread: threading.Thread = start_step_thread(self._loop, self._crash)

    def busy_since_s(self) -> float | None:
        """When the turn under way began; None while the loop waits for messages."""
        return self._loop.busy_since_s

    async def stop(self, grace_s: float) -> None:
        """Tell everybody and end. A step that outlasts `grace_s` is left alone and reaches nobody:
        what it would use is closed next.
        """
        self._inbox.close()
        await asyncio.to_thread(self._thread.join, grace_s)
        if self._thread.is_alive():
            self._is_abandoned = True
            log.warning("a step goes on %g s after the stop: its requests end unanswered", grace_s)

    def _perform(self, effect: Effect) -> None:
        if not self._is_abandoned:
            self._perform_now(effect)

    def _flush(self) -> None:
        if not self._is_abandoned:
            self._flush_now()

    def _crash(self) -> None:
        if not self._is_abandoned:
            self._on_crash()
