"""Signals that a program waits for, without polling and without work in handlers."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class StopRequested(BaseException):
    """A stop signal interrupted the code inside `Signals.raising`."""


class Signals:
    """While entered, SIGINT, SIGTERM, SIGHUP and SIGCHLD end a `wait`; stop signals are counted.

    SIGHUP stays ignored where it was ignored before. Only the main thread may enter it. A signal
    that arrives between two waits ends the next one.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup_fd = -1
        self._read_fd = self._write_fd = -1
        self._is_raising = False
        self._stops_seen = 0

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        stops = set(STOP_SIGNALS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops.remove(signal.SIGHUP)  # `nohup`: the end of the terminal is not its end
        for number in (*stops, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    @property
    def num_stops(self) -> int:
        """The number of stop signals so far."""
        return self._stops_seen

    def wait(self, timeout_s: float) -> None:
        """Return when a signal arrives or has arrived since the last wait, or after `timeout_s`."""
        readable, _, _ = select.select([self._read_fd], [], [], max(0.0, timeout_s))
        if readable:
            os.read(self._read_fd, 4096)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise `StopRequested` on a stop signal inside the block, also in a blocking read."""
        self._is_raising = True
        try:
            if self._stops_seen:
                raise StopRequested
            yield
        finally:
            self._is_raising = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self._stops_seen += 1
            if self._is_raising:
                self._is_raising = False
                raise StopRequested
