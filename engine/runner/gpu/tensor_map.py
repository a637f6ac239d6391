"""Descriptions of matrices for the card's copy engine, which kernels get instead of an address."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from engine.runner.gpu.cuda_driver import Device

_ALIGNMENT = 64
_MAP_BYTES = 128
_DATA_TYPES = {8: 10, 9: 8, 10: 9}
"""The driver's numbers of types by Triton's: float64, float32 and bfloat16; others are equal."""

_PROMOTE_TO_128_BYTES = 2


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A matrix [num_rows, num_columns] in device memory, without gaps between rows."""

    address: int
    num_rows: int
    num_columns: int


def encode_tensor_map(device: Device, view: MatrixView, meta: Mapping[str, Any]) -> list[Any]:
    """Return a kernel's parameters for a matrix: the map, its shape and its strides.

    `meta` has the compiler's choices: the tile, its element and its layout in shared memory. Raises
    `GpuError` when the driver refuses them.
    """
    element = int(meta["elem_size"])
    rows, columns = meta["block_size"]
    raw = ctypes.create_string_buffer(_MAP_BYTES + _ALIGNMENT)
    offset = -ctypes.addressof(raw) % _ALIGNMENT
    tensor_map = (ctypes.c_char * _MAP_BYTES).from_buffer(raw, offset)
    device.call(
        "cuTensorMapEncodeTiled",
        byref(tensor_map),
        c_int(_DATA_TYPES.get(meta["elem_type"], meta["elem_type"])),
        c_uint32(2),
        c_void_p(view.address),
        (c_uint64 * 2)(view.num_columns, view.num_rows),
        (c_uint64 * 1)(view.num_columns * element),
        (c_uint32 * 2)(columns, rows),
        (c_uint32 * 2)(1, 1),
        c_int(0),
        c_int(meta["swizzle"]),
        c_int(_PROMOTE_TO_128_BYTES),
        c_int(0),
    )
    shape = [c_int32(view.num_rows), c_int32(view.num_columns)]
    return [tensor_map, *shape, c_int64(view.num_columns), c_int64(1)]
