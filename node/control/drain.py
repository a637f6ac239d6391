"""How a node leaves in order: it announces it, refuses new requests, finishes or hands over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.flow import messages
from node.flow.inbox import Inbox

log = logging.getLogger("pdserve.node")

LAST_GRACE_S = 5.0
"""Time after the time-out for a step under way and the last acknowledgements."""


class NodeDrain:
    """The draining of one node, which begins when `requested` is set. Belongs to the event loop."""

    def __init__(self, requested: asyncio.Event, *, timeout_s: float) -> None:
        self.requested = requested
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether the node is draining."""
        return self.requested.is_set()

    def on_drained(self) -> None:
        """End the draining: nothing is left on the node; thread-safe."""
        self._loop.call_soon_threadsafe(self._is_over.set)

    async def run(self, inbox: Inbox, announce: Callable[[], None]) -> None:
        """Wait for the request to drain, then until the node is empty or the time is over."""
        await self.requested.wait()
        log.info("draining: running requests have %g s to finish", self.timeout_s)
        announce()
        inbox.put(messages.Drain(self.timeout_s))
        try:
            async with asyncio.timeout(self.timeout_s + LAST_GRACE_S):
                await self._is_over.wait()
        except TimeoutError:
            log.warning("the node is not empty %g s after the time to drain", LAST_GRACE_S)
        else:
            log.info("drained: nothing is left")
