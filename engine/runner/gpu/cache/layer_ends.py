"""The ends of steps on the card, in each layer, and the step that wrote each block last.

A copy of a block waits, on the card, for the step that wrote it, and not for later steps: one
prompt's blocks are sent while the next prompts are computed. Steps whose layers are not reported
have one end for all layers: their blocks may be sent as soon as they are returned, which can be
before the card has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runner.cache.layers_out import LayersOut
from engine.runner.gpu.cuda_driver import Device, Event

_NUM_KEPT = 3
"""Ends that are kept: of the step that is being queued, the latest one, and the one before."""


class LayerEnds:
    """Ends of the steps on `stream`, and blocks that they wrote.

    The step thread owns it; any thread may call `after`.
    """

    def __init__(self, device: Device, stream: int, num_layers: int) -> None:
        self.num_layers, self._stream = num_layers, stream
        self._ends = [[device.event() for _ in range(num_layers)] for _ in range(_NUM_KEPT)]
        self._is_by_layer = [True] * _NUM_KEPT
        self._num_queued = 0
        self._written_in = np.zeros(0, np.int64)

    def forget(self, num_blocks: int) -> None:
        """Forget all writers, of `num_blocks` blocks: the cache has moved."""
        self._written_in = np.zeros(num_blocks, np.int64)

    def begin(self, blocks: np.ndarray) -> None:
        """Record the blocks that the step which is queued now writes."""
        self._written_in[blocks] = self._num_queued + 1

    def mark(self, layer: int) -> None:
        """Mark the end of a layer of that step, which has just been queued."""
        self._record(layer, is_by_layer=True)

    def mark_whole(self) -> None:
        """Mark the end of that step, all of which has just been queued."""
        self._record(self.num_layers - 1, is_by_layer=False)

    def _record(self, layer: int, *, is_by_layer: bool) -> None:
        place = (self._num_queued + 1) % _NUM_KEPT
        self._ends[place][layer].record(self._stream)
        if layer == self.num_layers - 1:
            self._is_by_layer[place] = is_by_layer
            self._num_queued += 1

    def after(self, layer: int, blocks: Sequence[int] | np.ndarray) -> Event:
        """Return the event to wait for before these blocks are read in a layer."""
        written_in = int(self._written_in[np.asarray(blocks)].max())
        # Looked at after that: steps that are queued meanwhile make this later, not earlier.
        latest = self._num_queued
        place = (latest if written_in >= latest else latest - 1) % _NUM_KEPT
        return self._ends[place][layer if self._is_by_layer[place] else -1]

    def close(self) -> None:
        """Free the events; no stream may wait for them any more."""
        for end in (end for ends in self._ends for end in ends):
            end.close()


class QueuedLayers:
    """The layers of a step, each an empty `layers_out.LayerCopy`, reported when all are queued.

    The card waits for a layer before its blocks are read, so no thread waits. Reported earlier,
    they would let the connector's thread compete for the interpreter with the one that queues the
    rest.
    """

    def __init__(self, ends: LayerEnds) -> None:
        self._ends = ends
        self._num_queued = 0

    def mark(self, layer: int) -> QueuedLayers:
        """Mark the end of a layer, which has just been queued."""
        self._ends.mark(layer)
        self._num_queued += 1
        return self

    def is_done(self) -> bool:
        return self._num_queued == self._ends.num_layers

    def finish(self) -> None:
        """Return at once."""


class UntoldLayers(LayersOut):
    """The layers of a step that are not reported: only its end is marked."""

    def __init__(self, ends: LayerEnds) -> None:
        super().__init__(None, None)
        self._ends = ends

    def on_computed(self, layer: int) -> None:
        if layer == self._ends.num_layers - 1:
            self._ends.mark_whole()
