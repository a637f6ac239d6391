"""How a role is told to end: in order, or at once."""

from __future__ import annotations

import asyncio
import signal


class Ending:
    """Events for whoever serves: `drain` and `now`, of which one or both come, and `either`."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.either = asyncio.Event()

    def watch_signals(self) -> None:
        """SIGTERM drains; a second one, or Ctrl-C at any time, ends at once. On the event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask)
        loop.add_signal_handler(signal.SIGINT, self.end_now)

    def ask(self) -> None:
        """End in order; asked again: at once."""
        if self.drain.is_set():
            self.end_now()
        self.drain.set()
        self.either.set()

    def end_now(self) -> None:
        """End without waiting for what runs."""
        self.now.set()
        self.either.set()
