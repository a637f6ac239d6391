"""Tokenizers of Llama models as GGUF files hold them."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

BYTE_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
# "Ġ" is a space, "Ċ" a line end. No merge leads to these words.
LLAMA_3_WORDS = ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "(x", "ĠĠ", "!?Ċ", "Ġ--"]
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 4}
BYTES = [f"<0x{value:02X}>" for value in range(256)]
# Best first, as SentencePiece numbers them: letters come last.
PIECES = ["▁t", "he", "▁a", "ab", "▁the", "bab", "abab", "▁ab", "▁▁", "▁1", "12", "éa"]
LETTERS = [*"▁theab12é<0x6>"]


def llama_3(**changes: Any) -> dict[str, Any]:
    tokens = ["<|begin|>", *dict.fromkeys([*BYTE_LETTERS, *LLAMA_3_WORDS]), "th", "the"]
    return {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["t h", "th e"],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def sentencepiece(**changes: Any) -> dict[str, Any]:
    types = {**SPECIAL, **dict.fromkeys(BYTES, 6), **dict.fromkeys([*PIECES, *LETTERS], 1)}
    num_marked = len(SPECIAL) + len(BYTES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.scores": [0.0] * num_marked
        + [-float(i) for i in range(len(PIECES) + len(LETTERS))],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
