"""Attention on a GPU: Paddle's fused paged operator for decoding tokens, plain ones for chunks.

The fused operator reads the cache for sequences that add one token. For longer runs it attends only
within the run, so chunks that follow a cached prefix use the plain operators.
"""

from __future__ import annotations

import numpy as np

from common.kv_layout import KVLayout
from engine.runner.flat_batch import FlatBatch
from engine.runner.framework import paddle
from engine.runner.kv_cache import KVCache
from engine.runner.model_spec import DecoderSpec
from engine.runner.paddle_attention import PaddleAttention

_TOLERANCE = 2e-2
"""Largest difference from the plain operators that half precision explains."""


class FusedAttention(PaddleAttention):
    """Plain operators for chunks, the fused operator for sequences that add one token."""

    def begin(self, batch: FlatBatch) -> None:
        super().begin(batch)
        counts = np.diff(batch.row_starts)
        first_rows = batch.row_starts[:-1]
        is_decoding = (counts == 1) & (batch.positions[first_rows] > 0)
        self._chunks = np.flatnonzero(~is_decoding).tolist()
        decoding = np.flatnonzero(is_decoding)
        self._num_decoding = len(decoding)
        rows = [np.arange(first_rows[i], batch.row_starts[i + 1]) for i in self._chunks]
        order = np.concatenate([*rows, first_rows[decoding]])
        self._back = paddle.to_tensor(np.argsort(order))
        if not self._num_decoding:
            return
        count = self._num_decoding
        self._decoding_rows = paddle.to_tensor(first_rows[decoding])
        self._past = _int32(batch.positions[first_rows[decoding]])
        self._tables = _int32(batch.block_tables[decoding])
        self._ones, self._zeros = _int32(np.ones(count)), _int32(np.zeros(count))
        self._row_ends = _int32(np.arange(count + 1))

    def attend(
        self, layer: int, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor
    ) -> paddle.Tensor:
        keys, values = self._cache.layer(layer)
        keys[self._blocks, :, self._offsets] = key
        values[self._blocks, :, self._offsets] = value
        parts = [self._attend_one(i, query, keys, values) for i in self._chunks]
        if self._num_decoding:
            qkv = paddle.concat([query, key, value], axis=1)[self._decoding_rows]
            parts.append(self._attend_decoding(qkv, keys, values))
        return paddle.concat(parts)[self._back]

    def _attend_decoding(
        self, qkv: paddle.Tensor, keys: paddle.Tensor, values: paddle.Tensor
    ) -> paddle.Tensor:
        """Attend for `qkv` `[sequences, heads + 2 · kv_heads, head_dim]`, one row per sequence."""
        count = self._num_decoding
        out = paddle.incubate.nn.functional.block_multihead_attention(
            qkv.reshape([count, -1]),
            keys,
            values,
            self._zeros.reshape([count, 1]),  # no sequence starts here
            self._past.reshape([count, 1]),
            self._ones.reshape([count, 1]),
            self._zeros,  # rows are not padded
            self._zeros,
            self._row_ends.reshape([count + 1, 1]),
            self._row_ends.reshape([count + 1, 1]),
            self._tables,
            max_seq_len=1,
            block_size=self._block_size,
        )[0]
        return out.reshape([count, self._num_heads, self._head_dim])


def _int32(values: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(values.astype(np.int32))


def fused_attention_problem(spec: DecoderSpec, dtype: str, block_size: int) -> str:
    """Return the reason why the fused operator cannot be used here; empty if it can.

    Runs both back ends on one decoding step of two short sequences with this model's head sizes.
    """
    try:
        difference = _compare(spec, dtype, block_size)
    except Exception as error:  # the operator raises errors of many types
        return f"the fused operator fails: {error!r:.300}"
    if not difference < _TOLERANCE:
        return f"the fused operator is off by {difference:.3g}: wanted below {_TOLERANCE}"
    return ""


def _compare(spec: DecoderSpec, dtype: str, block_size: int) -> float:
    """Return the largest difference between fused and plain attention on random input."""
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    random = np.random.default_rng(0)
    positions = np.array([block_size - 1, block_size // 2 + 1], dtype=np.int64)
    tables = np.array([[2, 0], [1, 3]], dtype=np.int64)
    slots = tables[[0, 1], positions // block_size] * block_size + positions % block_size
    batch = FlatBatch(
        token_ids=np.zeros(2, np.int64), positions=positions, slots=slots,
        row_starts=np.arange(3), block_tables=tables, sampled_rows=np.zeros(0, np.int64),
    )  # fmt: skip
    num_kv = spec.num_kv_heads
    qkv = random.standard_normal((2, spec.num_heads + 2 * num_kv, spec.head_dim))
    past = random.standard_normal((1, 2, 4, num_kv, block_size, spec.head_dim))
    outputs = []
    for kind in (PaddleAttention, FusedAttention):
        cache = KVCache(layout, 4 * layout.block_bytes)
        cache.tensor[:] = paddle.to_tensor(past).astype(dtype)
        query, key, value = paddle.split(
            paddle.to_tensor(qkv).astype(dtype), [spec.num_heads, num_kv, num_kv], axis=1
        )
        attention = kind(spec, cache)
        attention.begin(batch)
        outputs.append(attention.attend(0, query, key, value).astype("float32").numpy())
    return float(np.abs(outputs[0] - outputs[1]).max())
