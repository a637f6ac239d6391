"""A GGUF file of each family, in mixed formats, computes what its values in float32 compute."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

from engine.runner.block_formats import dequantise, quantise
from engine.runner.checkpoint import Checkpoint, expected_shapes
from engine.runner.gguf_weights import gguf_name
from engine.runner.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.unit.runner.running import load, logits_in_chunks, logits_of, scheduled
from tests.unit.runner.tiny_checkpoints import (
    CONFIGS,
    VOCAB_SIZE,
    prompt_of,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "ernie": "ernie4_5"}
FORMATS = {
    "embed_tokens": "Q8_0", "q_proj": "Q5_0", "k_proj": "Q4_1", "v_proj": "F16",
    "o_proj": "Q4_0", "gate_proj": "Q5_1", "up_proj": "Q8_0", "down_proj": "Q4_1",
}  # fmt: skip


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of heads with halves first as llama.cpp's converter stores them for `llama`."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def metadata_of(family: str, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(config["rope_theta"]),
    }


def write_gguf(path: Path, name: str) -> dict[str, np.ndarray]:
    """Write the family's file; return the values it holds, by Hugging Face name."""
    config, family = CONFIGS[name], FAMILIES[name]
    writer = gguf.GGUFWriter(path, family)
    for key, value in metadata_of(family, config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array(
        "tokenizer.ggml.tokens", ["a", "b", "ab", *(f"t{i}" for i in range(3, VOCAB_SIZE))]
    )
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB_SIZE)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    values = {}
    for tensor_name, weight in weights_of(config).items():
        part = tensor_name.split(".")[-2]
        kind = FORMATS.get(part, "F32") if weight.ndim == 2 else "F32"
        stored = weight
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part)
        if family == "llama" and heads is not None:
            stored = interleaved(weight, config[heads])
        kind_type = gguf.GGMLQuantizationType[kind]
        raw = quants.quantize(stored, kind_type)
        writer.add_tensor(gguf_name(tensor_name), raw, raw_dtype=kind_type)
        if kind.startswith("Q"):
            values[tensor_name] = dequantise(quantise(weight, kind))
        else:
            values[tensor_name] = weight.astype(np.float16 if kind == "F16" else np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {key: value.astype(np.float32) for key, value in values.items()}


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A folder over a GGUF file, and one with the same values in a safetensors file.

    Both have the same tensors in the same order, which is a part of their identity.
    """
    stored, wide = tmp_path / "stored", tmp_path / "wide"
    stored.mkdir()
    values = write_gguf(tmp_path / "model.gguf", request.param)
    make_gguf_folder(tmp_path / "model.gguf", stored)
    write_checkpoint(wide, CONFIGS[request.param])
    in_order = {name: values[name] for name in expected_shapes(read_decoder_spec(wide))}
    write_safetensors(wide / "model.safetensors", in_order)
    return stored, wide


def test_stored_and_wide_weights_give_the_same_bits(pair: tuple[Path, Path]) -> None:
    stored, wide = (load(folder, activation_dtype="float32") for folder in pair)
    for length in (1, 33):
        prompt = prompt_of(length)
        found = logits_of(stored, scheduled(prompt, 0, range(10)))
        wanted = logits_of(wide, scheduled(prompt, 0, range(10)))
        np.testing.assert_array_equal(found, wanted)


def test_reference_operators_compute_with_the_same_values(pair: tuple[Path, Path]) -> None:
    stored, wide = (load(folder, attention_backend="paddle") for folder in pair)
    prompt = prompt_of(33)
    found = logits_of(stored, scheduled(prompt, 0, range(10)))
    np.testing.assert_array_equal(found, logits_of(wide, scheduled(prompt, 0, range(10))))
    kernels = load(pair[0], activation_dtype="float32")
    on_kernels = logits_of(kernels, scheduled(prompt, 0, range(10)))
    np.testing.assert_allclose(on_kernels, found, atol=1e-4)


def test_int8_activations_are_near_and_leave_no_trace_of_chunks(pair: tuple[Path, Path]) -> None:
    stored = load(pair[0], activation_dtype="float32")
    in_bytes = load(pair[0], activation_dtype="int8")
    assert in_bytes.layout.model_digest != stored.layout.model_digest
    prompt = prompt_of(33)
    [exact] = logits_of(stored, scheduled(prompt, 0, range(10)))
    [found] = logits_of(in_bytes, scheduled(prompt, 0, range(10)))
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())
    for chunk in (1, 7):
        in_chunks = logits_in_chunks(in_bytes, prompt, list(range(10)), chunk)
        np.testing.assert_array_equal(in_chunks, found)


def test_auto_is_int8_where_weights_are_quantised(pair: tuple[Path, Path]) -> None:
    stored, wide = pair

    def digest(folder: Path, activation_dtype: str, backend: str = "numba") -> str:
        runner = load(folder, activation_dtype=activation_dtype, attention_backend=backend)
        return runner.layout.model_digest

    assert digest(stored, "auto") == digest(stored, "int8") != digest(stored, "float32")
    assert digest(wide, "auto") == digest(wide, "float32")
    assert digest(stored, "auto", "paddle") == digest(stored, "float32", "paddle")


def test_equal_digests_mean_equal_bits(pair: tuple[Path, Path]) -> None:
    """Of values that are the same, only those in blocks are multiplied in integers."""
    bits: dict[str, set[bytes]] = {}
    digests = {}
    for folder, activation_dtype in itertools.product(pair, ("float32", "int8")):
        runner = load(folder, activation_dtype=activation_dtype)
        logits = logits_of(runner, scheduled(prompt_of(20), 0, range(10)))
        digest = runner.layout.model_digest
        bits.setdefault(digest, set()).add(np.stack(logits).tobytes())
        digests[folder, activation_dtype] = digest
    assert [len(of_digest) for of_digest in bits.values()] == [1, 1]
    stored, wide = pair
    assert digests[wide, "int8"] == digests[wide, "float32"] == digests[stored, "float32"]


def test_the_decoder_is_the_one_of_the_family(pair: tuple[Path, Path]) -> None:
    """Biases, head norms and rotary positions too: only what the values are stored in differs."""
    stored, wide = (read_decoder_spec(folder) for folder in pair)
    assert stored == wide
    checkpoints = [Checkpoint(folder, stored) for folder in pair]
    names = [set(checkpoint.names()) for checkpoint in checkpoints]
    assert names[0] == names[1]
