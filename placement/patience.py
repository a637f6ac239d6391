"""For a process that starts: it cannot go on without the store, and a busy one is not away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from placement.store import PlacementSlow

log = logging.getLogger("pdserve.placement")

NUM_TRIES = 12
"""Six seconds, with the time that a call to Redis has."""

Answer = TypeVar("Answer")


async def patiently(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer of a store that may be slow. One that is away raises at once, as ever."""
    for number in range(1, NUM_TRIES):
        try:
            return await call()
        except PlacementSlow as slow:
            if number == 1:
                log.warning("the placement store is slow, asking again: %s", slow)
    return await call()
