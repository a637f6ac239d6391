"""Blocks that go from one card's cache to another's through their rings, layer by layer."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.kv.kv_layout import KVLayout


def new_ring(layout: KVLayout, num_slots: int) -> np.ndarray:
    """Return memory for a ring of so many slots, on a page: uint8 `[num_bytes]`."""
    return np.frombuffer(mmap.mmap(-1, num_slots * layout.layers[0].num_bytes), np.uint8)


def move_blocks(
    source: Any, target: Any, layout: KVLayout, blocks: Sequence[int], to: Sequence[int]
) -> None:
    """Copy `blocks` of one card pool to the blocks `to` of another; neither has a ring yet."""
    count = len(blocks)
    here, there = (new_ring(layout, count + 2) for _ in range(2))
    source.use_ring(here)
    target.use_ring(there)
    slots = np.arange(count, 0, -1)
    for layer in range(layout.num_layers):
        source.begin_out(layer, np.array(blocks), slots).wait()
        there[:] = here
        target.begin_in(layer, slots, np.array(to)).wait()
