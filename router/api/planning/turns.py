"""Bodies that are planned on the event loop, in turns: a few in each, first come, first served.

The requests of a burst are read in one turn of the event loop. Planned in one turn as well, the
first of them would ask its nodes only when the last one is planned, and all of them would wait for
their first tokens as long as that takes.
"""

from __future__ import annotations

import asyncio
from collections import deque

BYTES_PER_TURN = 8 << 10
"""Most bytes of bodies in one turn; one body may have more. Requests that begin together share
messages to the nodes: with half as much, 128 saturated streams send five times as many."""
LEAST_BYTES = 512
"""The bytes as which a shorter body counts: it takes as long."""


class PlanningTurns:
    """The turns that all requests share."""

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def next(self, num_bytes: int) -> None:
        """Return in a turn that has room for a body of `num_bytes`."""
        num_bytes = max(num_bytes, LEAST_BYTES)
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        await turn

    def _has_room(self, num_bytes: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + num_bytes <= BYTES_PER_TURN

    def _take(self, num_bytes: int) -> None:
        if not self._taken_bytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._taken_bytes += num_bytes

    def _begin_turn(self) -> None:
        self._taken_bytes = 0
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():  # its request may have ended
                turn.set_result(None)
                self._take(num_bytes)
