"""Keys and values in the cache: the stored form of a token in a head, written and read.

    bfloat16   a head of a block is [BLOCK, DIM] numbers
    int8       it is [BLOCK, DIM / 2] words of 16 bits, with number j in the low byte of word j and
               number DIM / 2 + j in the high byte, followed by [BLOCK] scales, float32

A byte stands for byte * scale. Bytes and scales of the same floats are equal to the CPU's
(`runner/kernels/kv_slots.py`); only their order in a block differs. A word's bytes are operands of
their own: of operands that are read in elements narrower than 16 bits, or joined, `mma.sync` would
multiply other 16 inputs than `wgmma` (`kernels/stored_weights.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST: tl.constexpr = tl.constexpr(2.0**-100)
"""A slot whose largest magnitude is smaller becomes zeros: 127 / magnitude may be infinite."""
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum has no fraction


@triton.jit
def load_slots(cache, scales, head, place, is_slot, kind: tl.constexpr, BLOCK: tl.constexpr,
               DIM: tl.constexpr, HAS_SCALES: tl.constexpr):  # fmt: skip
    """Return numbers of a head of a block, as `kind`, and the scales of their slots.

    Numbers of bfloat16 are [slots, DIM], without scales; of bytes two halves [slots, DIM / 2].
    `head` is block * KV heads + head; where `is_slot` is false, all are 0; None: all are slots.
    """
    if HAS_SCALES:
        HALF: tl.constexpr = DIM // 2
        words = head * (BLOCK * (DIM + 4) // 2) + place * HALF
        places = cache + (words[:, None] + tl.arange(0, HALF)[None, :])
        own = scales + (head * (BLOCK * (DIM + 4) // 4) + BLOCK * DIM // 4 + place)
        if is_slot is None:
            word = tl.load(places)
            scale = tl.load(own)
        else:
            word = tl.load(places, mask=is_slot[:, None], other=0)
            scale = tl.load(own, mask=is_slot, other=0.0)
        numbers = ((word << 8) >> 8).to(tl.float32).to(kind)
        others = (word >> 8).to(tl.float32).to(kind)
    else:
        rows = head * BLOCK + place
        places = cache + (rows[:, None] * DIM + tl.arange(0, DIM)[None, :])
        others = 0.0
        scale = 0.0
        if is_slot is None:
            numbers = tl.load(places)
        else:
            numbers = tl.load(places, mask=is_slot[:, None], other=0.0)
    return numbers, others, scale


@triton.jit
def store_slots(cache, scales, head, place, is_slot, low, high, BLOCK: tl.constexpr,
                DIM: tl.constexpr, HAS_SCALES: tl.constexpr):  # fmt: skip
    """Write float32 rows, the first halves of their numbers and the second ones, [rows, DIM / 2].

    `head` and `place`, the offset in the block, are of each row; where `is_slot` is false, nothing
    is written.
    """
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, HALF)[None, :]
    if HAS_SCALES:
        most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        num_broken = tl.sum((~(tl.abs(low) < float("inf"))).to(tl.int32), 1)
        num_broken += tl.sum((~(tl.abs(high) < float("inf"))).to(tl.int32), 1)
        is_broken = num_broken > 0
        is_zero = most < _LEAST
        usable = tl.where(is_broken | is_zero, 1.0, most)
        largest = tl.full(usable.shape, 127.0, tl.float32)
        scale = tl.where(is_zero, 0.0, tl.math.div_rn(usable, largest))
        factor = tl.where(is_zero, 0.0, tl.math.div_rn(largest, usable))
        word = (_bytes(high, factor, is_broken) << 8) | (_bytes(low, factor, is_broken) & 255)
        at = cache + (head * (BLOCK * (DIM + 4) // 2) + place * HALF)[:, None] + lane
        own = scales + head * (BLOCK * (DIM + 4) // 4) + BLOCK * DIM // 4 + place
        tl.store(at, word, mask=is_slot[:, None])
        tl.store(own, tl.where(is_broken, float("nan"), scale), mask=is_slot)
    else:
        kind = cache.dtype.element_ty
        at = cache + (head * BLOCK + place)[:, None] * DIM + lane
        tl.store(at, low.to(kind), mask=is_slot[:, None])
        tl.store(at + HALF, high.to(kind), mask=is_slot[:, None])


@triton.jit
def _bytes(values, factor, is_broken):
    """Return the nearest integers of the products, ties to even."""
    usable = tl.where(is_broken[:, None], 0.0, values)
    return ((usable * factor[:, None] + _ROUNDER) - _ROUNDER).to(tl.int16)
