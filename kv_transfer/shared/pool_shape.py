"""Where the pieces of a pool are, counted from its start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.kv.kv_layout import KVLayout, Layer


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool of `num_blocks`: layer by layer, in each plane by plane, in each piece by piece.

    Layers may differ in planes and in bytes per piece: see `KVLayout`. In a ring, through which
    blocks only pass, all layers of one kind have the same places: a block is a slot for one of
    them.
    """

    layers: tuple[Layer, ...]
    num_blocks: int
    is_ring: bool = False
    num_bytes: int = field(init=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _planes: tuple[npt.NDArray[np.uint64], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts: list[int] = []
        start_of: dict[Layer, int] = {}
        end = 0
        for layer in self.layers:
            start = start_of.setdefault(layer, end) if self.is_ring else end
            end = max(end, start + self.num_blocks * layer.num_bytes)
            starts.append(start)
        object.__setattr__(self, "num_bytes", end)
        object.__setattr__(self, "_starts", tuple(starts))
        offsets = (
            [self.offset(index, plane) for plane in range(layer.num_planes)]
            for index, layer in enumerate(self.layers)
        )
        object.__setattr__(self, "_planes", tuple(np.array(one, np.uint64) for one in offsets))

    @classmethod
    def of(cls, layout: KVLayout, num_blocks: int) -> PoolShape:
        return cls(layout.layers, num_blocks)

    @classmethod
    def ring(cls, layout: KVLayout, num_slots: int) -> PoolShape:
        return cls(layout.layers, num_slots, is_ring=True)

    @property
    def num_planes(self) -> int:
        """The planes of all layers."""
        return sum(layer.num_planes for layer in self.layers)

    def plane_offsets(self, layer: int) -> npt.NDArray[np.uint64]:
        """Return the offset of each plane of a layer in bytes: `[num_planes]`."""
        return self._planes[layer]

    def offset(self, layer: int, plane: int, block: int = 0) -> int:
        """Return the offset of a block's piece in bytes."""
        piece_bytes = self.layers[layer].piece_bytes
        return self._starts[layer] + (plane * self.num_blocks + block) * piece_bytes
