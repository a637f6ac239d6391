"""Report a step's layers as they become readable in host memory, while the next ones compute.

A device computes behind the thread that queues its work. A computed layer's blocks are copied out
on a separate stream while the next layers compute, and written to host memory on a thread; a layer
is reported when its copy is done. The end of a step waits for the copies of its last layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from engine.core.runner_contract import OnLayer

MAX_UNDER_WAY = 4
"""The most copies in flight; each holds pinned memory.

Without a limit the queueing thread would run ahead to the last layer and report earlier ones late.
"""


class LayerCopy(Protocol):
    """A copy in flight, out of one layer of the cache."""

    def is_done(self) -> bool:
        """Return whether `finish` would return at once."""

    def finish(self) -> None:
        """Wait for the copy; the layer's blocks are in host memory when this returns."""


StartCopy = Callable[[int], LayerCopy]
"""Starts copying a layer out, after all work queued on the device before."""


class LayersOut:
    """Calls `on_layer`, if there is one, for the layers of one step, in order.

    `start_copy` None: nothing needs to be copied, a computed layer is readable.
    """

    def __init__(
        self,
        on_layer: OnLayer | None,
        start_copy: StartCopy | None,
        most_under_way: int = MAX_UNDER_WAY,
    ) -> None:
        self._on_layer = on_layer
        self._start_copy = start_copy
        self._most_under_way = most_under_way
        self._under_way: deque[tuple[int, LayerCopy]] = deque()

    def on_computed(self, layer: int) -> None:
        """Start the copy of `layer`, whose part of the step was queued; report finished copies."""
        if self._start_copy is None:
            self._tell(layer)
            return
        self._under_way.append((layer, self._start_copy(layer)))
        while self._under_way and (
            len(self._under_way) > self._most_under_way or self._under_way[0][1].is_done()
        ):
            self._tell_of_next()

    def finish(self) -> None:
        """Wait until every computed layer was reported."""
        while self._under_way:
            self._tell_of_next()

    def _tell_of_next(self) -> None:
        layer, copy = self._under_way.popleft()
        copy.finish()
        self._tell(layer)

    def _tell(self, layer: int) -> None:
        if self._on_layer is not None:
            self._on_layer(layer)


class ThreadCopy:
    """A copy that a thread completes."""

    def __init__(self, work: Future[Any]) -> None:
        self._work = work

    def is_done(self) -> bool:
        return self._work.done()

    def finish(self) -> None:
        self._work.result()


class FinishedCopy:
    """A copy that is complete already."""

    def is_done(self, *, may_begin: bool = True) -> bool:
        return True

    def finish(self) -> None:
        """Return at once."""
