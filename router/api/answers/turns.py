"""Long work on the event loop, done in pieces: one piece in a turn, whosever it is.

Each request alone could give way between its pieces, and a hundred of them would still do a hundred
pieces in one turn.
"""

from __future__ import annotations

import asyncio


class AnswerTurns:
    """The turns that all requests share; who asks first is served first."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Return in a turn in which no other caller does another piece."""
        async with self._lock:
            await asyncio.sleep(0)
