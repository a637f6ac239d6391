"""The request to end a role: in order, or at once."""

from __future__ import annotations

import asyncio
import signal


class Shutdown:
    """Requests to end. `drain`: in order; `now`: at once; `either` is set with each of them."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.either = asyncio.Event()
        self._is_told = False

    def watch_signals(self) -> None:
        """Drain at SIGTERM, and at the end of the terminal (SIGHUP) unless that is ignored; end at
        once at a second one, or at Ctrl-C. On the event loop.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.request)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
            loop.add_signal_handler(signal.SIGHUP, self.request)
        loop.add_signal_handler(signal.SIGINT, self.end_now)

    def request(self) -> None:
        """End in order; requested a second time: at once.

        A node that drains already because a router asked for it goes on draining.
        """
        if self._is_told:
            self.end_now()
        self._is_told = True
        self.drain.set()
        self.either.set()

    def end_now(self) -> None:
        """End without waiting for what runs."""
        self.now.set()
        self.either.set()
