"""A GGUF file of gpt-oss as a folder: its words, its ends, and what a router and grammars read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.runner.weights.spec.model_spec import read_eos_token_ids
from grammars.compiler import GrammarCompiler
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from router.text.text_model import TextModel
from tests.support.models.tokenizer_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    tiny_metadata,
    tiny_tensors,
)
from tests.unit.pdserve.checkpoints.llama_tokenizers import BYTE_LETTERS

WriteGguf = Callable[..., Path]

EXPERTS, INNER = 2, 16
# "Ġ" is a space, "Ċ" a line end.
MERGES = ["L L", "' LL", "I 'LL", "Ġ y", "1 2", "12 3", "4 5", "/ b", "/ /", "Ċ Ċ", "// ĊĊ"]
SPECIAL = [
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|channel|>", "<|call|>"),
]
PLAIN = [*BYTE_LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
TOKENS = [*PLAIN, *SPECIAL]
PART = {
    "post_attention_norm.weight": (HIDDEN,),
    "attn_q.bias": (HEADS * HEAD_DIM,),
    "attn_k.bias": (KV_HEADS * HEAD_DIM,),
    "attn_v.bias": (KV_HEADS * HEAD_DIM,),
    "attn_output.bias": (HIDDEN,),
    "attn_sinks.weight": (HEADS,),
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.weight": (EXPERTS, INNER, HIDDEN),
    "ffn_gate_exps.bias": (EXPERTS, INNER),
    "ffn_up_exps.weight": (EXPERTS, INNER, HIDDEN),
    "ffn_up_exps.bias": (EXPERTS, INNER),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, INNER),
    "ffn_down_exps.bias": (EXPERTS, HIDDEN),
}


def made(write_gguf: WriteGguf, folder: Path) -> Path:
    """The folder of a tiny file; the file names an end of turn, as some converters do."""
    usual = tiny_metadata().items()
    metadata = {f"gpt-oss.{key[6:]}": one for key, one in usual if key.startswith("llama.")}
    metadata |= {
        "gpt-oss.attention.sliding_window": 16,
        "gpt-oss.expert_count": EXPERTS,
        "gpt-oss.expert_used_count": 1,
        "gpt-oss.expert_feed_forward_length": INNER,
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * len(PLAIN) + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": TOKENS.index("<|startoftext|>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|return|>"),
        "tokenizer.ggml.eot_token_id": TOKENS.index("<|end|>"),
    }
    not_there = {name: None for name in tiny_tensors() if ".ffn_" in name}
    tensors = {
        f"blk.{layer}.{name}": np.ones(shape, np.float32)
        for layer in range(LAYERS)
        for name, shape in PART.items()
    }
    wide = {name: np.ones((len(TOKENS), HIDDEN), np.float32) for name in ("token_embd", "output")}
    tensors |= {f"{name}.weight": one for name, one in wide.items()}
    path = write_gguf(metadata, {**not_there, **tensors}, architecture="gpt-oss")
    folder.mkdir()
    make_gguf_folder(path, folder)
    return folder


def test_words_are_those_of_gpt_4o(write_gguf: WriteGguf, tmp_path: Path) -> None:
    folder = made(write_gguf, tmp_path / "hf")
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    text = "HelloWORLDis's 12345 a/b//\n\nX  y I'LL Überéa"
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert words == [
        "Hello", "WORLDis's", "Ġ", "123", "45", "Ġa", "/b", "//ĊĊ", "X", "Ġ", "Ġy", "ĠI'LL",
        "ĠÃľberÃ©a",
    ]  # fmt: skip
    assert tokenizer.encode("12345//\n\n y").tokens == ["123", "45", "//ĊĊ", "Ġy"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_turn_ends_with_an_answer_or_a_call_and_not_with_a_part(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    folder = made(write_gguf, tmp_path / "hf")
    ends = {TOKENS.index(text) for text in ("<|return|>", "<|call|>", "<|endoftext|>")}
    assert read_eos_token_ids(folder) == ends
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] in ends


def test_a_router_and_grammars_read_the_tokenizer(write_gguf: WriteGguf, tmp_path: Path) -> None:
    folder = made(write_gguf, tmp_path / "hf")
    model = TextModel.load(folder, "", 0)
    text = "<|start|>user<|message|>I'LL y<|end|>"
    ids = model.encode(text, add_special_tokens=False, param="messages")
    assert [TOKENS[i] for i in ids] == [
        "<|start|>", "u", "s", "e", "r", "<|message|>", "I'LL", "Ġy", "<|end|>",
    ]  # fmt: skip
    assert model.decode(ids, with_special_tokens=True) == text
    assert GrammarCompiler.load(folder, len(TOKENS), read_eos_token_ids(folder)) is not None
