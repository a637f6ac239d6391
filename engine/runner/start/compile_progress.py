"""Logs how far the CPU kernels are compiled; logs nothing where all are cached."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from common.observing.clock import Clock, MonotonicClock

_logger = logging.getLogger("pdserve.engine")

NUM_KERNELS = 98
"""What the demo model needs. Another one needs about as many: each format of its weights has some.
Nodes of a machine that start together divide them."""
PROGRESS = "compiled %d of about %d CPU kernels"
_INTERVAL_S = 2.0


@contextmanager
def logged_compilation(clock: Clock | None = None) -> Iterator[None]:
    """Log every two seconds of the body how many kernels it has compiled so far, and at its end."""
    counter = _Counter(clock or MonotonicClock())
    with event.install_listener("numba:compile", counter):
        yield
    counter.end()


class _Counter(event.Listener):  # type: ignore[misc]
    """Counts this project's kernels. One that comes out of the cache makes no event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_compiled = self._num_told = 0
        self._next_at_s = clock.now_s() + _INTERVAL_S

    def on_start(self, begun: Any) -> None:
        """Do nothing: a kernel counts when it is compiled."""

    def on_end(self, ended: Any) -> None:
        """Count a kernel."""
        if ended.data["dispatcher"].py_func.__module__.startswith("numba."):
            return
        self._num_compiled += 1
        if self._clock.now_s() >= self._next_at_s:
            self._next_at_s = self._clock.now_s() + _INTERVAL_S
            self._tell()

    def end(self) -> None:
        """Log the last number, unless it was logged."""
        if self._num_compiled > self._num_told:
            self._tell()

    def _tell(self) -> None:
        self._num_told = self._num_compiled
        _logger.info(PROGRESS, self._num_told, max(NUM_KERNELS, self._num_told))
