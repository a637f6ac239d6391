"""Quantised weights as products read them: one strip of 128 inputs at a time.

    FP8    [outputs, inputs / 2] words of 16 bits: of each strip of 128 inputs, 64 words with input
           j in the low byte of word j and input 64 + j in the high byte, both e4m3; one float32
           scale for each 128 x 128 weights.
    INT4   [outputs, inputs / 4] words of 16 bits: of each strip, 32 words with the inputs j,
           32 + j, 64 + j and 96 + j in word j, the first in the lowest four bits, each 0 to 15 for
           -8 to 7; one bfloat16 scale for each output and strip.
    Q4_0   the words of INT4; four float16 scales for each output and strip, of 32 inputs each,
           the first in the lowest 16 of 64 bits.
    Q8_0   [outputs, inputs / 2] words of 16 bits: of each strip, 32 words with input j in the low
           byte of word j and input 32 + j in the high byte, then 32 with 64 + j and 96 + j, all
           int8; the scales of Q4_0.
    MXFP4  the words of INT4, each part a number in e2m1; four bytes for each output and strip, the
           scales of 32 inputs each, the first in the lowest of 32 bits: 2**(n - 127); 255 is NaN.

The last strip of Q4_0, Q8_0 and MXFP4 may have fewer inputs: it holds anything finite behind them,
and the rows that it is multiplied with are 0 there.

A word's parts are operands of their own, 64 or 32 inputs that follow each other. So a matrix
instruction multiplies 16 inputs that follow each other in every tile: for operands that are read in
elements narrower than 16 bits the compiler gives `mma.sync` other 16 inputs than `wgmma`, and few
results in a million differ.

Quantised weights are exact in bfloat16, so their products are exact up to the matrix unit's own
rounding. Inputs that share a scale are a group, of 128 or of 32. The scale multiplies the sum of a
group: one multiplication for each accumulator and group, where scaling the weights would cost one
for each weight. A scale of MXFP4 is a power of two, so that this product is exact too.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)
Q4_0: tl.constexpr = tl.constexpr(3)
Q8_0: tl.constexpr = tl.constexpr(4)
MXFP4: tl.constexpr = tl.constexpr(5)
STRIP_INPUTS: tl.constexpr = tl.constexpr(128)


@triton.constexpr_function
def row_words(num_inputs, form):
    """Return the words that hold an output's weights."""
    return num_strips(num_inputs) * (64 if form in (1, 4) else 32)


@triton.constexpr_function
def num_strips(num_inputs):
    """Return the strips that hold so many inputs."""
    return (num_inputs + 127) // 128


@triton.jit
def add_strip(total, places, inputs, is_row, scale, left, FORM: tl.constexpr,
              HAS_PTX: tl.constexpr, IS_BATCH: tl.constexpr):  # fmt: skip
    """Return `total` [.., BN, BM] and the products of one strip, group after group.

    `places` [.., BN, 1] and `inputs` [.., BM, 1] are addresses of the strip's begin, `scale`
    [.., BN] has its scales. `left` [.., 1, 1] is how many inputs there are from there on; None: the
    strip is whole.
    """
    if FORM == FP8:
        low, high = _bytes(tl.load(places + _lanes(64, IS_BATCH)), HAS_PTX)
        part = tl.dot(low, _columns(inputs, is_row, left, 0, 64, IS_BATCH))
        part = tl.dot(high, _columns(inputs, is_row, left, 64, 64, IS_BATCH), part)
        total += part * _wide(scale.to(tl.float32), IS_BATCH)
    elif FORM == INT4:
        first, second, third, fourth = _nibbles(tl.load(places + _lanes(32, IS_BATCH)), HAS_PTX)
        part = tl.dot(first, _columns(inputs, is_row, left, 0, 32, IS_BATCH))
        part = tl.dot(second, _columns(inputs, is_row, left, 32, 32, IS_BATCH), part)
        part = tl.dot(third, _columns(inputs, is_row, left, 64, 32, IS_BATCH), part)
        part = tl.dot(fourth, _columns(inputs, is_row, left, 96, 32, IS_BATCH), part)
        total += part * _wide(scale.to(tl.float32), IS_BATCH)
    else:
        if FORM == Q4_0:
            first, second, third, fourth = _nibbles(tl.load(places + _lanes(32, IS_BATCH)), HAS_PTX)
        elif FORM == MXFP4:
            words = tl.load(places + _lanes(32, IS_BATCH))
            first, second, third, fourth = _small_floats(words, HAS_PTX)
        else:
            first, second = _integers(tl.load(places + _lanes(32, IS_BATCH)), HAS_PTX)
            third, fourth = _integers(tl.load(places + 32 + _lanes(32, IS_BATCH)), HAS_PTX)
        part = tl.dot(first, _columns(inputs, is_row, left, 0, 32, IS_BATCH))
        total += part * _wide(_group_scale(scale, 0, FORM), IS_BATCH)
        part = tl.dot(second, _columns(inputs, is_row, left, 32, 32, IS_BATCH))
        total += part * _wide(_group_scale(scale, 1, FORM), IS_BATCH)
        part = tl.dot(third, _columns(inputs, is_row, left, 64, 32, IS_BATCH))
        total += part * _wide(_group_scale(scale, 2, FORM), IS_BATCH)
        part = tl.dot(fourth, _columns(inputs, is_row, left, 96, 32, IS_BATCH))
        total += part * _wide(_group_scale(scale, 3, FORM), IS_BATCH)
    return total


