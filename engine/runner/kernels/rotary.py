"""Between the projection and attention: head norms, rotary positions, and writing the KV cache."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from engine.runner.kernels.matmul import rms_norm_row

_SERIAL_ROWS = 16


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate(head, cosine, sine, scale, out) -> None:  # type: ignore[no-untyped-def]
    """Rotate the pairs (i, i + half) of `head` by one position's angles, times `scale`."""
    half = head.shape[0] // 2
    for i in range(half):
        low, high = head[i], head[half + i]
        out[i] = (low * cosine[i] - high * sine[i]) * scale
        out[half + i] = (high * cosine[i] + low * sine[i]) * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _store_row(qkv, head_norms, epsilon, cosine, sine, scale, slot, keys, values) -> None:  # type: ignore[no-untyped-def]
    """One token: `qkv` `[heads + 2 · kv_heads, head_dim]` in place, and its slot in the cache."""
    num_kv_heads, block_size = keys.shape[1], keys.shape[2]
    num_heads = qkv.shape[0] - 2 * num_kv_heads
    block, offset = slot // block_size, slot % block_size
    one = np.float32(1.0)
    for head in range(num_heads):
        if head_norms.size:
            rms_norm_row(qkv[head], head_norms[0], epsilon, qkv[head])
        _rotate(qkv[head], cosine, sine, scale, qkv[head])
    for head in range(num_kv_heads):
        key = qkv[num_heads + head]
        if head_norms.size:
            rms_norm_row(key, head_norms[1], epsilon, key)
        _rotate(key, cosine, sine, one, keys[block, head, offset])
        value = qkv[num_heads + num_kv_heads + head]
        for i in range(value.shape[0]):
            values[block, head, offset, i] = value[i]


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _store_parallel(  # type: ignore[no-untyped-def]
    qkv, head_norms, epsilon, cosines, sines, positions, scale, slots, keys, values
) -> None:  # fmt: skip
    for row in prange(qkv.shape[0]):
        position = positions[row]
        _store_row(
            qkv[row], head_norms, epsilon, cosines[position], sines[position], scale,
            slots[row], keys, values,
        )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_and_store(
    qkv: np.ndarray, head_norms: np.ndarray, epsilon: np.float32, cosines: np.ndarray,
    sines: np.ndarray, positions: np.ndarray, scale: np.float32, slots: np.ndarray,
    keys: np.ndarray, values: np.ndarray,
) -> None:  # fmt: skip
    """Make queries ready for attention in place, and put keys and values into their slots.

    `qkv` is `[rows, heads + 2 · kv_heads, head_dim]`; `head_norms` `[2, head_dim]` (query, key) or
    empty; `cosines` and `sines` `[max_len, head_dim / 2]`. Queries come out multiplied by `scale`.
    """
    if qkv.shape[0] > _SERIAL_ROWS:
        _store_parallel(
            qkv, head_norms, epsilon, cosines, sines, positions, scale, slots, keys, values
        )
        return
    for row in range(qkv.shape[0]):
        position = positions[row]
        _store_row(
            qkv[row], head_norms, epsilon, cosines[position], sines[position], scale,
            slots[row], keys, values,
        )  # fmt: skip
