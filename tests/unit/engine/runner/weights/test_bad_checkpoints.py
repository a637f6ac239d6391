"""A broken or unsupported folder is refused before any weight is read, naming what is wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec, read_eos_token_ids
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    weights_of,
    write_checkpoint,
    write_safetensors,
)
from tests.support.models.tokenizer_gguf import HIDDEN, write_tiny_gguf

LLAMA = CONFIGS["llama"]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _open(folder)
    for word in words:
        assert word in str(caught.value)


def _rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = weights_of(LLAMA)
    change(tensors)
    write_safetensors(folder / SINGLE, tensors)


def _write_config(folder: Path, values: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.covers("M15")
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_file_whose_end_is_zeros_is_refused(tmp_path: Path, part: float) -> None:
    """A copy that reserves its space first has its final size long before it ends."""
    write_checkpoint(tmp_path, LLAMA)
    _open(tmp_path)
    whole = bytearray((tmp_path / SINGLE).read_bytes())
    data = 8 + struct.unpack("<Q", whole[:8])[0]
    copied = data + int((len(whole) - data) * part) // 4 * 4
    whole[copied:] = bytes(len(whole) - copied)
    (tmp_path / SINGLE).write_bytes(whole)
    _refused(tmp_path, str(tmp_path), "norm.weight", "zeros alone")


@pytest.mark.covers("M15")
def test_a_gguf_file_of_zeros_is_refused(tmp_path: Path) -> None:
    norms = {"output_norm.weight": np.zeros(HIDDEN, np.float32)}
    folder = tmp_path / "made"
    folder.mkdir()
    path = write_tiny_gguf(tmp_path / "model.gguf", tensors=norms)
    with pytest.raises(CheckpointError, match=rf"{path}: tensor model\.norm\.weight holds zeros"):
        make_gguf_folder(path, folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load(tmp_path / "nowhere")


def test_a_broken_checkpoint_is_told_before_paddle_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from common.settings.config import EngineConfig, ModelConfig\n"
        "from common.errors import CheckpointError\n"
        "from engine.runner.start.load import load_model_runner\n"
        "try:\n"
        "    load_model_runner(ModelConfig(model=sys.argv[1]), EngineConfig())\n"
        "except CheckpointError:\n"
        "    sys.exit(3 if 'paddle' in sys.modules else 0)\n"
    )
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / SINGLE).write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == 0


def test_no_config(tmp_path: Path) -> None:
    _refused(tmp_path, "config.json", "no such file")


@pytest.mark.parametrize("text", ["{", "[1]", '"llama"', "\xff"])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    _refused(tmp_path, "config.json")


DEEP = "[" * 200_000


@pytest.mark.parametrize("text", [DEEP, '{"architectures": ' + DEEP])
def test_a_config_that_is_nested_too_deeply(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    _refused(tmp_path, "config.json", "not readable as JSON")


@pytest.mark.parametrize(
    ("text", "said"), [("[1]", "config.json: no JSON object"), ("{}", "architectures is missing:")]
)
def test_a_config_that_says_nothing(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    _refused(tmp_path, said)


def test_a_header_that_is_nested_too_deeply(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    header = b'{"a": ' + DEEP.encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    _refused(tmp_path, SINGLE, "header is broken")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 10**9 * 64) for key in ("num_hidden_layers", "hidden_size", "intermediate_size")),
        *((key, 10**12) for key in ("vocab_size", "num_attention_heads", "head_dim")),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**300),
        ("max_position_embeddings", 10**30),
    ],
)
def test_counts_beyond_any_model_are_refused_before_memory_is_taken(
    tmp_path: Path, key: str, value: int
) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _write_config(tmp_path, {**LLAMA, key: value})
    tracemalloc.start()
    try:
        _refused(tmp_path, "config.json", key, "wanted at most")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layer_types", [5, "full_attention", {"a": 1}, [["full_attention"]], [5]])
def test_layer_types_of_another_shape(tmp_path: Path, layer_types: object) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _write_config(tmp_path, {**LLAMA, "layer_types": layer_types})
    _refused(tmp_path, "config.json", "layer_types", "full_attention")


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 32)
    _refused(tmp_path, "config.json", "wanted at most")


def test_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / SINGLE).unlink()
    _refused(tmp_path, str(tmp_path), "no weights", INDEX)


def test_missing_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _rewrite(tmp_path, lambda tensors: tensors.pop(UP))
    _refused(tmp_path, UP, "missing", "[96, 64]")


def test_wrong_shape(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _rewrite(tmp_path, lambda tensors: tensors.update({UP: tensors[UP][:, :32]}))
    _refused(tmp_path, SINGLE, UP, "[96, 32]", "[96, 64]")


def _change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_wrong_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _change_header(tmp_path, lambda header: header[UP].update(dtype="I8"))
    _refused(tmp_path, SINGLE, UP, "I8", "F32, F16 or BF16")


def test_byte_range_that_contradicts_the_shape(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _change_header(tmp_path, lambda header: header[UP].update(dtype="F16"))
    _refused(tmp_path, SINGLE, UP, "24576 bytes", "12288")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[UP].pop("shape"),
        lambda header: header[UP].update(data_offsets=[0]),
        lambda header: header[UP].update(data_offsets=["a", "b"]),
        lambda header: header.update({UP: 3}),
    ],
)
def test_broken_header_entry(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _change_header(tmp_path, change)
    _refused(tmp_path, SINGLE, "header is broken")


@pytest.mark.parametrize("offsets", [[-8, 24568], [24576, 0], [1 << 40, (1 << 40) + 24576]])
def test_byte_range_outside_the_file(tmp_path: Path, offsets: list[int]) -> None:
    write_checkpoint(tmp_path, LLAMA)
    _change_header(tmp_path, lambda header: header[UP].update(data_offsets=offsets))
    _refused(tmp_path, SINGLE, UP)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 5000, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    write_checkpoint(tmp_path, LLAMA)
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:kept])
    _refused(tmp_path, SINGLE, "truncated")


def test_something_else_with_this_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    _refused(tmp_path, SINGLE, "not safetensors")


def test_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, num_shards=3)
    _open(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    _refused(tmp_path, "model-00002-of-00003.safetensors", "shard is missing")


def test_shard_without_a_tensor_that_the_index_puts_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    moved = "model-00001-of-00002.safetensors"
    index["weight_map"] = dict.fromkeys(index["weight_map"], moved)
    (tmp_path / INDEX).write_text(json.dumps(index))
    _refused(tmp_path, moved, "has no tensor")


@pytest.mark.parametrize("weight_map", [None, [], {UP: 3}, {UP: "../other.safetensors"}])
def test_index_that_names_no_files_here(tmp_path: Path, weight_map: object) -> None:
    write_checkpoint(tmp_path, LLAMA, num_shards=2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    _refused(tmp_path, INDEX)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("architectures", "GPT2LMHeadModel", "Qwen3")),
        ({"architectures": None}, ("architectures", "LlamaForCausalLM")),
        ({"architectures": [["LlamaForCausalLM"]]}, ("architectures",)),
        ({"hidden_size": "64"}, ("hidden_size", "'64'", "whole number")),
        ({"hidden_size": True}, ("hidden_size", "whole number")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "at least 1")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "divisor")),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, ("num_attention_heads", "64")),
        ({"head_dim": 15}, ("head_dim", "even")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "above 0")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "true or false")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ({"use_sliding_window": True}, ("use_sliding_window", "false")),
        ({"layer_types": ["sliding_attention"] * 2}, ("layer_types", "full_attention")),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, ("rope_type", "su", "llama3")),
        ({"layer_types": ["full_attention"]}, ("layer_types", "2 layers")),
        ({"rope_scaling": {"type": "linear"}}, ("rope_scaling.factor", "above 0")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "object")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    ],
)
def test_config_that_the_decoder_does_not_compute(
    tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    _refused(tmp_path, "config.json", *words)


MISTRAL = CONFIGS["mistral"]
_KINDS = ("full_attention", "sliding_attention")


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mistral", {"sliding_window": 0}, ("sliding_window", "at least 1")),
        ("mistral", {"sliding_window": -1}, ("sliding_window", "at least 1")),
        ("mistral", {"sliding_window": "37"}, ("sliding_window", "whole number")),
        ("mistral", {"sliding_window": True}, ("sliding_window", "whole number")),
        ("mistral", {"use_sliding_window": "no"}, ("use_sliding_window", "true or false")),
        (
            "mistral",
            {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
            ("layer_types", "every layer", "9"),
        ),
        ("qwen3_mixed", {"use_sliding_window": False}, ("use_sliding_window", "layer_types")),
        ("qwen3_mixed", {"sliding_window": None}, ("sliding_window", "layer_types")),
        ("qwen3_mixed", {"layer_types": ["chunked_attention"] * 4}, ("layer_types", "chunked")),
        ("qwen3_mixed", {"layer_types": ["full_attention"] * 3}, ("layer_types", "4 layers")),
        ("gemma3", {"sliding_window_pattern": 0}, ("sliding_window_pattern", "at least 1")),
        ("gemma3", {"sliding_window": None}, ("sliding_window", "layer_types")),
        ("gemma3", {"final_logit_softcapping": 30.0}, ("final_logit_softcapping", "null")),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", "null")),
        ("gemma3", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("gemma3", {"hidden_activation": "gelu"}, ("hidden_activation", "gelu_pytorch_tanh")),
        ("gemma3", {"query_pre_attn_scalar": 0}, ("query_pre_attn_scalar", "above 0")),
        ("gemma3", {"rope_local_base_freq": "x"}, ("rope_local_base_freq", "above 0")),
        ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, ("rope_scaling.factor",)),
        (
            "gemma3_newer",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": 5}},
            ("rope_parameters.sliding_attention", "object"),
        ),
        ("smollm3", {"use_sliding_window": True}, ("use_sliding_window", "no sliding windows")),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, ("no_rope_layers", "4 layers")),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}, ("no_rope_layers", "0 or 1")),
        ("smollm3", {"no_rope_layers": "1010"}, ("no_rope_layers", "0 or 1")),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, ("interval", "least 1")),
        *(
            ("gemma3_newer", {"rope_parameters": {kind: {"rope_theta": 9.0}}}, (other, kind))
            for kind, other in (_KINDS, _KINDS[::-1])
        ),
        *(
            (
                family,
                {"rope_parameters": {kind: {"rope_theta": 9.0} for kind in kinds}},
                ("rope_parameters", "the same rotary positions in all layers"),
            )
            for family in ("qwen3_mixed", "mistral_window", "qwen3_moe", "phi3")
            for kinds in (_KINDS, _KINDS[:1], _KINDS[1:])
        ),
        ("qwen2_last_layers", {"max_window_layers": -1}, ("max_window_layers", "at least 0")),
        ("qwen2_last_layers", {"max_window_layers": "1"}, ("max_window_layers", "at least 0")),
    ],
)
def test_what_windows_and_gemma_do_not_compute(
    tmp_path: Path, family: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    write_checkpoint(tmp_path, CONFIGS[family])
    _write_config(tmp_path, CONFIGS[family] | change)
    _refused(tmp_path, "config.json", *words)


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("mistral", {"sliding_window": 511}, (511, 511)),
        ("mistral", {"sliding_window": 512}, ()),
        ("mistral", {"max_position_embeddings": 8192, "sliding_window": ...}, (4096, 4096)),
        ("mistral", {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}, (9, 9)),
        ("qwen3", {"sliding_window": 37}, ()),
        ("qwen3", {"sliding_window": 37, "use_sliding_window": True}, ()),
        ("qwen3", {"sliding_window": 37, "use_sliding_window": True, "max_window_layers": 1},
         (0, 37)),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        ("qwen3_mixed", {}, (21, 0, 21, 0)),
        ("qwen2_last_layers", {}, (0, 53, 53)),
        ("gemma3", {}, (29, 29, 29, 29, 29, 0, 29)),
        ("gemma3", {"sliding_window_pattern": ...}, (29, 29, 29, 29, 29, 0, 29)),
        ("gemma3", {"sliding_window_pattern": 2}, (29, 0, 29, 0, 29, 0, 29)),
        ("gemma3_newer", {}, (0, 29, 29)),
        ("qwen2_last_layers", {"layer_types": ["full_attention"] * 3}, ()),
        ("mimo", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7, 7)),
        ("llama", {"sliding_window": 37}, ()),
    ],
)  # fmt: skip
def test_the_windows_of_layers(
    tmp_path: Path, family: str, change: dict[str, Any], windows: tuple[int, ...]
) -> None:
    """`...` leaves a key out."""
    config = {key: v for key, v in (CONFIGS[family] | change).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_decoder_spec(tmp_path).windows == windows


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MISTRAL | {"sliding_window": 512})
    assert read_decoder_spec(tmp_path) == read_decoder_spec(write_checkpoint(tmp_path, MISTRAL))


@pytest.mark.parametrize("value", ["2", [2, "3"], {"id": 2}, True])
def test_eos_token_id_that_is_no_id(tmp_path: Path, value: object) -> None:
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config.json.*eos_token_id"):
        read_eos_token_ids(tmp_path)
