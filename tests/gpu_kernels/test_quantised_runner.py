"""A runner on the GPU back end whose products take weights as their files have them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import InterpretedCard, TABLE, computed, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import CheckpointError, LayoutMismatch
from common.kv.kv_layout import check_compatible
from engine.runner.gpu import load_weights, tiles
from engine.runner.gpu.repacking import FORMS
from engine.runner.gpu.weight_plan import (
    PlannedMatrix,
    layer_matrices,
    planned,
    planned_products,
)
from engine.runner.gpu.weights import DecoderWeights, Form, Matrix
from engine.runner.model_runner import ModelRunner
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.tensor_source import TensorSource
from tests.support.engine.moved_blocks import new_ring
from tests.support.models.hub_formats import (
    Awq,
    Fp8,
    Gptq,
    Packer,
    e4m3,
    pack_folder,
    packed_model,
    write_tensors,
)
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of, write_checkpoint
from tests.support.models.tiny_gguf import write_pair, write_wide

pytestmark = pytest.mark.usefixtures("interpreted_card")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
"""Rows of whole strips of 128 inputs."""
QWEN3 = CONFIGS["qwen3"] | WIDE
FLOATS_CONFIG = QWEN3 | {"head_dim": 64}
"""The outputs of query, key and value are whole tiles of 128 too."""
ERNIE = CONFIGS["ernie"] | WIDE
"""Heads whose rotary pairs are neighbours, and a head that is the embedding."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
OTHERS = [[6, 7], [10, 11]]
PROMPT = prompt_of(20)


def weights_on(runner: ModelRunner) -> DecoderWeights:
    decoder: Any = runner.decoder
    found: DecoderWeights = decoder.launches.weights
    return found


def forms_on(runner: ModelRunner) -> list[Form]:
    """The forms of the first layer's products, and of the head."""
    weights = weights_on(runner)
    layer = weights.layers[0]
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down, weights.head)
    return [matrix.form for matrix in matrices]


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    return bool(np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.06)


