"""Keys and values of a byte each: what is stored, and the same logits however rows are divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, rounded, widened  # isort: skip
from tests.gpu_kernels.interpreted_runner import FAMILIES, PROMPT, TABLE, computed, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.cache.kv_formats import stored_slots
from engine.runner.gpu.back_end import GpuBackEnd
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.load_weights import load_weights
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.tiles import Tile
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.key_scales import key_scales
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.gpu.decoding import Decoding
from tests.gpu_kernels.tiny_decoder import BLOCK, MAX_LEN, SHAPE, SPEC, TinyDecoder
from tests.gpu_kernels.uploaded import upload
from tests.support.engine.moved_blocks import move_blocks
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import weights_of, write_checkpoint

TILE = Tile(64, 64, 32, 4, 3)
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, SPEC.vocab_size, 75)]
BLOCKS = [9, 3, 17, 4, 11, 30]


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    """Its unwritten slots have the scale NaN."""
    return TinyDecoder(has_scales=True)


def in_chunks(tiny: TinyDecoder, make: Launches, *cuts: int) -> np.ndarray:
    """Return the last row's logits, computed in chunks that end at `cuts`, beside another one."""
    steps = ChunkStep(tiny.device, make, 0, 160, 2, MAX_LEN)  # type: ignore[arg-type]
    start = 0
    for end in (*cuts, len(TOKENS)):
        other = ChunkRow(TOKENS[:3], start, range(40, 46))
        steps.run([other, ChunkRow(TOKENS[start:end], start, BLOCKS)])
        start = end
    logits: np.ndarray = steps.logits(2)[1].copy()
    return logits


@pytest.fixture(scope="module")
def whole(tiny: TinyDecoder) -> np.ndarray:
    return in_chunks(tiny, tiny.launches(TILE))


def test_logits_are_nearly_those_of_float64(tiny: TinyDecoder, whole: np.ndarray) -> None:
    exact = tiny.logits(TOKENS)
    assert np.linalg.norm(whole - exact) / np.linalg.norm(exact) < 0.02


def test_a_chunk_cut_anywhere_has_the_same_bits(tiny: TinyDecoder, whole: np.ndarray) -> None:
    make = tiny.launches(TILE, replace(SHAPE, chunk_rows=16))
    assert np.array_equal(in_chunks(tiny, make, 16, 17, 64), whole)


def test_decoded_rows_have_the_same_bits(tiny: TinyDecoder, whole: np.ndarray) -> None:
    make = tiny.launches(TILE)
    in_chunks(tiny, make)
    step = Decoding(tiny.device, make, 0, 3, MAX_LEN)
    tables = np.full((3, step.table_width), 40)
    tables[2, : len(BLOCKS)] = BLOCKS
    for place in range(72, len(TOKENS)):
        step.set_rows(np.array([5, 5, TOKENS[place]]), np.array([7, -1, place]), tables)
        step.begin()
    assert np.array_equal(step.logits()[2], whole)
    step.close()


