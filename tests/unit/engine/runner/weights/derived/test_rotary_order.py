"""Heads of queries and keys in the order in which they are rotated, in every form of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise
from tests.support.models.hub_formats import PACKERS, pack_folder
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint
from tests.support.models.tiny_gguf import FORMATS, write_pair

ERNIE = CONFIGS["ernie_biased"] | {"num_hidden_layers": 1}
WIDE = CONFIGS["ernie"] | {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 64,
}  # fmt: skip
"""Heads of 64: query and key have two and one of the tiles of fp8."""
PREFIX = "model.layers.0."
HEADS = ("self_attn.q_proj", "self_attn.k_proj")


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _evens_first(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Neighbours (2i, 2i + 1) of each head, as the pairs (i, i + half)."""
    heads = values.reshape(-1, head_dim, *values.shape[1:])
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(values.shape)


def _check(checkpoint: Checkpoint, values: dict[str, np.ndarray], head_dim: int) -> None:
    for name in checkpoint.names():
        wanted = values[name]
        if name.startswith(tuple(PREFIX + head for head in HEADS)):
            wanted = _evens_first(wanted, head_dim)
        np.testing.assert_array_equal(checkpoint.read(name), wanted, name)
        stored = checkpoint.grouped(name)
        assert (stored.format, stored.shape) == checkpoint.format_and_shape(name)
        assert stored.rows.flags.c_contiguous
        np.testing.assert_array_equal(dequantise(stored).reshape(wanted.shape), wanted, name)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_neighbours_become_halves_in_weights_and_biases(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path, ERNIE, dtype=dtype)
    values = weights_of(ERNIE)
    if dtype == "BF16":
        values = {
            name: (one.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            for name, one in values.items()
        }
    _check(_open(folder), values, 32)


def test_groups_of_a_gguf_file_stay_whole(tmp_path: Path) -> None:
    stored, wide = write_pair(tmp_path, CONFIGS["ernie_biased"], FORMATS)
    found, wanted = _open(stored), _open(wide)
    name = f"{PREFIX}self_attn.k_proj.weight"
    assert found.format_and_shape(name)[0] == FORMATS["k_proj"]
    np.testing.assert_array_equal(found.read(name), wanted.read(name))


@pytest.mark.parametrize("packer", ["gptq", "awq", "fp8"])
def test_what_is_quantised_already_is_reordered_too(tmp_path: Path, packer: str) -> None:
    values = pack_folder(tmp_path, WIDE, weights_of(WIDE), PACKERS[packer])
    _check(_open(tmp_path), values, 64)


def test_heads_within_tiles_of_fp8_keep_their_scales(tmp_path: Path) -> None:
    values = pack_folder(tmp_path, WIDE, weights_of(WIDE), PACKERS["fp8"])
    checkpoint = _open(tmp_path)
    for head in HEADS:
        name = f"{PREFIX}{head}.weight"
        assert checkpoint.has_float8(name)
        tensor = checkpoint.float8(name)
        scales = np.repeat(np.repeat(tensor.scales, 128, axis=0), 128, axis=1)
        found = np.array([_e4m3(byte) for byte in range(256)])[tensor.numbers]
        found = (found * scales).astype(np.float32)
        np.testing.assert_array_equal(found, _evens_first(values[name], 64))


def _e4m3(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_heads_over_two_tiles_have_no_fp8(tmp_path: Path) -> None:
    config = WIDE | {"head_dim": 256}
    pack_folder(tmp_path, config, weights_of(config), PACKERS["fp8"])
    checkpoint = _open(tmp_path)
    has = {n: checkpoint.has_float8(f"{PREFIX}self_attn.{n}_proj.weight") for n in "qkvo"}
    assert has == {"q": False, "k": False, "v": True, "o": True}


def test_other_families_are_read_without_a_source_between(tmp_path: Path) -> None:
    """Rows of a mapped file stay in it."""
    stored, _ = write_pair(tmp_path, CONFIGS["qwen3"], FORMATS)
    rows = _open(stored).grouped(f"{PREFIX}self_attn.q_proj.weight").rows
    assert not rows.flags.owndata
