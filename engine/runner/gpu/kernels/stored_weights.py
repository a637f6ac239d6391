"""How a product reads weights, by the form in which they are stored.

    BF16   [outputs, inputs]; the sum is one chain over all inputs.
    FP8    e4m3 [outputs, inputs], one float32 scale for each 128 x 128 weights.
    INT4   [outputs, inputs / 2] bytes: of each group of 128 inputs, 64 bytes with input j in the
           low half of byte j and input 64 + j in the high half, each 0 to 15 for -8 to 7; one
           bfloat16 scale for each output and group.

Quantised weights are exact in bfloat16, so their products are exact up to the matrix unit's own
rounding. The scale multiplies the sum of a group of 128 inputs: one multiplication for each
accumulator and group, where scaling the weights would cost one for each weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

BF16: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)
GROUP_INPUTS: tl.constexpr = tl.constexpr(128)


@triton.constexpr_function
def row_elements(num_inputs, form):
    """Return the stored elements of an output's weights."""
    return num_inputs // 2 if form == 2 else num_inputs


@triton.constexpr_function
def step_inputs(depth, form):
    """Return how many inputs `accumulate` takes at once, of the `depth` that are read ahead."""
    return depth if form == 0 else 128


@triton.jit
def load_inputs(x_rows, is_row, start, BK: tl.constexpr, FORM: tl.constexpr):
    """Return BK inputs of each row [BM, BK]; for INT4, those of the low and of the high halves."""
    if FORM == INT4:
        k = tl.arange(0, BK // 2)[None, :]
        first = tl.load(x_rows + start + k, mask=is_row, other=0.0)
        second = tl.load(x_rows + start + BK // 2 + k, mask=is_row, other=0.0)
    else:
        first = tl.load(x_rows + start + tl.arange(0, BK)[None, :], mask=is_row, other=0.0)
        second = first
    return first, second


@triton.jit
def accumulate(total, first, second, weights, scales, sources, start, K: tl.constexpr,
               BK: tl.constexpr, FORM: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Add to `total` [BN, BM] the products of BK inputs, of one group where weights have groups."""
    wide = sources[:, None].to(tl.int64)
    group = start // GROUP_INPUTS
    if FORM == BF16:
        stored = tl.load(weights + wide * K + start + tl.arange(0, BK)[None, :])
        total = tl.dot(stored, tl.trans(first), total)
    elif FORM == FP8:
        stored = tl.load(weights + wide * K + start + tl.arange(0, BK)[None, :])
        scale = tl.load(scales + sources // GROUP_INPUTS * (K // GROUP_INPUTS) + group)
        total += tl.dot(stored.to(first.dtype), tl.trans(first)) * scale[:, None]
    else:
        half = tl.arange(0, BK // 2)[None, :]
        low, high = _halves(tl.load(weights + wide * (K // 2) + start // 2 + half), HAS_PTX)
        scale = tl.load(scales + sources * (K // GROUP_INPUTS) + group).to(tl.float32)
        part = tl.dot(low, tl.trans(first))
        part = tl.dot(high, tl.trans(second), part)
        total += part * scale[:, None]
    return total


@triton.jit
def _halves(stored, HAS_PTX: tl.constexpr):
    """Return the low and the high halves of bytes as bfloat16 numbers from -8 to 7.

    In PTX four bytes at once: a byte is placed behind 0x43, which is 128 + n in bfloat16 (7 bits
    of fraction, of which n fills the low four), and 136 is subtracted, which is exact.
    """
    if HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, one, minus;
            mov.b32 one, 0x3f803f80; mov.b32 minus, 0xc308c308;
            and.b32 l, $4, 0x0f0f0f0f; shr.u32 h, $4, 4; and.b32 h, h, 0x0f0f0f0f;
            prmt.b32 $0, l, 0x43434343, 0x4140; prmt.b32 $1, l, 0x43434343, 0x4342;
            prmt.b32 $2, h, 0x43434343, 0x4140; prmt.b32 $3, h, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, minus; fma.rn.bf16x2 $1, $1, one, minus;
            fma.rn.bf16x2 $2, $2, one, minus; fma.rn.bf16x2 $3, $3, one, minus;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [stored],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((stored & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        high = ((stored >> 4).to(tl.float32) - 8.0).to(tl.bfloat16)
    return low, high