def test_what_is_stored_has_the_bytes_and_scales_of_the_cpu(tiny: TinyDecoder) -> None:
    """Values are stored as they are: large and small ones, and those that are not finite."""
    rng = np.random.default_rng(1)
    heads, dim = SPEC.num_kv_heads, SPEC.head_dim
    rows = (rng.standard_normal((9, SPEC.num_heads + 2 * heads, dim))).astype(np.float32)
    rows *= np.array([1, 1e-3, 1e4, 1e-31, 1e-28, 0, 1, 1, 1e37], np.float32)[:, None, None]
    rows[6, -1, 3], rows[7, -2, 20] = np.nan, -np.inf
    bits = rounded(rows)
    make = tiny.launches(TILE)
    slots = np.array([0, 1, 15, 16, 40, 63, 700, 701, -1], np.int32)
    queries = tiny.device.allocate(2 * 9 * SPEC.num_heads * dim)
    make.rotate(
        1, upload(tiny.device, bits), upload(tiny.device, np.arange(9, dtype=np.int32)),
        upload(tiny.device, slots), queries.address, 9,
    )(0)  # fmt: skip
    piece = tiny.piece_bytes
    expected = stored_slots(widened(bits)[:, -heads:], "int8")
    for row, slot in enumerate(slots[:-1].tolist()):
        raw = tiny.device.download(make.pool.values(1) + slot // BLOCK * piece, piece)
        found = np.frombuffer(raw, np.uint8).reshape(heads, BLOCK * (dim + 4))
        place = slot % BLOCK
        words = found[:, : BLOCK * dim].reshape(heads, BLOCK, dim // 2, 2)[:, place]
        numbers = np.concatenate([words[..., 0], words[..., 1]], axis=-1)
        scales = found[:, BLOCK * dim :].reshape(heads, BLOCK, 4)[:, place]
        wanted = expected[row]
        assert np.array_equal(numbers, wanted[:, :dim]), row
        assert np.array_equal(
            np.nan_to_num(scales.copy().view(np.float32), nan=-1),
            np.nan_to_num(wanted[:, dim:].copy().view(np.float32), nan=-1),
        ), row


def test_divided_keys_and_multiplied_queries_have_the_same_products() -> None:
    """Powers of two are exact, so over bfloat16 every logit is the same, to the last bit."""
    plain = TinyDecoder()
    whole = in_chunks(plain, plain.launches(TILE))
    rng = np.random.default_rng(4)
    shape = (SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim // 2)
    divisors = np.exp2(rng.integers(-4, 5, shape)).astype(np.float32)
    layers = tuple(
        replace(layer, key_divisors=upload(plain.device, own))
        for layer, own in zip(plain.weights.layers, divisors, strict=True)
    )
    plain.weights = replace(plain.weights, layers=layers)
    assert np.array_equal(in_chunks(plain, plain.launches(TILE)), whole)


@pytest.mark.usefixtures("interpreted_card")
def test_keys_with_large_biases_are_divided_over_bytes_alone(tmp_path: Path) -> None:
    """The logits are near the exact ones."""
    config = {**FAMILIES["qwen2"], "head_dim": 32}
    biases = {
        name: np.where(np.arange(bias.size) % 32 == 1, np.float32(8.0), bias)
        for name, bias in weights_of(config).items() if name.endswith("k_proj.bias")
    }  # fmt: skip
    folder = write_checkpoint(tmp_path, config, extra=biases)
    device: Any = InterpretedDevice()
    spec = read_decoder_spec(folder)
    files = Checkpoint(folder, spec)
    for index, layer in enumerate(load_weights(device, files, spec, 64, "int8").layers):
        expected = key_scales(files, f"model.layers.{index}.", spec, "int8")
        assert expected.max() > 1
        raw = device.download(layer.key_divisors, expected.nbytes)
        assert np.array_equal(np.frombuffer(raw, np.float32).reshape(expected.shape), expected)
    plain = load_weights(device, files, spec, 64, "bfloat16")
    assert {layer.key_divisors for layer in plain.layers} == {0}
    found = computed(on_card(folder, kv_cache_dtype="int8"), PROMPT, [])
    exact = computed(load(folder, 64, activation_dtype="float32"), PROMPT, [])
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.06


@pytest.mark.usefixtures("interpreted_card")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_runner_over_bytes(tmp_path: Path, family: str) -> None:
    """Near the CPU's logits over bytes, where keys have biases too; cut anywhere the same bits.

    A block that another cache got has what this one computed.
    """
    folder = write_checkpoint(tmp_path, {**FAMILIES[family], "head_dim": 32})
    runner = on_card(folder, kv_cache_dtype="int8")
    whole = computed(runner, PROMPT, [])
    exact = computed(
        load(folder, 64, activation_dtype="float32", kv_cache_dtype="int8"), PROMPT, []
    )
    assert np.linalg.norm(whole - exact) / np.linalg.norm(exact) < 0.06
    there = on_card(folder, kv_cache_dtype="int8")
    assert np.array_equal(computed(there, PROMPT, [16, 17, 38]), whole)
    assert there.layout.fingerprint == runner.layout.fingerprint
    assert there.layout.fingerprint != on_card(folder).layout.fingerprint
    moved = [2, 8, 0]
    move_blocks(runner.card_pool, there.card_pool, runner.layout, TABLE, moved)
    [landed] = logits_of(there, scheduled(PROMPT[39:], 39, moved))
    assert np.array_equal(landed, whole)


def test_heads_that_are_too_small_for_bytes_are_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, FAMILIES["llama"])
    layout = replace(load(folder, 64, kv_cache_dtype="int8").layout, head_dim=16)
    with pytest.raises(ConfigError, match="head_dim is 16: attention_backend triton takes heads"):
        GpuBackEnd(0).new_cache(layout, 1 << 20, None)
