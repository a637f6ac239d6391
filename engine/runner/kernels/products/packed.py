"""Matrices of any stored format as panels in one piece of memory, and their tables for the kernels.

The piece has no addresses in it, and the same matrices always give the same bytes, so it can be a
mapped file that several processes read. `group_layout` describes a panel; missing outputs of a
matrix's last panel are zeros. A matrix begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runner.kernels.products.byte_product import byte_kernel
from engine.runner.kernels.products.group_layout import (
    CODES,
    GROUP,
    LAYOUTS,
    NUM_VECTORS,
    PanelLayout,
)
from engine.runner.kernels.products.group_product import (
    FEW_ROWS,
    few_rows_kernel,
    widening_kernel,
)
from engine.runner.kernels.products.linear import (
    BYTES,
    DEPTH,
    DIRECT,
    DIRECT_ROWS,
    FIELDS,
    FINE,
    FLOATS,
    OUTPUTS,
    PANEL_BYTES,
    PANELS,
    WIDEN,
)
from engine.runner.kernels.products.panel_product import float_kernel
from engine.runner.kernels.vector_ir import LANES
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor

Bytes = np.ndarray
FormatAndShape = tuple[str, tuple[int, int]]
_ALIGNMENT_BYTES = 64
_ANY_ROWS = 1 << 40
_PART_PANELS = 64
"""Panels that are packed at a time: temporary arrays stay in the cache."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Matrices with equal inputs in `data`, and their `table`, int64 `[matrices, FIELDS]`.

    The table is of this process alone: it has addresses of `data` and of compiled kernels.
    """

    data: Bytes
    table: NDArray[np.int64]


def _layout(format_name: str) -> PanelLayout:
    return LAYOUTS[CODES[format_name]]


def _matrix_bytes(format_name: str, shape: tuple[int, int]) -> int:
    num_outputs, num_inputs = shape
    size = -(-num_outputs // LANES) * _layout(format_name).panel_bytes(num_inputs)
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def packed_bytes(formats_and_shapes: Sequence[FormatAndShape]) -> int:
    """Return the bytes of these matrices side by side; a shape is (outputs, inputs)."""
    return sum(_matrix_bytes(*each) for each in formats_and_shapes)


def pack_into(tensors: Iterable[GroupedTensor], out: Bytes) -> None:
    """Write the matrices' panels to `out`, `packed_bytes` long; each is taken when it is due."""
    start = 0
    for tensor in tensors:
        size = _matrix_bytes(tensor.format, tensor.shape)
        _pack(tensor, out[start : start + size])
        start += size


def packed_view(
    formats_and_shapes: Sequence[FormatAndShape],
    data: Bytes,
    *,
    with_bytes: bool,
    is_fine: bool,
) -> PackedWeight:
    """Return what `pack_into` wrote for the kernels; `data` begins at a multiple of 64 bytes.

    Compiles the kernels of these formats, or loads them. `with_bytes` chooses int8 activations,
    unless one of the matrices has no groups, and `is_fine` those with a step for 16 values.
    """
    table = np.zeros((len(formats_and_shapes), FIELDS), np.int64)
    with_bytes = with_bytes and all(_layout(name).is_grouped for name, _ in formats_and_shapes)
    start = 0
    for row, (name, shape) in zip(table, formats_and_shapes, strict=True):
        row[PANELS] = data.ctypes.data + start
        row[PANEL_BYTES] = _layout(name).panel_bytes(shape[1])
        row[OUTPUTS], row[DEPTH] = shape
        _choose_kernels(row, name, with_bytes, is_fine)
        start += _matrix_bytes(name, shape)
    return PackedWeight(data, table)


def _choose_kernels(row: NDArray[np.int64], name: str, with_bytes: bool, is_fine: bool) -> None:
    code = CODES[name]
    row[WIDEN] = widening_kernel(code)
    if with_bytes:
        row[BYTES], row[FINE] = byte_kernel(code, is_fine=is_fine), is_fine
        return
    row[FLOATS] = float_kernel()
    if name == "F32":
        row[DIRECT], row[DIRECT_ROWS] = row[FLOATS], _ANY_ROWS
    else:
        row[DIRECT], row[DIRECT_ROWS] = few_rows_kernel(code), FEW_ROWS


