"""Writes log lines to a descriptor without ever waiting for who reads them.

A pipe, a socket or a terminal takes no more when its reader stands still: a container's log driver
that hangs, a terminal after Ctrl-S, a `| less`. A write then lasts until it reads again, and on an
event loop or a step thread everything else waits too. So these get their lines from a thread of
their own. A file takes what is written, and gets it at once.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
from collections import deque

MAX_WAITING_BYTES = 1 << 20
"""Most bytes of lines that wait for a reader; further lines are lost, and their number is told."""
FLUSH_S = 1.0
"""A flush ends when nothing was read for so long."""
_POLL_MS = 1000


class LogOutput(logging.Handler):
    """Lines for which there is no room, since nobody reads or a disk is full, are lost."""

    def __init__(self, descriptor: int) -> None:
        """Write to `descriptor`, which stays its owner's."""
        super().__init__()
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._num_lost = 0
        self._changed = threading.Condition(self.lock)
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not self._is_file:
            threading.Thread(target=self._run, name="pdserve-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's line, or have it written. The lock is held."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._is_file:
            self._write(line)
        elif self._num_lost or self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self._num_lost += 1  # until those before it are read: so all are missing in one place
        else:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, or nothing was for `FLUSH_S`."""
        with self._changed:
            while self._waiting_bytes:
                before = self._waiting_bytes
                self._changed.wait(FLUSH_S)
                if self._waiting_bytes == before:
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                line = self._waiting.popleft()
            self._write(line)
            with self._changed:
                self._waiting_bytes -= len(line)
                if self._num_lost and not self._waiting:
                    self._tell_lost()
                self._changed.notify_all()

    def _tell_lost(self) -> None:
        """Let a line follow that says how many are missing before it."""
        num_lost, self._num_lost = self._num_lost, 0
        message = "%d log lines are missing here: nobody read them in time"
        self.emit(logging.LogRecord("pdserve", logging.WARNING, "", 0, message, (num_lost,), None))

    def _write(self, line: bytes) -> None:
        """Write all of it, or what a disk has room for, or nothing where the reader is gone."""
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the terminal that both have so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_POLL_MS)
            except OSError:
                return
