"""When the layers of a step's blocks are handed to the connector, while the step computes. Pure.

Each hand-over wakes the connector's thread, which takes the interpreter from the step and a core
from its kernels, and wakes the receiver's thread for an acknowledgement. Where a layer of the
blocks is small, that costs more than the layer's bytes. So computed layers wait for each other,
but never longer than is left to compute: what leaves after the last layer is that layer alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.flow.messages import PushBlocks

MOST_HELD_BYTES = 2 << 20
"""Bytes from which layers are handed over at once: large layers keep a network busy."""


class LayersToPush:
    """The layers of one step's blocks, which are computed one after the other."""

    def __init__(self, pushes: Sequence[PushBlocks], layer_bytes: Sequence[int]) -> None:
        """Hold back layers of `pushes`, which name none; `layer_bytes`: of a block, by layer."""
        self._pushes = pushes
        self._layer_bytes = layer_bytes
        self._num_blocks = sum(len(push.source_blocks) for push in pushes)
        self._held: list[int] = []
        self._held_bytes = 0

    def on_computed(self, layer: int) -> list[PushBlocks]:
        """Note that a layer can be read; return the layers to hand over now, at the end all."""
        self._held.append(layer)
        self._held_bytes += self._num_blocks * self._layer_bytes[layer]
        num_left = len(self._layer_bytes) - 1 - layer
        if len(self._held) < num_left and self._held_bytes < MOST_HELD_BYTES:
            return []
        held, self._held, self._held_bytes = self._held, [], 0
        # Layers of one transfer follow each other: its connector takes them together.
        return [push.of_layer(one) for push in self._pushes for one in held]
