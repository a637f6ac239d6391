"""When a peer has been silent for too long."""

from __future__ import annotations

import asyncio

_NUM_TICKS = 5


class SilenceTimer:
    """Counts the ticks since something was heard.

    Time in which this process did not run hardly counts: what the peer sent meanwhile lies in a
    socket, still to be read.
    """

    def __init__(self, limit_s: float) -> None:
        self._tick_s = limit_s / _NUM_TICKS
        self._num_ticks = 0

    def heard(self) -> None:
        """Start again from zero: the peer sent something."""
        self._num_ticks = 0

    async def wait_too_long(self) -> None:
        """Return when nothing was heard for the limit, or for a fifth of it more."""
        while self._num_ticks <= _NUM_TICKS:
            self._num_ticks += 1
            await asyncio.sleep(self._tick_s)
