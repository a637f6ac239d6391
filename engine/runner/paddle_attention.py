"""Attention in plain Paddle operators: runs on any device, the reference for other back ends."""

from __future__ import annotations

import numpy as np

from common.blocks import blocks_for
from engine.runner.flat_batch import FlatBatch
from engine.runner.framework import paddle
from engine.runner.kv_cache import KVCache
from engine.runner.model_spec import DecoderSpec


class PaddleAttention:
    """Paged attention, one sequence at a time. A back end has `begin` and `attend`."""

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        self._cache = cache
        self._block_size = cache.layout.block_size
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._head_dim = spec.head_dim

    def begin(self, batch: FlatBatch) -> None:
        """Prepare what all layers of one step share."""
        self._batch = batch
        self._blocks = paddle.to_tensor(batch.slots // self._block_size)
        self._offsets = paddle.to_tensor(batch.slots % self._block_size)

    def attend(
        self, layer: int, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor
    ) -> paddle.Tensor:
        """Store keys and values, then attend over each row's own past.

        `query` and the result are `[rows, heads, head_dim]`, `key` and `value` `[rows, kv_heads,
        head_dim]`; query and key are rotated. Rows are the batch's.
        """
        keys, values = self._cache.layer(layer)
        keys[self._blocks, :, self._offsets] = key
        values[self._blocks, :, self._offsets] = value
        sequences = range(len(self._batch.row_starts) - 1)
        return paddle.concat([self._attend_one(i, query, keys, values) for i in sequences])

    def _attend_one(
        self, index: int, query: paddle.Tensor, keys: paddle.Tensor, values: paddle.Tensor
    ) -> paddle.Tensor:
        """Attend for one sequence's rows `[rows, heads, head_dim]`; one product per head group."""
        batch = self._batch
        first, end = (int(row) for row in batch.row_starts[index : index + 2])
        num_rows, num_keys = end - first, int(batch.positions[end - 1]) + 1
        num_blocks = blocks_for(num_keys, self._block_size)
        table = paddle.to_tensor(batch.block_tables[index, :num_blocks])
        grouped = [self._num_kv_heads, -1, self._head_dim]
        past_keys = keys[table].transpose([1, 0, 2, 3]).reshape(grouped)[:, :num_keys]
        past_values = values[table].transpose([1, 0, 2, 3]).reshape(grouped)[:, :num_keys]
        rows = query[first:end].transpose([1, 0, 2]).reshape(grouped)
        scores = paddle.matmul(rows * self._head_dim**-0.5, past_keys, transpose_y=True)
        positions = np.tile(batch.positions[first:end], self._num_heads // self._num_kv_heads)
        is_future = np.arange(num_keys)[None, :] > positions[:, None]
        mask = paddle.to_tensor(np.where(is_future, np.float32(-np.inf), np.float32(0.0)))
        weights = paddle.nn.functional.softmax(scores.astype("float32") + mask, axis=-1)
        out = paddle.matmul(weights.astype(values.dtype), past_values)
        return out.reshape([self._num_heads, num_rows, self._head_dim]).transpose([1, 0, 2])
