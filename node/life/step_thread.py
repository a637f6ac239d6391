"""The step loop in its thread, and how a node stops it or notices that it hangs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from common.observing.clock import Clock
from engine.core.step.runner import Runner
from engine.step_loop import StepLoop, start_step_thread
from node.flow.inbox import Inbox
from node.flow.messages import Effect, Message
from node.flow.node_flow import NodeFlow
from node.flow.step_progress import MOST_LIMIT_S, TICK_S, StepProgress

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
        publish: Callable[[], None] | None = None,
        is_async: bool = False,
    ) -> None:
        self._inbox = inbox
        self._on_crash = on_crash
        self._is_abandoned = False
        self._loop: StepLoop[Message, Effect] = StepLoop(
            inbox=inbox,
            flow=flow,
            runner=runner,
            perform=perform,
            publish=publish,
            flush=flush,
            clock=clock,
            is_async=is_async,
        )
        self._thread: threading.Thread = start_step_thread(self._loop, self._crash)

    async def wait_for_stall(self, progress: StepProgress) -> None:
        """Keep `progress` up to date; return when a turn of the step loop has stalled.

        Without this a step that hangs would go unnoticed: the event loop still renews the lease and
        sends heartbeats.
        """
        # Polled: a thread that hangs cannot set an event.
        while not progress.is_stalled:
            await asyncio.sleep(TICK_S)
            before_s = progress.stuck_s
            progress.look(self._loop.busy_since_s)
            if progress.stuck_s and not before_s:
                log.warning(
                    "a step has lasted %g s, longer than any should (%g s): routers prefer other "
                    "nodes until it ends",
                    progress.turn_s,
                    progress.limit_s,
                )
            if before_s and not progress.stuck_s:
                log.warning("the step ended after about %g s", before_s)
        log.error("a step did not end within %g s: the node stops", MOST_LIMIT_S)

    async def stop(self, grace_s: float) -> None:
        """Close the inbox, which ends every request, and wait `grace_s` for the thread.

        A step that lasts longer is abandoned. Its effects are dropped, because the parts they would
        use are closed next.
        """
        self._inbox.close()
        await asyncio.to_thread(self._thread.join, grace_s)
        if self._thread.is_alive():
            self._is_abandoned = True
            self._loop.abandon()
            log.warning("a step goes on %g s after the stop: its requests end unanswered", grace_s)

    def _crash(self) -> None:
        if not self._is_abandoned:
            self._on_crash()
