"""Report a step's layers as they become readable in host memory, while the next ones compute.

A device computes behind the thread that queues its work. A computed layer's blocks are copied out
on a separate stream while the next layers compute; a layer is reported when its copy is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.core.plan import OnLayer
from engine.runner.framework import paddle

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

    def __init__(self, on_layer: OnLayer | None, start_copy: StartCopy | None) -> None:
        self._on_layer = on_layer
        self._start_copy = start_copy
        self._under_way: deque[tuple[int, LayerCopy]] = deque()

    def on_computed(self, layer: int) -> None:
        """Start the copy of `layer`, whose part of the step was queued; report finished copies."""
        if self._start_copy is None:
            self._tell(layer)
            return
        self._under_way.append((layer, self._start_copy(layer)))
        while self._under_way and (
            len(self._under_way) > MAX_UNDER_WAY or self._under_way[0][1].is_done()
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


class DeviceCopy:
    """A copy of blocks of one layer from a GPU, through pinned memory, to a host mirror."""

    def __init__(
        self,
        parts: Sequence[paddle.Tensor],
        block_ids: np.ndarray,
        target: np.ndarray,
        stream: paddle.device.Stream,
    ) -> None:
        """Start the copy.

        `parts` are the layer's keys and values, `target` `[2, num_blocks, piece_bytes]` the mirror
        of both. `stream` is one that nothing else is computed on.
        """
        stream.wait_event(paddle.device.current_stream().record_event())
        with paddle.device.stream_guard(stream):
            places = paddle.to_tensor(block_ids)
            # Both must live until the copy is done, so that their memory is not reused before.
            self._gathered = [part[places].view("uint8") for part in parts]
            self._pinned = [one.pin_memory(blocking=False) for one in self._gathered]
            self._done = stream.record_event()
        self._block_ids, self._target = block_ids, target

    def is_done(self) -> bool:
        return bool(self._done.query())

    def finish(self) -> None:
        self._done.synchronize()
        for host, pinned in zip(self._target, self._pinned, strict=True):
            host[self._block_ids] = pinned.numpy().reshape(len(self._block_ids), -1)


class FinishedCopy:
    """A copy that is complete already."""

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        """Return at once."""
