"""The layout of a KV cache: its sizes, and what other nodes and releases know it by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import LayoutMismatch
from common.kv_layout import KVLayout, check_compatible

LAYOUT = KVLayout(
    model_digest="w", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16"
)


def test_a_piece_is_its_heads_and_a_block_its_pieces_in_all_planes_and_layers() -> None:
    assert LAYOUT.head_bytes == 4 * 8 * 2
    assert LAYOUT.piece_bytes == 2 * LAYOUT.head_bytes
    assert LAYOUT.layer_bytes == 2 * LAYOUT.piece_bytes
    assert LAYOUT.block_bytes == 3 * LAYOUT.layer_bytes
    assert LAYOUT.pool_shape(7) == (3, 2, 7, LAYOUT.piece_bytes)


def test_a_slot_of_int8_has_a_scale_behind_its_bytes() -> None:
    """68 bytes for 64 numbers: 3.8 times less than 256 of float32."""
    wide, narrow = (
        dataclasses.replace(LAYOUT, head_dim=64, dtype=dtype) for dtype in ("float32", "int8")
    )
    assert (wide.slot_bytes, narrow.slot_bytes) == (256, 68)
    assert narrow.head_bytes == narrow.block_size * 68
    assert wide.block_bytes / narrow.block_bytes > 3.76
    with pytest.raises(LayoutMismatch, match=r"dtype: here 'int8', peer 'float32'$"):
        check_compatible(narrow, wide)


def test_the_fingerprint_is_that_of_earlier_releases() -> None:
    """It goes into tickets and block hashes, and nodes of two releases compare it."""
    assert LAYOUT.fingerprint == "5d7e3dd6fb8af0a791c7f06437843bc6"
    for field in dataclasses.fields(LAYOUT):
        value = getattr(LAYOUT, field.name)
        other: Any = "float16" if field.name == "dtype" else value * 2
        changed = dataclasses.replace(LAYOUT, **{field.name: other})
        assert changed.fingerprint != LAYOUT.fingerprint


def test_a_mismatch_says_whether_it_is_another_model() -> None:
    check_compatible(LAYOUT, dataclasses.replace(LAYOUT))
    with pytest.raises(LayoutMismatch, match=r"^models differ: model_digest: here 'w', peer 'x'$"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, model_digest="x"))
    with pytest.raises(LayoutMismatch, match=r"^KV layouts differ: block_size: here 4, peer 8$"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, block_size=8))
