"""Attention on a GPU with Paddle's fused operators, where `fused_check` finds them right.

Decoding rows and the rows that verify drafts go through the paged operator, which reads the cache
in place. It takes one row per sequence, so every row is a sequence to it, with the table of its own
sequence: rows of one sequence then share nothing but the cache, and drafts change no bit of the
rows before them. Chunks go through variable-length flash attention, which reads keys that were
gathered from the cache, or through tiles where that operator is not right.
"""

from __future__ import annotations

import itertools

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.attention import AttentionPart, PaddleAttention
from engine.runner.paddle.attention_tiles import is_short_run, rows_of
from engine.runner.paddle.device_arrays import to_device
from engine.runner.paddle_import import paddle
from engine.runner.weights.model_spec import DecoderSpec

_MAX_GATHERED = 1 << 26
"""The most elements of keys that are gathered together, unless one sequence has more."""


class FusedAttention(PaddleAttention):
    """The paged operator for short runs after cached tokens, another part for chunks."""

    def __init__(self, spec: DecoderSpec, cache: KVCache, *, has_flash: bool) -> None:
        """Attend in the dtype of the cache, which the fused operators require."""
        super().__init__(spec, cache, cache.layout.dtype)
        self._paged = PagedRows(spec, cache)
        self._chunks: AttentionPart = FlashChunks(spec, cache) if has_flash else self._tiles

    def _share(self, batch: FlatBatch) -> list[tuple[AttentionPart, np.ndarray]]:
        # To the paged operator a row without past is one that does not decode.
        is_paged = is_short_run(batch) & (batch.positions[batch.row_starts[:-1]] > 0)
        return [
            (self._chunks, np.flatnonzero(~is_paged)),
            (self._paged, np.flatnonzero(is_paged)),
        ]


class PagedRows:
    """An `AttentionPart` for rows with a past, one by one, on the paged operator."""

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        self._block_size = cache.layout.block_size

    def begin(self, batch: FlatBatch, sequences: np.ndarray) -> np.ndarray:
        rows, owners = rows_of(batch, sequences)
        count, past = len(rows), batch.positions[rows]
        self._rows, *parts = to_device(
            rows,
            past,
            np.ones(count, np.int64),
            np.zeros(count, np.int64),
            np.arange(count + 1),
            batch.block_tables[owners],
        )
        past_on_device, ones, zeros, ends, tables = (part.astype("int32") for part in parts)
        column, ends = [count, 1], ends.reshape([count + 1, 1])
        self._arguments = (
            zeros.reshape(column),  # no sequence starts here
            past_on_device.reshape(column),
            ones.reshape(column),
            zeros,  # rows are not padded
            zeros,
            ends,
            ends,
            tables,
        )
        # Given on the CPU: the operator would find them itself, and wait for the device twice.
        self._most = {
            "max_enc_len_this_time": _on_cpu(0),
            "max_dec_len_this_time": _on_cpu(int(past.max())),
        }
        return rows

    def attend(
        self, qkv: tuple[paddle.Tensor, ...], keys: paddle.Tensor, values: paddle.Tensor
    ) -> paddle.Tensor:
        rows = paddle.gather(paddle.concat(qkv, axis=1), self._rows)
        out = paddle.incubate.nn.functional.block_multihead_attention(
            rows.reshape([len(rows), -1]),
            keys,
            values,
            *self._arguments,
            max_seq_len=1,
            block_size=self._block_size,
            **self._most,
        )[0]
        return out.reshape([-1, self._num_heads, self._head_dim])


class FlashChunks:
    """An `AttentionPart` for runs of any length, with or without a past, on flash attention."""

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        self._head_dim, self._num_kv_heads = spec.head_dim, spec.num_kv_heads
        self._block_size = cache.layout.block_size

    def begin(self, batch: FlatBatch, sequences: np.ndarray) -> np.ndarray:
        lengths = batch.positions[batch.row_starts[sequences + 1] - 1] + 1
        size, heads = self._block_size, self._num_kv_heads
        groups = list(self._groups(lengths))
        arrays, self._most, all_rows = [], [], []
        for chosen in groups:
            rows, _ = rows_of(batch, sequences[chosen])
            counts = np.diff(batch.row_starts)[sequences[chosen]]
            owners = np.repeat(sequences[chosen], lengths[chosen])
            places = np.concatenate([np.arange(length) for length in lengths[chosen]])
            blocks = batch.block_tables[owners, places // size]
            # Of the first head's vector in a cache seen as `[vectors, head_dim]`.
            first = blocks * heads * size + places % size
            arrays += [rows, first, _ends(counts), _ends(lengths[chosen])]
            self._most.append((int(counts.max()), int(lengths[chosen].max())))
            all_rows.append(rows)
        per_head, *sent = to_device(np.arange(heads) * size, *arrays)
        self._groups_sent = [
            (
                sent[at],
                (sent[at + 1].unsqueeze(1) + per_head).reshape([-1]),
                sent[at + 2].astype("int32"),
                sent[at + 3].astype("int32"),
            )
            for at in range(0, len(sent), 4)
        ]
        return np.concatenate(all_rows)

    def _groups(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Divide sequences so that the keys of few are gathered together."""
        per_key = self._num_kv_heads * self._head_dim
        groups: list[list[int]] = [[]]
        total = 0
        for index, length in enumerate(lengths.tolist()):
            if groups[-1] and (total + length) * per_key > _MAX_GATHERED:
                groups.append([])
                total = 0
            groups[-1].append(index)
            total += length
        return [np.array(group) for group in groups]

    def attend(
        self, qkv: tuple[paddle.Tensor, ...], keys: paddle.Tensor, values: paddle.Tensor
    ) -> paddle.Tensor:
        shape = [-1, self._num_kv_heads, self._head_dim]
        parts = []
        for (rows, vectors, row_ends, key_ends), (most_rows, most_keys) in zip(
            self._groups_sent, self._most, strict=True
        ):
            past = [
                paddle.gather(part.reshape([-1, self._head_dim]), vectors).reshape(shape)
                for part in (keys, values)
            ]
            # Causal from the end: a group's last row sees all of its keys.
            parts.append(
                paddle.nn.functional.flash_attention.flash_attn_unpadded(
                    paddle.gather(qkv[0], rows),
                    *past,
                    row_ends,
                    key_ends,
                    most_rows,
                    most_keys,
                    self._head_dim**-0.5,
                    causal=True,
                    training=False,
                )[0]
            )
        return paddle.concat(parts)


def _ends(counts: np.ndarray) -> np.ndarray:
    return np.array(list(itertools.accumulate(counts.tolist(), initial=0)))


def _on_cpu(value: int) -> paddle.Tensor:
    return paddle.to_tensor([value], dtype="int32", place=paddle.CPUPlace())
