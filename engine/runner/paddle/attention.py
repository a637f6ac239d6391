"""Attention on Paddle's tensors: what all its implementations share, and the reference.

A step's sequences are divided among *parts*, which attend for all of theirs together. The reference
has one part, `tiled_attention`, which runs on any device.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.cache.kv_formats import stored_items
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.device_arrays import to_device
from engine.runner.paddle.tiled_attention import TiledAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.model_spec import DecoderSpec


class AttentionPart(Protocol):
    """Paged attention for some of a step's sequences, over a cache that holds their new KV.

    A row's result is a function of its own sequence alone.
    """

    def begin(self, batch: FlatBatch, sequences: np.ndarray) -> np.ndarray:
        """Send the device what all layers share, for `sequences`, one or more indices of the batch.

        Returns the batch's row of each row that `attend` returns. Rows may be repeated.
        """

    def attend(
        self, qkv: tuple[paddle.Tensor, ...], keys: paddle.Tensor, values: paddle.Tensor
    ) -> paddle.Tensor:
        """Return `[rows, heads, head_dim]` for query, key and value of the whole batch.

        `keys` and `values` are the layer's cache, `[num_blocks, kv_heads, block_size, slot items]`.
        """


class PaddleAttention:
    """Paged attention in plain operators. A back end has `begin` and `attend`."""

    def __init__(self, spec: DecoderSpec, cache: KVCache, dtype: str) -> None:
        """Attend in `dtype`, whatever the cache stores."""
        self._cache = cache
        self._tiles = TiledAttention(spec, cache, dtype)

    def begin(self, batch: FlatBatch) -> None:
        """Send the device what all layers of one step share."""
        shares = [(part, sequences) for part, sequences in self._share(batch) if len(sequences)]
        self._parts = [part for part, _ in shares]
        rows = np.concatenate([part.begin(batch, sequences) for part, sequences in shares])
        places = np.unique(rows, return_index=True)[1]
        size = self._cache.layout.block_size
        self._blocks, self._offsets, self._places = to_device(
            batch.slots // size, batch.slots % size, places
        )

    def _share(self, batch: FlatBatch) -> list[tuple[AttentionPart, np.ndarray]]:
        """Return which part attends for which sequences."""
        return [(self._tiles, np.arange(len(batch.row_starts) - 1))]

    def attend(
        self, layer: int, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor
    ) -> paddle.Tensor:
        """Store keys and values, then attend over each row's own past.

        `query` and the result are `[rows, heads, head_dim]`, `key` and `value` `[rows, kv_heads,
        head_dim]`; query and key are rotated. Rows are the batch's.
        """
        keys, values = self._cache.layer(layer)
        stored = self._cache.layout.dtype
        keys[self._blocks, :, self._offsets] = stored_items(key, stored)
        values[self._blocks, :, self._offsets] = stored_items(value, stored)
        parts = [part.attend((query, key, value), keys, values) for part in self._parts]
        return paddle.concat(parts)[self._places]
