"""Paddle's fused attention operators, played on a CPU from what their GPU kernels do.

Written from the source of Paddle's kernels: the paged operator takes one row per sequence, stores
its key and value at `seq_lens_decoder` and attends up to there; it leaves the rows of sequences
without a past as they are. Its maxima must be CPU tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.runner.paddle_import import paddle


def paged_operator(
    qkv: paddle.Tensor,
    key_cache: paddle.Tensor,
    value_cache: paddle.Tensor,
    seq_lens_encoder: paddle.Tensor,
    seq_lens_decoder: paddle.Tensor,
    seq_lens_this_time: paddle.Tensor,
    padding_offsets: paddle.Tensor,
    cum_offsets: paddle.Tensor,
    cu_seqlens_q: paddle.Tensor,
    cu_seqlens_k: paddle.Tensor,
    block_tables: paddle.Tensor,
    *,
    max_seq_len: int,
    block_size: int,
    max_enc_len_this_time: paddle.Tensor,
    max_dec_len_this_time: paddle.Tensor,
) -> tuple[paddle.Tensor, ...]:
    """`paddle.incubate.nn.functional.block_multihead_attention` for decoding rows."""
    count = qkv.shape[0]
    for tensor, shape in (
        (seq_lens_encoder, [count, 1]), (seq_lens_decoder, [count, 1]),
        (seq_lens_this_time, [count, 1]), (padding_offsets, [count]), (cum_offsets, [count]),
        (cu_seqlens_q, [count + 1, 1]), (cu_seqlens_k, [count + 1, 1]),
        (max_enc_len_this_time, [1]), (max_dec_len_this_time, [1]),
    ):  # fmt: skip
        assert list(tensor.shape) == shape
        assert tensor.dtype == paddle.int32
    assert block_tables.dtype == paddle.int32
    assert block_tables.shape[0] == count
    assert max_seq_len == 1
    past = raw(seq_lens_decoder).reshape(-1)
    assert raw(max_enc_len_this_time)[0] == 0 == raw(seq_lens_encoder).max()
    assert raw(max_dec_len_this_time)[0] == past.max()
    assert (raw(seq_lens_this_time) == 1).all()
    np.testing.assert_array_equal(raw(cu_seqlens_q).reshape(-1), np.arange(count + 1))
    num_kv_heads, dim = key_cache.shape[1], key_cache.shape[3]
    rows = raw(qkv).reshape(count, -1, dim)
    query, key, value = np.split(rows, [-2 * num_kv_heads, -num_kv_heads], axis=1)
    keys, values, tables = raw(key_cache), raw(value_cache), raw(block_tables)
    out = np.full(query.shape, np.nan, np.float32)
    for row in range(count):
        if past[row] == 0:
            continue
        slot = tables[row, past[row] // block_size], slice(None), past[row] % block_size
        keys[slot], values[slot] = key[row], value[row]
    for row in np.flatnonzero(past).tolist():
        positions = np.arange(past[row] + 1)
        blocks, offsets = tables[row, positions // block_size], positions % block_size
        out[row] = attend(
            query[row : row + 1], keys[blocks, :, offsets], values[blocks, :, offsets]
        )
    return paddle.from_dlpack(out.reshape(count, -1)), qkv, key_cache, value_cache


def flash_operator(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    cu_seqlens_q: paddle.Tensor,
    cu_seqlens_k: paddle.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    *,
    causal: bool,
    training: bool,
) -> tuple[paddle.Tensor, None]:
    """`flash_attn_unpadded`, causal from each sequence's end."""
    assert causal
    assert not training
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == paddle.int32
    row_ends, key_ends = raw(cu_seqlens_q), raw(cu_seqlens_k)
    assert max_seqlen_q == np.diff(row_ends).max()
    assert max_seqlen_k == np.diff(key_ends).max()
    assert scale == query.shape[2] ** -0.5
    out = np.full(query.shape, np.nan, np.float32)
    for index in range(len(row_ends) - 1):
        rows = slice(row_ends[index], row_ends[index + 1])
        past = slice(key_ends[index], key_ends[index + 1])
        out[rows] = attend(raw(query)[rows], raw(key)[past], raw(value)[past])
    assert (row_ends[-1], key_ends[-1]) == (query.shape[0], key.shape[0])
    return paddle.from_dlpack(out), None


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attend for the last rows of a sequence; all are `[tokens, heads, dim]`."""
    group = query.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    first = len(keys) - len(query)
    is_future = np.arange(len(keys))[None, :] > first + np.arange(len(query))[:, None]
    scores = np.where(is_future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, values), np.float32)


def raw(tensor: paddle.Tensor) -> np.ndarray:
    """The tensor's own memory, as a kernel sees it: no copy is counted."""
    return np.from_dlpack(tensor.detach())


def install(monkeypatch: Any, *, paged: Any = paged_operator, flash: Any = flash_operator) -> None:
    """Put these operators in the place of Paddle's."""
    functional = paddle.incubate.nn.functional
    monkeypatch.setattr(functional, "block_multihead_attention", paged)
    monkeypatch.setattr(paddle.nn.functional.flash_attention, "flash_attn_unpadded", flash)
