"""Notices a step that does not end: the event loop alone would keep the node looking healthy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.clock import Clock

log = logging.getLogger("pdserve.node")

# The largest step on a slow machine takes about half a minute.
STEP_STALL_S = 120.0
CHECK_INTERVAL_S = 5.0


def is_stalled(busy_since_s: float | None, now_s: float) -> bool:
    """Whether a turn of the step loop lasts too long; None means that there is no turn."""
    return busy_since_s is not None and now_s - busy_since_s > STEP_STALL_S


async def wait_for_stall(busy_since_s: Callable[[], float | None], clock: Clock) -> None:
    """Return when the step loop hangs."""
    # Looked at from time to time: a thread that hangs cannot set an event.
    while not is_stalled(busy_since_s(), clock.now_s()):  # noqa: ASYNC110
        await asyncio.sleep(CHECK_INTERVAL_S)
    log.error("a step did not end within %g s: the node gives up", STEP_STALL_S)
