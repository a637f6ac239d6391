"""How a starting process waits for a placement store that is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import PlacementUnavailable
from placement.store import PlacementForbidden

log = logging.getLogger("pdserve.placement")

PAUSE_S = 0.5
"""Pause between two calls of a starting process to a store that is away."""
TRIES_PER_LINE = 60
"""Half a minute where a call fails at once, and a minute where it has no answer for 0.5 s."""

Answer = TypeVar("Answer")


async def wait_for_store(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the answer of a store that may be away: a starting process cannot go on without it.

    The wait is logged when it begins and after every `TRIES_PER_LINE` calls. Raises
    `PlacementForbidden` at once, because no wait changes that.
    """
    num_tries = 0
    while True:
        try:
            return await call()
        except PlacementForbidden:
            raise
        except PlacementUnavailable as away:
            if num_tries % TRIES_PER_LINE == 0:
                log.warning("waiting for the placement store: %s (--redis-url says where)", away)
        num_tries += 1
        await asyncio.sleep(PAUSE_S)
