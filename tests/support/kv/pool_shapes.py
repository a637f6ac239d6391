"""Pools of keys and values that are described by their numbers alone."""

from __future__ import annotations

from common.kv.kv_layout import Layer
from kv_transfer.lanes.pool_memory import Bytes, HostMemory, Pool
from kv_transfer.shared.pool_shape import PoolShape


def kv_shape(num_layers: int, num_blocks: int, piece_bytes: int) -> PoolShape:
    return PoolShape((Layer(2, 1, piece_bytes),) * num_layers, num_blocks)


def kv_pool(memory: Bytes) -> Pool:
    """Return `[num_layers, 2, num_blocks, piece_bytes]` as a pool."""
    num_layers, _, num_blocks, piece_bytes = memory.shape
    return Pool(kv_shape(num_layers, num_blocks, piece_bytes), HostMemory(memory.reshape(-1)))
