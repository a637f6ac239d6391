"""The layout of a KV cache: its sizes, and what other nodes and releases know it by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import LayoutMismatch
from common.kv.kv_layout import KVLayout, LayerShape, check_compatible

LAYOUT = KVLayout(
    model_digest="w", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16"
)
SCALED = dataclasses.replace(LAYOUT, dtype="int8")
HYBRID = KVLayout.of_layers(
    (LayerShape(2, 4, 8), LayerShape(1, 1, 20), LayerShape(2, 2, 8)),
    model_digest="w",
    block_size=4,
    dtype="float32",
)
LATENT = KVLayout.of_layers(
    (LayerShape(1, 1, 20),) * 2, model_digest="w", block_size=4, dtype="float32"
)
NO_HEADS = {"num_kv_heads": 0, "head_dim": 0}


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
    assert ", int8, " in narrow.description
    assert wide.fingerprint != narrow.fingerprint
    with pytest.raises(LayoutMismatch, match=r"dtype: here 'int8', peer 'float32'$"):
        check_compatible(narrow, wide)


def test_the_fingerprint_is_that_of_earlier_releases() -> None:
    """It goes into tickets and block hashes, and nodes of two releases compare it."""
    assert LAYOUT.fingerprint == "5d7e3dd6fb8af0a791c7f06437843bc6"
    of_float32 = dataclasses.replace(LAYOUT, dtype="float32")
    assert of_float32.fingerprint == "f25494e21ccc42c096a07281b34f5f65"
    assert list(LAYOUT.fields) == [
        "model_digest", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"
    ]  # fmt: skip


@pytest.mark.covers("F136")
def test_every_field_is_in_the_fingerprint() -> None:
    for name, value in LAYOUT.fields.items():
        other: Any = "float16" if name == "dtype" else value * 2
        changed = dataclasses.replace(LAYOUT, **{name: other})
        assert changed.fingerprint != LAYOUT.fingerprint
    prints = {layout.fingerprint for layout in (LAYOUT, SCALED, LATENT, HYBRID)}
    assert len(prints) == 4
    one_less = (LayerShape(2, 4, 16), *HYBRID.shapes[1:])
    assert dataclasses.replace(HYBRID, shapes=one_less).fingerprint not in prints


def test_layers_may_differ_in_planes_and_sizes() -> None:
    assert [layer.num_planes for layer in HYBRID.layers] == [2, 1, 2]
    assert [layer.piece_bytes for layer in HYBRID.layers] == [4 * 8 * 4 * 4, 20 * 4 * 4, 16 * 4 * 4]
    assert HYBRID.block_bytes == sum(layer.num_bytes for layer in HYBRID.layers)
    assert HYBRID.block_bytes == 2 * 512 + 320 + 2 * 256
    assert (LATENT.num_planes, LATENT.layer_bytes) == (1, LATENT.piece_bytes)
    assert LATENT.pool_shape(9) == (2, 1, 9, 20 * 4 * 4)
    with pytest.raises(ValueError, match="layers of this KV layout differ"):
        HYBRID.pool_shape(4)
    assert HYBRID.description == (
        "3 layers, 1 with 2 planes of 4 x 8 then 1 with 1 plane of 1 x 20 then "
        "1 with 2 planes of 2 x 8, blocks of 4, float32, weights w"
    )


def test_layers_that_are_all_keys_and_values_are_the_layout_of_earlier_releases() -> None:
    made = KVLayout.of_layers(
        (LayerShape(2, 2, 8),) * 3, model_digest="w", block_size=4, dtype="bfloat16"
    )
    assert made == LAYOUT


def test_adjacent_heads_are_one_range_of_a_piece() -> None:
    layer = HYBRID.layers[0]
    assert layer.range_of_heads(0, 4) == (0, layer.piece_bytes)
    assert layer.range_of_heads(1, 2) == (layer.head_bytes, 2 * layer.head_bytes)
    assert SCALED.layers[0].range_of_heads(1, 1) == (SCALED.head_bytes, SCALED.head_bytes)
    for first, count in ((-1, 2), (0, 0), (3, 2)):
        with pytest.raises(ValueError, match="the layer has 4"):
            layer.range_of_heads(first, count)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": "int3"}, "KV dtype 'int3': wanted one of"),
        ({"shapes": (LayerShape(1, 1, 8),) * 3}, "either num_kv_heads and head_dim"),
        ({"shapes": (LayerShape(1, 1, 8),) * 2}, "of 2 layers: wanted 3"),
        ({**NO_HEADS, "shapes": (LayerShape(2, 2, 8),) * 3}, "either num_kv_heads and head_dim"),
        ({**NO_HEADS, "shapes": (LayerShape(3, 2, 8),) * 3}, "wanted 1 to 2 planes"),
        ({**NO_HEADS, "shapes": (LayerShape(0, 2, 8),) * 3}, "wanted 1 to 2 planes"),
        ({**NO_HEADS, "shapes": (LayerShape(1, 0, 8),) * 3}, "layer 0 has 1 plane of 0 x 8"),
        ({**NO_HEADS, "shapes": (LayerShape(1, 2, 0),) * 3}, "sizes of 1 or more"),
        (
            {**NO_HEADS, "num_layers": 1025, "shapes": (LayerShape(1, 1, 8),) * 1025},
            "at most 1024",
        ),
    ],
)
def test_layouts_that_cannot_be(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(LAYOUT, **changes)


def test_a_mismatch_says_whether_it_is_another_model() -> None:
    check_compatible(LAYOUT, dataclasses.replace(LAYOUT))
    with pytest.raises(LayoutMismatch, match=r"^models differ: model_digest: here 'w', peer 'x'$"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, model_digest="x"))
    with pytest.raises(LayoutMismatch, match=r"^KV layouts differ: block_size: here 4, peer 8$"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, block_size=8))
    with pytest.raises(LayoutMismatch, match=r"^KV layouts differ: num_kv_heads: here 2, peer 0"):
        check_compatible(LAYOUT, dataclasses.replace(HYBRID))
    with pytest.raises(LayoutMismatch, match=r"dtype: here 'bfloat16', peer 'int8'"):
        check_compatible(LAYOUT, SCALED)


def test_a_mismatch_of_models_names_both_arithmetics() -> None:
    """Weights, their formats and activations change the digest: that alone says nothing."""
    in_bytes = dataclasses.replace(LAYOUT, arithmetic="float32 on numba, activations in int8")
    wide = dataclasses.replace(LAYOUT, model_digest="x", arithmetic="float32 on numba")
    words = (
        "models differ: model_digest: here 'w', peer 'x'; arithmetic: here "
        "'float32 on numba, activations in int8', peer 'float32 on numba'"
    )
    with pytest.raises(LayoutMismatch, match=f"^{words}$"):
        check_compatible(in_bytes, wide)
    with pytest.raises(LayoutMismatch, match="arithmetic: here 'unknown', peer 'float32 on numba'"):
        check_compatible(LAYOUT, wide)
    assert in_bytes.description.endswith(
        ", weights w, computed in float32 on numba, activations in int8"
    )


def test_words_about_the_arithmetic_are_not_in_the_fingerprint() -> None:
    """Their part in it is the digest's, so formats that give equal bits are one layout."""
    named = dataclasses.replace(LAYOUT, arithmetic="float32 on numba")
    assert named.fingerprint == LAYOUT.fingerprint
    check_compatible(named, dataclasses.replace(LAYOUT, arithmetic="other words"))
