"""The step between projection and attention: head norms, rotary positions, writing the KV cache."""

from __future__ import annotations

from numba import njit

from engine.runner.kernels.kv_slots import item_bytes, slot_at, store_slot
from engine.runner.kernels.norms import ROWS_PER_SHARE, rms_norm_row
from engine.runner.kernels.team import claim, finish, wait_for_all


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate(head, cosine, sine, scales, out) -> None:  # type: ignore[no-untyped-def]
    """Rotate the pairs (i, i + half) of `head` by one position's angles, times their `scales`."""
    half = head.shape[0] // 2
    for i in range(half):
        low, high = head[i], head[half + i]
        out[i] = (low * cosine[i] - high * sine[i]) * scales[i]
        out[half + i] = (high * cosine[i] + low * sine[i]) * scales[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _store_row(qkv, head_norms, epsilon, cosine, sine, scales, slot, keys, values) -> None:  # type: ignore[no-untyped-def]
    """Prepare one token: `qkv` `[heads + 2 · kv_heads, head_dim]` in place, and its cache slots."""
    num_kv_heads, block_size, head_dim = keys.shape[1], keys.shape[2], qkv.shape[1]
    num_heads = qkv.shape[0] - 2 * num_kv_heads
    block, offset = slot // block_size, slot % block_size
    kind = item_bytes(keys.shape[3], head_dim)
    group = num_heads // num_kv_heads
    for head in range(num_heads):
        if head_norms.size:
            rms_norm_row(qkv[head], head_norms[0], epsilon, qkv[head])
        _rotate(qkv[head], cosine, sine, scales[0, head // group], qkv[head])
    for head in range(num_kv_heads):
        key = qkv[num_heads + head]
        if head_norms.size:
            rms_norm_row(key, head_norms[1], epsilon, key)
        _rotate(key, cosine, sine, scales[1, head], key)
        value = qkv[num_heads + num_kv_heads + head]
        store_slot(key.ctypes.data, slot_at(keys, block, head, offset), head_dim, kind)
        store_slot(value.ctypes.data, slot_at(values, block, head, offset), head_dim, kind)


@njit(nogil=True, cache=True, error_model="numpy")
def rotary_phase(  # type: ignore[no-untyped-def]
    counters, qkv, head_norms, epsilon, cosines, sines, positions, scales, slots, keys, values
) -> None:
    """Prepare a team's queries for attention in place, and write keys and values to their slots.

    `qkv` is `[rows, heads + 2 · kv_heads, head_dim]`; `head_norms` `[2, head_dim]` (query, key) or
    empty; `cosines` and `sines` `[max_len, head_dim / 2]`; `keys` and `values` one layer's bytes
    (`kv_slots`). Rotated queries and keys are multiplied by `scales` `[2, kv_heads, head_dim / 2]`
    (query, key).
    """
    num_rows = qkv.shape[0]
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(counters)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            position = positions[row]
            _store_row(
                qkv[row], head_norms, epsilon, cosines[position], sines[position], scales,
                slots[row], keys, values,
            )  # fmt: skip
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)
