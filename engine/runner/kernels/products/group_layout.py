"""How panels of quantised weights lie in memory, and how vectors of them are widened.

A panel has sixteen outputs. Its inputs come in groups; a group's record has the sixteen outputs'
scales, then their numbers. Of a grouped format (Q4_0 to MXFP4) a group is 32 inputs, and the
record:

    scales    16 float16 steps (and 16 float16 minima); K formats: 16 bytes of steps, 16 of minima
              (Q6_K: 16 and 16 signed bytes of steps, for either half of the group); MXFP4: 16
              bytes, n is the step 2^(n - 128), and 255 is NaN
    low bits  4 vectors of sixteen 32-bit lanes, a lane is an output: byte j of vector g has input
              8 g + j in its low four bits, input 8 g + 4 + j in the high ones
    high bits Q5: one vector, bit t of byte j belongs to input 4 t + j; Q6: two vectors, two bits
              each. Q8_0 has no such split: 8 vectors, byte j of vector t is input 4 t + j, plus 128

MXFP4 has bits in place of numbers, which a table turns into numbers when they are read.

So four inputs of sixteen outputs are one vector of bytes, which an integer dot product takes as it
is. In front of eight groups of a K format are their 16 float16 factors of the steps, and those of
the minima. A group of F16 and BF16 is sixteen inputs of sixteen 2-byte numbers; of F32, four.

Widening rounds as `stored_formats.dequantise` does: steps times number is exact in float32 for
every format (at most 23 bits), so the sum with the minimum may be one fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from engine.runner.kernels.products.byte_lookup import emit_lookup
from engine.runner.kernels.vector_ir import (
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    int_constant,
    vector_at,
)

GROUP = 32
"""Inputs of a group of a grouped format."""
NUM_VECTORS = 8
"""Vectors of four inputs in such a group."""
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_VECTOR_BYTES = 64
_MAGIC_23, _MAGIC_15 = 0x4B000000, 0x47000000
"""2^23 and 2^15 as floats: a byte in their bits 0 and 8 is added to them."""
_MXFP4_NUMBERS = (16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4)
"""Twice the numbers of MXFP4 (0, 0.5, 1, 1.5, 2, 3, 4, 6, and the negative ones), plus 16."""


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """One format's panels. `bits` is 16 or 32 for formats without groups.

    `offset` is what a stored number has too much. A K format has `header` bytes in front of every
    eight groups. With `numbers`, one for each choice of four bits, the bits stand for these, and
    steps are powers of two.
    """

    name: str
    bits: int
    offset: int = 0
    scale_bytes: int = 0
    header: int = 0
    has_minima: bool = False
    numbers: tuple[int, ...] = ()

    @property
    def is_grouped(self) -> bool:
        """Whether the format has scales, so that int8 activations can be multiplied with it."""
        return self.bits <= 8

    @property
    def largest(self) -> int:
        """The largest stored number of a grouped format."""
        return max(self.numbers, default=2**self.bits - 1)

    @property
    def inputs(self) -> int:
        """Inputs of a group."""
        return GROUP if self.is_grouped else 16 if self.bits == 16 else 4

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's record."""
        return self.scale_bytes + self.inputs * LANES * self.bits // 8

    @property
    def steps(self) -> int:
        """Vectors of steps of a group."""
        return 2 if self.bits == 6 else 1

    def panel_bytes(self, depth: int) -> int:
        """Bytes of a panel of `depth` inputs."""
        groups = depth // self.inputs
        return groups * self.group_bytes + (groups // 8 * self.header)


LAYOUTS = (
    PanelLayout("F32", 32),
    PanelLayout("F16", 16),
    PanelLayout("BF16", 16),
    PanelLayout("Q4_0", 4, 8, 32),
    PanelLayout("Q4_1", 4, 0, 64, has_minima=True),
    PanelLayout("Q5_0", 5, 16, 32),
    PanelLayout("Q5_1", 5, 0, 64, has_minima=True),
    PanelLayout("Q8_0", 8, 128, 32),
    PanelLayout("Q4_K", 4, 0, 32, 64, has_minima=True),
    PanelLayout("Q5_K", 5, 0, 32, 64, has_minima=True),
    PanelLayout("Q6_K", 6, 32, 32, 32),
    PanelLayout("MXFP4", 4, 16, 16, numbers=_MXFP4_NUMBERS),
)
CODES = {layout.name: code for code, layout in enumerate(LAYOUTS)}
"""A format's number, by which compiled code knows it."""


@dataclass(frozen=True, slots=True)
class GroupAt:
    """The addresses of a group's record, and of the header in front of it."""

    header: Any
    record: Any


def group_at(builder: Any, layout: PanelLayout, panel: Any, index: Any) -> GroupAt:
    """Emit the addresses of group `index` of the panel at `panel`."""
    size = INT64(layout.group_bytes)
    if not layout.header:
        return GroupAt(None, builder.add(panel, builder.mul(index, size)))
    super_bytes = INT64(layout.header + 8 * layout.group_bytes)
    number = builder.lshr(index, INT64(3))
    header = builder.add(panel, builder.mul(number, super_bytes))
    within = builder.mul(builder.and_(index, INT64(7)), size)
    return GroupAt(header, builder.add(builder.add(header, INT64(layout.header)), within))


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    pointer = vector_at(builder, builder.add(address, INT64(offset)), kind)
    return builder.load(pointer, align=16)


def _halves_at(builder: Any, address: Any, offset: int) -> Any:
    return builder.fpext(_load(builder, address, offset, _HALVES), VECTOR)


def _bytes_at(builder: Any, address: Any, offset: int, *, is_signed: bool) -> Any:
    stored = _load(builder, address, offset, _BYTES)
    if is_signed:
        return builder.sitofp(builder.sext(stored, INT_VECTOR), VECTOR)
    return builder.sitofp(builder.zext(stored, INT_VECTOR), VECTOR)


def _powers_at(builder: Any, address: Any) -> Any:
    """Emit 2^(n - 128) for the sixteen bytes n at `address`; 255 is NaN.

    The bits of the first two, subnormal floats, are (n + 1) · 2^21. For others this is the smaller
    one of two integers, and (n - 1) · 2^23 the bits.
    """
    stored = builder.zext(_load(builder, address, 0, _BYTES), INT_VECTOR)
    shifted = builder.shl(stored, int_constant(21))
    small = builder.add(shifted, int_constant(1 << 21))
    normal = builder.sub(builder.shl(shifted, int_constant(2)), int_constant(1 << 23))
    is_normal = builder.icmp_signed(">", normal, small)
    bits = builder.select(is_normal, normal, small)
    is_nan = builder.icmp_unsigned("==", stored, int_constant(255))
    return builder.bitcast(builder.or_(bits, builder.sext(is_nan, INT_VECTOR)), VECTOR)


def emit_scales(builder: Any, layout: PanelLayout, group: GroupAt) -> tuple[list[Any], Any]:
    """Emit a group's steps, one vector or two, and its minima, None if it has none."""
    record, header = group.record, group.header
    if layout.numbers:
        return [_powers_at(builder, record)], None
    if not layout.header:
        steps = [_halves_at(builder, record, 0)]
        return steps, _halves_at(builder, record, 32) if layout.has_minima else None
    factor = _halves_at(builder, header, 0)
    if layout.steps == 2:
        parts = [_bytes_at(builder, record, at, is_signed=True) for at in (0, LANES)]
        return [builder.fmul(factor, part) for part in parts], None
    steps = [builder.fmul(factor, _bytes_at(builder, record, 0, is_signed=False))]
    minima_factor = _halves_at(builder, header, 32)
    minima = builder.fmul(minima_factor, _bytes_at(builder, record, LANES, is_signed=False))
    return steps, builder.fneg(minima)


def _shifted(builder: Any, vector: Any, left: int) -> Any:
    """Emit `vector << left`, or to the right if negative."""
    if left == 0:
        return vector
    if left > 0:
        return builder.shl(vector, int_constant(left))
    return builder.lshr(vector, int_constant(-left))


def emit_vectors(builder: Any, layout: PanelLayout, group: GroupAt) -> Iterator[Any]:
    """Emit the group's eight vectors of bytes one by one; byte j of vector t is input 4 t + j."""
    start = layout.scale_bytes
    if layout.bits == 8:
        for t in range(NUM_VECTORS):
            yield _load(builder, group.record, start + t * _VECTOR_BYTES, INT_VECTOR)
        return
    highs_at = start + 4 * _VECTOR_BYTES
    num_highs = layout.bits - 4
    highs = [
        _load(builder, group.record, highs_at + n * _VECTOR_BYTES, INT_VECTOR)
        for n in range(num_highs)
    ]
    nibble = int_constant(0x0F0F0F0F)
    low = None
    for t in range(NUM_VECTORS):
        if t % 2 == 0:
            low = _load(builder, group.record, start + t // 2 * _VECTOR_BYTES, INT_VECTOR)
            vector = builder.and_(low, nibble)
        else:
            vector = builder.and_(_shifted(builder, low, -4), nibble)
        if num_highs == 1:
            high = builder.and_(_shifted(builder, highs[0], 4 - t), int_constant(0x10101010))
            vector = builder.or_(vector, high)
        elif num_highs == 2:
            shifted = _shifted(builder, highs[t // 4], 4 - 2 * (t % 4))
            vector = builder.or_(vector, builder.and_(shifted, int_constant(0x30303030)))
        yield emit_lookup(builder, layout.numbers, vector) if layout.numbers else vector


def _emit_numbers(builder: Any, vector: Any, offset: int) -> Iterator[Any]:
    """Emit the four bytes of every lane as floats less `offset`, exactly.

    A byte becomes the low bits of a large float, from which that float and `offset` are subtracted.
    """
    for half in range(2):
        part = _shifted(builder, vector, -16 * half)
        for mask, magic, power in ((0xFF, _MAGIC_23, 2.0**23), (0xFF00, _MAGIC_15, 2.0**15)):
            bits = builder.or_(builder.and_(part, int_constant(mask)), int_constant(magic))
            yield builder.fsub(builder.bitcast(bits, VECTOR), constant(power + offset))


def _emit_short(builder: Any, layout: PanelLayout, address: Any, offset: int) -> Any:
    if layout.name == "F16":
        return _halves_at(builder, address, offset)
    stored = builder.zext(_load(builder, address, offset, _SHORTS), INT_VECTOR)
    return builder.bitcast(builder.shl(stored, int_constant(16)), VECTOR)


def emit_weights(builder: Any, layout: PanelLayout, group: GroupAt) -> Iterator[Any]:
    """Emit a group's weights as floats, a vector of sixteen outputs for each input in order."""
    if layout.bits == 32:
        for k in range(layout.inputs):
            yield _load(builder, group.record, k * _VECTOR_BYTES, VECTOR)
        return
    if layout.bits == 16:
        for k in range(layout.inputs):
            yield _emit_short(builder, layout, group.record, k * 2 * LANES)
        return
    fma = declare_fma(builder)
    steps, minima = emit_scales(builder, layout, group)
    for t, vector in enumerate(emit_vectors(builder, layout, group)):
        step = steps[t * layout.steps // NUM_VECTORS]
        for number in _emit_numbers(builder, vector, layout.offset):
            if minima is None:
                yield builder.fmul(number, step)
            else:
                yield builder.call(fma, [number, step, minima])
