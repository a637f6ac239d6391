"""Where steps end on the card, in each layer, and which of them wrote a block last.

What sends a block waits, on the card, for the step that wrote it, and not for the steps behind
that: one prompt's blocks are sent while the next prompts are computed. Steps of which nobody is
told as they go have one end for all layers: their blocks may be sent as soon as they are returned,
which can be before the card has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runner.cache.layers_out import LayersOut
from engine.runner.gpu.cuda_driver import Device, Event

_NUM_KEPT = 3
"""The step that is being queued, the latest one, and the one before, behind all earlier ones."""


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
        """Take it that no step has written any of so many blocks: the cache has moved."""
        self._written_in = np.zeros(num_blocks, np.int64)

    def begin(self, blocks: np.ndarray) -> None:
        """Record which blocks the step writes that is queued now."""
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
        """Return what to wait for before these blocks are read in a layer."""
        written_in = int(self._written_in[np.asarray(blocks)].max())
        # Looked at after that: steps that are queued meanwhile make this later, not earlier.
        latest = self._num_queued
        place = (latest if written_in >= latest else latest - 1) % _NUM_KEPT
        return self._ends[place][layer if self._is_by_layer[place] else -1]

    def close(self) -> None:
        """Free the events; nothing waits for them."""
        for end in (end for ends in self._ends for end in ends):
            end.close()


class QueuedLayers:
    """The layers of a step, each a `layers_out.LayerCopy` of nothing, all told when all are queued.

    Code that reads a layer's blocks has the card wait for the layer, so no thread waits. Told
    earlier, the connector's thread would take the interpreter from the one that queues the rest.
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
    """The layers of a step of which nobody is told: its end is marked."""

    def __init__(self, ends: LayerEnds) -> None:
        super().__init__(None, None)
        self._ends = ends

    def on_computed(self, layer: int) -> None:
        if layer == self._ends.num_layers - 1:
            self._ends.mark_whole()
