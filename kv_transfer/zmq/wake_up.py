"""Wakes a thread that polls: free while it is awake, one system call while it waits."""

from __future__ import annotations

import os
import threading


class WakeUp:
    """One thread calls `before_wait`, polls `fileno`, and calls `after_wait`; any may call `wake`.

    What was made known before `wake` is seen by that thread after its present or next wait.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_called = False
        self._is_waiting = False

    def fileno(self) -> int:
        return self._fd

    def before_wait(self, timeout_s: float) -> float:
        """Return how long to wait: not at all if `wake` was called since the last wait."""
        # In this order: `wake` sets the other one first, so one of the two sides sees the other.
        self._is_waiting = True
        return 0.0 if self._is_called else timeout_s

    def after_wait(self, *, is_ready: bool) -> None:
        """End a wait; `is_ready` is whether the poll found the file to be readable."""
        self._is_waiting = False
        self._is_called = False
        if is_ready:
            os.eventfd_read(self._fd)

    def wake(self) -> None:
        self._is_called = True
        if not self._is_waiting:
            return
        with self._lock:
            # Not twice for one wait, and not into a file that is closed.
            if self._is_waiting:
                self._is_waiting = False
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._lock:
            self._is_waiting = False
            os.close(self._fd)