def _pack(tensor: GroupedTensor, out: Bytes) -> None:
    num_outputs, num_inputs = tensor.shape
    layout = _layout(tensor.format)
    num_panels, panel_bytes = -(-num_outputs // LANES), layout.panel_bytes(num_inputs)
    panels = out[: num_panels * panel_bytes].reshape(num_panels, panel_bytes)
    for first in range(0, num_panels, _PART_PANELS):
        part = panels[first : first + _PART_PANELS]
        rows = tensor.rows[first * LANES : (first + len(part)) * LANES]
        missing = len(part) * LANES - len(rows)
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
        lanes = rows.reshape(len(part), LANES, -1)
        if layout.is_grouped:
            _pack_groups(layout, lanes, part)
        else:
            items = lanes.view(np.uint32 if layout.bits == 32 else np.uint16)
            part.view(items.dtype)[:] = items.swapaxes(1, 2).reshape(len(part), -1)


def _pack_groups(layout: PanelLayout, lanes: Bytes, out: Bytes) -> None:
    """Write the panels of stored rows `[panels, 16, row bytes]`."""
    num_panels = len(lanes)
    values, size = GROUP_SIZES[layout.name]
    stored = lanes.reshape(num_panels, LANES, -1, size)
    numbers, parts, factors = _PARTS[layout.name](stored)
    per_header = values // GROUP
    vectors = numbers.reshape(num_panels, LANES, -1, NUM_VECTORS, 4).transpose(0, 2, 3, 1, 4)
    scales = _by_item(parts, 1 if layout.header or layout.numbers else 2)
    records = np.concatenate([scales, _planes(layout, np.ascontiguousarray(vectors))], axis=2)
    target = out.reshape(num_panels, -1, layout.header + per_header * layout.group_bytes)
    if layout.header:
        target[..., : layout.header] = _by_item(factors, 2)
    target[..., layout.header :] = records.reshape(*target.shape[:2], -1)


def _by_item(stored: Bytes, item_bytes: int) -> Bytes:
    """Return `[panels, 16, groups, items · bytes]` as `[panels, groups, items · 16 · bytes]`."""
    num_panels, _, groups, size = stored.shape
    items = stored.reshape(num_panels, LANES, groups, size // item_bytes, item_bytes)
    return items.transpose(0, 2, 3, 1, 4).reshape(num_panels, groups, -1)


def _planes(layout: PanelLayout, vectors: Bytes) -> Bytes:
    """Return the bytes of groups' numbers `[panels, groups, 8, 16, 4]`, as `group_layout` says."""
    leading = vectors.shape[:2]
    if layout.bits == 8:
        return vectors.reshape(*leading, -1)
    low = vectors & 15
    planes: list[Bytes] = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
    high = vectors >> 4
    if layout.bits == 5:
        planes.append(np.packbits(high, axis=2, bitorder="little"))
    elif layout.bits == 6:
        for half in (high[:, :, :4], high[:, :, 4:]):
            planes.append(
                half[:, :, 0] | half[:, :, 1] << 2 | half[:, :, 2] << 4 | half[:, :, 3] << 6
            )
    return np.concatenate([plane.reshape(*leading, -1) for plane in planes], axis=2)


_Parts = tuple[Bytes, Bytes, Bytes]
"""Stored groups `[panels, 16, groups, bytes]` in parts: numbers `[…, values]` in unsigned bytes,
scales of each 32 inputs `[panels, 16, groups of 32, bytes]`, and the scales' factors."""


def _nibbles(stored: Bytes) -> Bytes:
    """Return low nibbles, then high ones."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _bits(stored: Bytes) -> Bytes:
    return np.unpackbits(stored, axis=-1, bitorder="little")


def _simple(scale_bytes: int, bits: int, stored: Bytes) -> _Parts:
    scales, rest = stored[..., :scale_bytes], stored[..., scale_bytes:]
    if bits == 8:
        return rest ^ 128, scales, scales
    if bits == 5:
        return _nibbles(rest[..., 4:]) | _bits(rest[..., :4]) << 4, scales, scales
    return _nibbles(rest), scales, scales


def _six_bit_scales(stored: Bytes) -> Bytes:
    """Return 8 steps and 8 minima of 6 bits each, as pairs: `[panels, 16, 8 · groups, 2]`."""
    low, middle, high = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    steps = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return np.stack([steps, minima], axis=-1).reshape(*stored.shape[:2], -1, 2)


def _k_with_minima(bits: int, stored: Bytes) -> _Parts:
    numbers = stored[..., 16 if bits == 4 else 48 :]
    chunks = numbers.reshape(*numbers.shape[:3], 4, 32)
    numbers = _nibbles(chunks)
    if bits == 5:
        planes = stored[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        numbers = numbers | planes.reshape(*numbers.shape) << 4
    return numbers, _six_bit_scales(stored[..., 4:16]), stored[..., :4]


def _q6_k(stored: Bytes) -> _Parts:
    low = stored[..., :128].reshape(*stored.shape[:3], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*stored.shape[:3], 256)
    high = stored[..., 128:192].reshape(*stored.shape[:3], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = low | high.reshape(low.shape) << 4
    scales = stored[..., 192:208].reshape(*stored.shape[:2], -1, 2)
    return numbers, scales, stored[..., 208:]


_PARTS: dict[str, Callable[[Bytes], _Parts]] = {
    "Q4_0": lambda stored: _simple(2, 4, stored),
    "Q4_1": lambda stored: _simple(4, 4, stored),
    "Q5_0": lambda stored: _simple(2, 5, stored),
    "Q5_1": lambda stored: _simple(4, 5, stored),
    "Q8_0": lambda stored: _simple(2, 8, stored),
    "Q4_K": lambda stored: _k_with_minima(4, stored),
    "Q5_K": lambda stored: _k_with_minima(5, stored),
    "Q6_K": _q6_k,
    "MXFP4": lambda stored: _simple(1, 4, stored),
}
