"""Attention on Paddle's tensors: the reference, over tiles of keys (`tiled_attention`)."""

from __future__ import annotations

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.cache.kv_formats import stored_items
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.device_arrays import to_device
from engine.runner.paddle.tiled_attention import TiledAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.spec.model_spec import DecoderSpec


class PaddleAttention:
    """Paged attention in plain operators. A back end has `begin` and `attend`."""

    def __init__(self, spec: DecoderSpec, cache: KVCache, dtype: str) -> None:
        """Attend in `dtype`, whatever the cache stores."""
        self._spec, self._cache = spec, cache
        windows = {spec.window_of(layer) for layer in range(spec.num_layers)}
        self._tiles = {window: TiledAttention(spec, cache, dtype, window) for window in windows}

    def begin(self, batch: FlatBatch) -> None:
        """Send the device what all layers of one step share, and what those of each window do."""
        every = np.arange(len(batch.row_starts) - 1)
        self._places = {}
        for window, tiles in self._tiles.items():
            places = np.unique(tiles.begin(batch, every), return_index=True)[1]
            (self._places[window],) = to_device(places)
        size = self._cache.layout.block_size
        self._blocks, self._offsets = to_device(batch.slots // size, batch.slots % size)

    def attend(
        self,
        layer: int,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        sinks: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Store keys and values, then attend over each row's own past.

        `query` and the result are `[rows, heads, head_dim]`, `key` and `value` `[rows, kv_heads,
        head_dim]`; query and key are rotated. Rows are the batch's. `sinks`, float32 `[heads]`, are
        scores that join the softmax and have no value.
        """
        keys, values = self._cache.layer(layer)
        stored = self._cache.layout.dtype
        keys[self._blocks, :, self._offsets] = stored_items(key, stored)
        values[self._blocks, :, self._offsets] = stored_items(value, stored)
        window = self._spec.window_of(layer)
        attended = self._tiles[window].attend(query, keys, values, sinks)
        return attended[self._places[window]]
