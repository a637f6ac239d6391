"""A small cache on a card that is played, and what it holds."""

from __future__ import annotations

import ctypes

import numpy as np

from common.kv.kv_layout import KVLayout
from engine.runner.gpu.cache.pool import GpuCache

# A block's keys are three parts of the kernel, the last one shorter.
LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=5, head_dim=64, block_size=64, dtype="bfloat16"
)
NUM_BLOCKS = 7


def content(cache: GpuCache) -> np.ndarray:
    """What the card holds `[layers, 2, blocks, piece_bytes]`, for a test to look at."""
    size = cache.num_blocks * LAYOUT.block_bytes
    address = cache.pool.address
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return flat.reshape(LAYOUT.pool_shape(cache.num_blocks))