@pytest.fixture(params=["Q4_0", "Q8_0"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("config", "kind"), [(QWEN3, "Q4_0"), (QWEN3, "Q8_0"), (ERNIE, "Q4_0")],
    ids=["qwen3 Q4_0", "qwen3 Q8_0", "ernie Q4_0"],
)  # fmt: skip
def test_rows_have_the_same_bits_however_they_are_computed(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    """Near the float32 values of the file; in chunks cut anywhere, decoded, and among others."""
    stored, wide = write_pair(tmp_path, config, dict.fromkeys(ALL, kind))
    runner = on_card(stored)
    assert forms_on(runner)[:4] == [FORMS[kind]] * 4
    whole = computed(runner, PROMPT, [])
    assert close(whole, computed(load(wide, 64, activation_dtype="float32"), PROMPT, []))
    for cuts in ((1, 18, 19), (16,)):
        assert np.array_equal(computed(runner, PROMPT, cuts), whole), cuts
    mine = scheduled(PROMPT[19:], 19, TABLE)
    others = [scheduled(prompt_of(count, count), 0, table) for count, table in
              zip((1, 7), OTHERS, strict=True)]  # fmt: skip
    assert np.array_equal(logits_of(runner, *others, mine)[2], whole)
    assert np.array_equal(logits_of(runner, mine, others[0])[0], whole)


def test_weights_that_are_quantised_while_they_are_loaded_are_those_of_a_file(
    tmp_path: Path, kind: str
) -> None:
    """Also of random ones, so that quantised products are measured without a download."""
    folder = write_checkpoint(tmp_path, QWEN3)
    runner = on_card(folder, kind.lower())
    assert forms_on(runner) == [FORMS[kind]] * 4 + [Form.Q8_0]
    exact = load(folder, 64, quantization=kind.lower(), activation_dtype="float32")
    assert close(computed(runner, PROMPT, []), computed(exact, PROMPT, []))
    made = on_card(folder, kind.lower(), "random")
    assert forms_on(made) == forms_on(runner)
    assert np.isfinite(computed(made, PROMPT, [])).all()


def _packed(folder: Path, config: dict[str, Any], packer: Packer) -> tuple[Path, Path]:
    """Return a folder as hubs have it, and one with the same values in float32."""
    stored = folder / "stored"
    stored.mkdir()
    values = pack_folder(stored, config, weights_of(config), packer)
    return stored, write_wide(folder / "wide", config, values)


@pytest.mark.parametrize(
    ("packer", "form"), [(Gptq(), Form.Q4_0), (Awq(), Form.Q8_0), (Fp8(), Form.FP8)],
    ids=["gptq", "awq", "fp8"],
)  # fmt: skip
def test_weights_of_hubs_are_multiplied_as_they_are_stored(
    tmp_path: Path, packer: Packer, form: Form
) -> None:
    """Their values and no others, with the same bits in chunks cut anywhere."""
    stored, wide = _packed(tmp_path, FLOATS_CONFIG, packer)
    runner = on_card(stored)
    assert forms_on(runner) == [form] * 4 + [Form.BF16]
    whole = computed(runner, PROMPT, [])
    assert close(whole, computed(load(wide, 64), PROMPT, []))
    assert np.array_equal(computed(runner, PROMPT, (1, 18, 19)), whole)


@pytest.mark.parametrize(
    "config", [FLOATS_CONFIG, ERNIE | {"head_dim": 64}], ids=["qwen3", "ernie"]
)
def test_fp8_on_the_card_has_the_values_of_the_file(tmp_path: Path, config: dict[str, Any]) -> None:
    stored, wide = _packed(tmp_path, config, Fp8())
    source = Checkpoint(wide, read_decoder_spec(wide))  # heads are reordered where ERNIE's are
    layer = weights_on(on_card(stored)).layers[0]
    for name, matrix in {
        "qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down,
    }.items():  # fmt: skip
        values = [source.read(one) for one in layer_matrices("model.layers.0.")[name]]
        assert matrix.form is Form.FP8
        np.testing.assert_array_equal(values_on_card(matrix), np.concatenate(values))


def values_on_card(matrix: Matrix) -> np.ndarray:
    """Return what the words of e4m3 and their scales stand for, as their docstring says."""
    numbers = held(matrix.address, matrix.weight_bytes, np.uint8)
    pairs = numbers.reshape(matrix.num_outputs, -1, 64, 2)
    decoded = np.array([e4m3(byte) for byte in range(256)], np.float32)[pairs]
    in_order = decoded.swapaxes(2, 3).reshape(matrix.num_outputs, matrix.num_inputs)
    scales = held(matrix.scales, matrix.scale_bytes, np.float32)
    blocks = scales.reshape(-1, matrix.num_inputs // 128)
    wide = np.repeat(np.repeat(blocks, 128, axis=0), 128, axis=1)[: matrix.num_outputs]
    product: np.ndarray = in_order * wide
    return product


def held(address: int, num_bytes: int, kind: type[np.generic]) -> np.ndarray:
    raw = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(bytes(raw), kind)


def test_blocks_of_fp8_that_two_tensors_share_are_computed_in_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys have 64 outputs: a block of fp8 would have scales of keys and of values."""
    stored, wide = _packed(tmp_path, QWEN3, Fp8())
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        runner = on_card(stored)
    assert forms_on(runner) == [Form.BF16, Form.FP8, Form.FP8, Form.FP8, Form.BF16]
    assert "1 matrices: tiles of fp8 that two tensors share" in caplog.text
    assert close(computed(runner, PROMPT, []), computed(load(wide, 64), PROMPT, []))


def test_heads_that_cross_blocks_of_fp8_are_computed_in_bfloat16(tmp_path: Path) -> None:
    """Their outputs are reordered over two blocks, which have scales of their own."""
    stored, _ = _packed(tmp_path, ERNIE | {"head_dim": 256}, Fp8())
    source = Checkpoint(stored, read_decoder_spec(stored))
    assert not source.has_float8("model.layers.0.self_attn.q_proj.weight")
    [qkv, *_] = planned_products(read_decoder_spec(stored), source)
    assert qkv.matrix.form is Form.BF16


def test_numbers_that_are_none_are_refused_on_a_card(tmp_path: Path) -> None:
    stored, _ = _packed(tmp_path, FLOATS_CONFIG, Fp8())
    name = "model.layers.0.mlp.down_proj"
    source = Checkpoint(stored, read_decoder_spec(stored))
    assert source.has_float8(f"{name}.weight")
    tensors, _ = packed_model(weights_of(FLOATS_CONFIG), Fp8())
    broken = [0x7F, *tensors[f"{name}.weight"].numbers[1:]]
    tensors[f"{name}.weight"] = replace(tensors[f"{name}.weight"], numbers=broken)
    write_tensors(stored / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"down_proj.weight: has numbers that are NaN"):
        on_card(stored)


MIXED = [
    (dict.fromkeys(ALL, "Q4_1"), [Form.BF16] * 5, "5 matrices: weights in Q4_1"),
    ({"q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q8_0", "down_proj": "Q8_0"},
     [Form.BF16, Form.BF16, Form.BF16, Form.Q8_0, Form.BF16],
     "1 matrices: weights in Q4_0 and Q8_0"),
    ({"gate_proj": "Q4_0", "up_proj": "Q4_0", "down_proj": "F16"},
     [Form.BF16, Form.BF16, Form.Q4_0, Form.BF16, Form.BF16], ""),
]  # fmt: skip


@pytest.mark.parametrize(("formats", "forms", "why"), MIXED)
def test_other_weights_are_computed_in_bfloat16_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, formats: dict[str, str],
    forms: Sequence[Form], why: str,
) -> None:  # fmt: skip
    stored, wide = write_pair(tmp_path, QWEN3, formats)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        runner = on_card(stored)
    said = [one.message for one in caplog.records if "quantised weights" in one.message]
    assert said == ([f"quantised weights are computed in bfloat16: {why}"] if why else [])
    assert forms_on(runner) == forms
    exact = computed(load(wide, 64, activation_dtype="float32"), PROMPT, [])
    assert close(computed(runner, PROMPT, []), exact)


def test_rows_of_whole_groups_are_computed_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """Also where they are no whole strips of 128 inputs; fp8 has whole tiles or none."""
    folder = write_checkpoint(tmp_path, QWEN3 | {"hidden_size": 160})
    runner = on_card(folder, kind.lower())
    assert forms_on(runner) == [FORMS[kind]] * 4 + [Form.Q8_0]
    exact = load(folder, 64, quantization=kind.lower(), activation_dtype="float32")
    whole = computed(runner, PROMPT, [])
    assert close(whole, computed(exact, PROMPT, []))
    assert np.array_equal(computed(runner, PROMPT, (1, 18, 19)), whole)


def test_rows_of_fp8_that_are_no_whole_tiles_are_computed_in_bfloat16(tmp_path: Path) -> None:
    stored, _ = _packed(tmp_path, FLOATS_CONFIG | {"hidden_size": 160}, Fp8())
    source = Checkpoint(stored, read_decoder_spec(stored))
    plan = planned(source, layer_matrices("model.layers.0.")["qkv"])
    assert plan.matrix.form is Form.BF16
    assert plan.refusal == "160 inputs, no multiple of 128"


def test_kernels_of_all_layers_are_compiled_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted_card: list[InterpretedCard]
) -> None:
    """Layers may have weights in different forms; a late kernel would stop a node for seconds."""

    def mixed(source: TensorSource, names: Sequence[str]) -> PlannedMatrix:
        found = planned(source, names)
        form = Form.BF16 if "layers.1." in names[0] else found.matrix.form
        return replace(found, matrix=replace(found.matrix, form=form))

    monkeypatch.setattr(load_weights, "planned", mixed)
    folder = write_checkpoint(tmp_path, QWEN3 | {"num_hidden_layers": 2})
    runner = on_card(folder, "q4_0")
    assert [layer.down.form for layer in weights_on(runner).layers] == [Form.Q4_0, Form.BF16]
    computed(runner, PROMPT[:6], [4, 5])
    pool: Any = runner.card_pool
    pool.use_ring(new_ring(runner.layout, 2))
    pool.begin_out(0, np.array([0]), np.array([1])).wait()
    pool.begin_in(0, np.array([1]), np.array([0])).wait()
    pool.begin_sums(0, np.array([0])).wait()
    [card] = interpreted_card
    assert len(card.compiled) > 20
    assert card.late == ()


def test_memory_holds_the_stored_bytes(tmp_path: Path, kind: str) -> None:
    """Groups of 32 weights have 18 bytes, and of 8 bits 34."""
    folder = write_checkpoint(tmp_path, QWEN3 | {"tie_word_embeddings": True})
    layer = weights_on(on_card(folder, kind.lower())).layers[0]
    for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
        blocks = matrix.num_outputs * matrix.num_inputs // 32
        assert matrix.num_bytes == blocks * {"Q4_0": 18, "Q8_0": 34}[kind]
    held = [memory.num_bytes for memory in weights_on(on_card(folder, kind.lower())).memories]
    wide = [memory.num_bytes for memory in weights_on(on_card(folder)).memories]
    products = sum(
        2 * one.num_outputs * one.num_inputs - one.num_bytes
        for layer in weights_on(on_card(folder, kind.lower())).layers
        for one in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    assert sum(wide) - sum(held) == products


def test_another_order_of_sums_is_another_fingerprint(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that would compute other bits of the same weights are not paired."""
    folder = write_checkpoint(tmp_path, QWEN3)
    ours = on_card(folder, kind.lower()).layout
    assert on_card(folder, kind.lower()).layout == ours
    assert f"{kind} in 1 ranges of groups of 32" in ours.arithmetic
    assert f"{kind} in 2 ranges of groups of 32" in ours.arithmetic
    monkeypatch.setattr(tiles, "_RANGES", {4: 1, 8: 1})
    theirs = on_card(folder, kind.lower()).layout
    with pytest.raises(LayoutMismatch, match="in 2 ranges of groups of 32"):
        check_compatible(ours, theirs)
    monkeypatch.setattr("engine.runner.gpu.weight_plan.FORMS", {})
    with pytest.raises(LayoutMismatch):
        check_compatible(ours, on_card(folder, kind.lower()).layout)


def test_wide_weights_keep_their_fingerprint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, QWEN3)
    assert on_card(folder).layout.arithmetic.endswith(
        "256 keys, weights in F32, activations in bfloat16"
    )