@triton.jit
def _group_scale(scales, PLACE: tl.constexpr, FORM: tl.constexpr):
    """Return one of the four scales in words: float16 in 64 bits, or e8m0 in 32, as float32."""
    if FORM == MXFP4:
        exponent = (scales >> (8 * PLACE) & 255).to(tl.int32)
        # The exponent 0 of float32 is that of numbers below 2**-126, and 255 is infinite.
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        halves = (scales >> (16 * PLACE)).to(tl.uint16)
        scale = halves.to(tl.float16, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def _wide(scale, IS_BATCH: tl.constexpr):
    """Return scales [.., BN] for sums [.., BN, BM]."""
    return scale[:, :, None] if IS_BATCH else scale[:, None]


@triton.jit
def scale_places(scales, sources, K: tl.constexpr, FORM: tl.constexpr):
    """Return the address of the first scale of each output."""
    if FORM == FP8:
        places = scales + sources // STRIP_INPUTS * num_strips(K)
    else:
        places = scales + sources * num_strips(K)
    return places


@triton.jit
def _lanes(COUNT: tl.constexpr, IS_BATCH: tl.constexpr):
    """Return 0 .. COUNT - 1 along the last axis."""
    return tl.arange(0, COUNT)[None, None, :] if IS_BATCH else tl.arange(0, COUNT)[None, :]


@triton.jit
def _columns(inputs, is_row, left, FIRST: tl.constexpr, COUNT: tl.constexpr,
             IS_BATCH: tl.constexpr):  # fmt: skip
    """Return COUNT inputs of each row, [.., COUNT, BM]; 0 where there are none."""
    lanes = FIRST + _lanes(COUNT, IS_BATCH)
    if left is not None:
        is_row = is_row & (lanes < left)
    rows = tl.load(inputs + lanes, mask=is_row, other=0.0)
    return tl.permute(rows, (0, 2, 1)) if IS_BATCH else tl.trans(rows)


@triton.jit
def _bytes(words, HAS_PTX: tl.constexpr):
    """Return the low and the high bytes of words, e4m3, as bfloat16.

    In PTX by shifts, two words at once: 0.EEEE.MMM << 4 is the number times 2**-120.
    """
    if HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, zero, up;
            mov.b32 zero, 0x80008000; mov.b32 up, 0x7b807b80;
            shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; and.b32 b, $2, 0x80008000;
            shl.b32 c, $2, 4; shr.u32 d, $2, 4;
            lop3.b32 a, c, 0x07f007f0, a, 0xea; lop3.b32 b, d, 0x07f007f0, b, 0xea;
            fma.rn.bf16x2 $0, a, up, zero; fma.rn.bf16x2 $1, b, up, zero;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return low, high


@triton.jit
def _integers(words, HAS_PTX: tl.constexpr):
    """Return the low and the high bytes of words, int8, as bfloat16.

    In PTX two words at once: 0x4300 | n is 128 + n for the lowest seven bits, and with the eighth
    256, which is subtracted instead of 128.
    """
    if HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, up, minus;
            mov.b32 minus, 0xbf80bf80;
            shr.u32 up, $2, 8;
            lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
            lop3.b32 c, up, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 d, up, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, minus, a; fma.rn.bf16x2 $1, d, minus, c;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (words & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32).to(tl.bfloat16)
        high = (words >> 8).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32).to(tl.bfloat16)
    return low, high


@triton.jit
def _nibbles(words, HAS_PTX: tl.constexpr):
    """Return the four parts of words, as bfloat16 numbers from -8 to 7.

    In PTX two words at once: 0x4300 | n is 128 + n, from which 136 is subtracted, which is exact.
    """
    if HAS_PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, minus;
            mov.b32 one, 0x3f803f80; mov.b32 minus, 0xc308c308;
            shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12;
            lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, minus; fma.rn.bf16x2 $1, b, one, minus;
            fma.rn.bf16x2 $2, c, one, minus; fma.rn.bf16x2 $3, d, one, minus;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        first = ((words & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        second = ((words >> 4 & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        third = ((words >> 8 & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        fourth = ((words >> 12).to(tl.float32) - 8.0).to(tl.bfloat16)
    return first, second, third, fourth


@triton.jit
def _small_floats(words, HAS_PTX: tl.constexpr):
    """Return the four parts of words, e2m1, as bfloat16.

    The three bits of exponent and fraction, shifted, are the bits of the number times 2**-126. In
    PTX two words at once.
    """
    if HAS_PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, s, zero, up;
            mov.b32 zero, 0x80008000; mov.b32 up, 0x7e807e80;
            shl.b32 s, $4, 12; and.b32 s, s, zero;
            shl.b32 a, $4, 6; lop3.b32 a, a, 0x01c001c0, s, 0xea;
            shl.b32 s, $4, 8; and.b32 s, s, zero;
            shl.b32 b, $4, 2; lop3.b32 b, b, 0x01c001c0, s, 0xea;
            shl.b32 s, $4, 4; and.b32 s, s, zero;
            shr.u32 c, $4, 2; lop3.b32 c, c, 0x01c001c0, s, 0xea;
            and.b32 s, $4, zero;
            shr.u32 d, $4, 6; lop3.b32 d, d, 0x01c001c0, s, 0xea;
            fma.rn.bf16x2 $0, a, up, zero; fma.rn.bf16x2 $1, b, up, zero;
            fma.rn.bf16x2 $2, c, up, zero; fma.rn.bf16x2 $3, d, up, zero;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        first, second = _small_float(words), _small_float(words >> 4)
        third, fourth = _small_float(words >> 8), _small_float(words >> 12)
    return first, second, third, fourth


@triton.jit
def _small_float(words):
    """Return the lowest four bits of words, e2m1, as bfloat16."""
    bits = ((words & 7) << 6 | (words & 8) << 12).to(tl.uint16)
    number = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    return (number * 8.507059173023462e37).to(tl.bfloat16)  # 2**126
