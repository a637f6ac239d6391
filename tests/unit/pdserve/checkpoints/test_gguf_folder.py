"""A tiny GGUF file becomes a Hugging Face folder; anything else is refused by name."""

import errno
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import gguf_folder_cached, make_gguf_folder
from router.text.model_files import DEFAULT, TOOL_USE, read_chat_templates

WriteGguf = Callable[..., Path]


def converted(gguf_path: Path, folder: Path) -> Path:
    folder.mkdir()
    make_gguf_folder(gguf_path, folder)
    return folder


def checkpoint_in(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Half-split rows to GGUF's order, row by row: (i, i + d/2) of a head become (2i, 2i + 1)."""
    head_dim = len(weight) // num_heads
    result = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                source = head * head_dim + half * head_dim // 2 + i
                result[head * head_dim + 2 * i + half] = weight[source]
    return result


def test_weights_keep_their_values_under_hugging_face_names(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    queries, keys = rng.normal(size=(16, 32)), rng.normal(size=(8, 32))
    values, embedding = rng.normal(size=(8, 32)), rng.normal(size=(9, 32))
    stored = {
        "blk.1.attn_q.weight": interleaved(queries, 4),
        "blk.1.attn_k.weight": interleaved(keys, 2),
        "blk.1.attn_v.weight": values,
        "token_embd.weight": embedding,
    }
    path = write_gguf(tensors={name: array.astype(np.float32) for name, array in stored.items()})
    weights = checkpoint_in(converted(path, tmp_path / "hf"))
    assert len(list(weights.names())) == 2 + 2 * 9
    layer = "model.layers.1.self_attn"
    for name, wanted in (
        (f"{layer}.q_proj.weight", queries),
        (f"{layer}.k_proj.weight", keys),
        (f"{layer}.v_proj.weight", values),
        ("model.embed_tokens.weight", embedding),
    ):
        assert weights.read(name).dtype == np.float32
        np.testing.assert_array_equal(weights.read(name), wanted.astype(np.float32))
    assert weights.shape("model.layers.0.mlp.down_proj.weight") == (32, 64)
    assert weights.shape("model.norm.weight") == (32,)


def test_a_part_of_a_split_model_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf({"split.no": 1, "split.count": 2}, {"blk.0.ffn_up.weight": None})
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf is part 2 of 2 of a split model.*--merge"
    ):
        converted(path, tmp_path / "hf")
    converted(write_gguf({"split.no": 0, "split.count": 1}), tmp_path / "whole")


def test_what_is_wrong_is_said_of_the_file_that_was_named(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tensors={"blk.0.ffn_up.weight": None})
    with pytest.raises(CheckpointError) as raised:
        gguf_folder_cached(path)
    assert str(raised.value).startswith(f"{path}: tensor blk.0.ffn_up.weight is missing")


def test_a_value_that_config_json_may_not_have_is_said_of_the_file(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    """The folder is in the cache, and was made for this file alone."""
    gguf_path = write_gguf(metadata={"llama.attention.layer_norm_rms_epsilon": 0.0})
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError) as raised:
        make_gguf_folder(gguf_path, tmp_path / "folder")
    assert str(raised.value).startswith(f"{gguf_path}: as config.json: rms_norm_eps is 0.0: wanted")


def test_config_says_what_the_file_says(write_gguf: WriteGguf, tmp_path: Path) -> None:
    folder = converted(write_gguf(), tmp_path / "hf")
    assert read_json(folder / "config.json") == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 9,
        "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    assert read_json(folder / "generation_config.json") == {"bos_token_id": 0, "eos_token_id": 0}
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    assert tokenizer_config["chat_template"] == "{{ messages[0].content }}"
    assert tokenizer_config["eos_token"] == "<|end|>"


@pytest.mark.covers("J08")
def test_a_template_for_tools_is_read_too(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf({"tokenizer.chat_template.tool_use": "{{ tools }}"})
    config = read_json(converted(path, tmp_path / "both") / "tokenizer_config.json")
    assert read_chat_templates(tmp_path, config, KeptFiles()) == {
        DEFAULT: "{{ messages[0].content }}",
        TOOL_USE: "{{ tools }}",
    }
    path = write_gguf({
        "tokenizer.chat_template": None, "tokenizer.chat_template.tool_use": "{{ tools }}"
    })  # fmt: skip
    config = read_json(converted(path, tmp_path / "alone") / "tokenizer_config.json")
    assert read_chat_templates(tmp_path, config, KeptFiles())[DEFAULT] == "{{ tools }}"


@pytest.mark.parametrize(("end_of_turn", "stops"), [(3, [0, 3]), (0, 0)])
def test_an_end_of_turn_stops_an_answer_too(
    write_gguf: WriteGguf, tmp_path: Path, end_of_turn: int, stops: object
) -> None:
    path = write_gguf({"tokenizer.ggml.eot_token_id": end_of_turn})
    folder = converted(path, tmp_path / "hf")
    assert read_json(folder / "generation_config.json")["eos_token_id"] == stops
    assert read_json(folder / "config.json")["eos_token_id"] == 0


def test_an_end_of_messages_with_calls_stops_an_answer_too(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    """GLM ends a message that calls tools with a token of its own."""
    path = write_gguf({"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4})
    stops = read_json(converted(path, tmp_path / "hf") / "generation_config.json")
    assert stops["eos_token_id"] == [0, 3, 4]


def test_an_output_matrix_unties_the_embedding(write_gguf: WriteGguf, tmp_path: Path) -> None:
    output = np.ones((9, 32), np.float32)
    folder = converted(write_gguf(tensors={"output.weight": output}), tmp_path / "hf")
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint_in(folder).read("lm_head.weight"), output)


def test_tokenizer_splits_digits_and_keeps_marked_tokens_whole(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    folder = converted(write_gguf(), tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab a12  1<|end|><think>b").tokens == [
        "ab", "Ġa", "1", "2", "Ġ", "Ġ", "1", "<|end|>", "<think>", "b",
    ]  # fmt: skip
    ids = tokenizer.encode("ab<|end|><think>").ids
    assert tokenizer.decode(ids) == "ab<think>"  # control tokens are special, others are not
    assert tokenizer.get_vocab_size() == 9


def test_gpt2_pre_tokenizer_keeps_digits_with_their_space(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    tokens = ["<|end|>", "a", "Ġ", "1", "2", "12", "Ġ12"]
    path = write_gguf(
        {
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
            "tokenizer.ggml.merges": ["1 2", "Ġ 12"],
            "tokenizer.ggml.add_bos_token": True,
        },
        {"token_embd.weight": np.zeros((7, 32), np.float32)},
    )
    folder = converted(path, tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a 12", add_special_tokens=False).tokens == ["a", "Ġ12"]
    assert tokenizer.encode("a").tokens == ["<|end|>", "a"]


WRONG_SHAPE = np.zeros((3, 32), np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "wanted"),
    [
        ({"tokenizer.ggml.model": "bert"}, {}, "ggml.model is 'bert': supported is gpt2, llama"),
        ({"tokenizer.ggml.pre": "bloom"}, {}, "pre is 'bloom': supported is gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, {}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.tokens": ["a"] * 9}, {}, "names a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, {}, "1 token types for 9 tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, {}, "merge 'a zz'"),
        ({"tokenizer.ggml.eos_token_id": 9}, {}, "eos_token_id is 9: wanted 0 to 8"),
        ({"tokenizer.ggml.eot_token_id": 9}, {}, "eot_token_id is 9: wanted 0 to 8"),
        ({"llama.block_count": None}, {}, "llama.block_count is missing"),
        ({"llama.block_count": 10**6}, {}, "wanted 1 to 1024 layers"),
        ({"llama.attention.head_count_kv": 3}, {}, "multiple of the KV heads"),
        ({"llama.attention.head_count": 0}, {}, "wanted"),
        ({"llama.attention.key_length": 5}, {}, "even head size"),
        ({"llama.rope.dimension_count": 2}, {}, "RoPE over the whole head"),
        ({"llama.expert_count": 8}, {}, "expert_used_count is missing"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.factor is missing"),
        ({}, {"rope_freqs.weight": np.ones(2, np.float32)}, "not Llama 3's scaling of RoPE"),
        ({"llama.rope.freq_base": 0.0}, {}, "RoPE base above 0"),
        ({}, {"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight is missing"),
        ({}, {"blk.0.attn_q.bias": np.ones(16, np.float32)}, "attn_q.bias is not part of"),
        ({}, {"blk.0.attn_k.weight": WRONG_SHAPE}, r"\[3, 32\]: wanted \[8, 32\]"),
    ],
)
def test_what_is_not_supported_is_named(
    write_gguf: WriteGguf, metadata: dict[str, Any], tensors: dict[str, Any], wanted: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match=wanted):
        converted(write_gguf(metadata, tensors), tmp_path / "hf")


@pytest.mark.parametrize(
    "key",
    [
        *("block_count", "embedding_length", "feed_forward_length", "context_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_key(
    write_gguf: WriteGguf, tmp_path: Path, key: str
) -> None:
    said = rf"\.gguf: metadata key llama\.{re.escape(key)} is 0(\.0)?: wanted "
    with pytest.raises(CheckpointError, match=said):
        converted(write_gguf({f"llama.{key}": 0}), tmp_path / "hf")


def test_what_an_architecture_does_not_have_is_refused_with_its_key(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    key = "attention.sliding_window"
    with pytest.raises(CheckpointError, match=rf"metadata key llama\.{key} is 8: wanted "):
        converted(write_gguf({f"llama.{key}": 8}), tmp_path / "hf")


@pytest.mark.parametrize(
    "key", ["embedding_length", "feed_forward_length", "attention.head_count", "block_count",
            "attention.key_length"],
)  # fmt: skip
def test_huge_sizes_are_named_and_take_no_memory(
    write_gguf: WriteGguf, tmp_path: Path, key: str
) -> None:
    path = write_gguf({f"llama.{key}": 2**27})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="134217728"):
            converted(path, tmp_path / "hf")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


def test_another_architecture_is_named(write_gguf: WriteGguf, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture is 'gemma2': supported is llama"):
        converted(write_gguf(architecture="gemma2"), tmp_path / "hf")


def test_the_cache_is_keyed_by_the_file(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf()
    (tmp_path / "elsewhere").mkdir()
    first = gguf_folder_cached(path)
    assert first.name == "tiny"
    assert first.is_relative_to(tmp_path / "cache")
    assert (first / "weights.gguf").readlink() == path
    written_at_ns = (first / "config.json").stat().st_mtime_ns
    assert gguf_folder_cached(path) == first
    assert (first / "config.json").stat().st_mtime_ns == written_at_ns
    moved = path.rename(tmp_path / "elsewhere" / path.name)
    assert gguf_folder_cached(moved) == first
    assert (first / "weights.gguf").readlink() == moved
    other = gguf_folder_cached(write_gguf({"llama.rope.freq_base": 7000.0}))
    assert other != first
    assert read_json(other / "config.json")["rope_theta"] == 7000.0


def test_a_failed_conversion_leaves_nothing_behind(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tensors={"output_norm.weight": None})
    with pytest.raises(CheckpointError, match="output_norm"):
        gguf_folder_cached(path)
    left = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert left == [".tiny.lock"]


def test_a_moved_file_in_a_cache_that_cannot_be_written_is_one_sentence(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf()
    folder = gguf_folder_cached(path)
    moved = path.parent / "elsewhere" / path.name
    moved.parent.mkdir()
    path.rename(moved)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*PDSERVE_CACHE") as caught:
        gguf_folder_cached(moved)
    assert str(folder) in str(caught.value)
    monkeypatch.undo()


def test_a_file_that_is_gone_is_named(write_gguf: WriteGguf, tmp_path: Path) -> None:
    """What is packed is named by when its files were changed."""
    path = write_gguf()
    checkpoint = checkpoint_in(converted(path, tmp_path / "hf"))
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.stamps()
