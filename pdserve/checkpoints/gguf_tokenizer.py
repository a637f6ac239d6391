"""tokenizer.json and tokenizer_config.json out of a GGUF file's metadata.

Supported are byte-level BPE vocabularies (`tokenizer.ggml.model` "gpt2") whose pre-tokenizer is one
of `_PRE_TOKENIZERS`. A wrong pre-tokenizer would give plausible but different tokens, so an unknown
one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.errors import CheckpointError
from pdserve.checkpoints.gguf_file import GgufFile

# Token types of the GGUF specification.
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Every digit stands alone, even from the space before it, then GPT-2's rule.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
}


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer that `gguf` describes. Raises CheckpointError for unsupported kinds."""
    _require(gguf, "tokenizer.ggml.model", ("gpt2",))
    pre_tokenizer = _require(gguf, "tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS))
    tokens = gguf.texts("tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.tokens names a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(gguf, vocabulary)))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(gguf, tokenizer, tokens)
    if gguf.flag("tokenizer.ggml.add_bos_token", False):
        bos_id = special_token_ids(gguf)["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A",
            pair=f"{tokens[bos_id]} $A $B",
            special_tokens=[(tokens[bos_id], bos_id)],
        )
    return tokenizer


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and the chat template where there is one."""
    tokens = gguf.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": gguf.flag("tokenizer.ggml.add_bos_token", False),
    }
    for name, token_id in special_token_ids(gguf).items():
        config[name] = tokens[token_id]
    if "tokenizer.chat_template" in gguf.metadata:
        config["chat_template"] = gguf.text("tokenizer.chat_template")
    return config


def special_token_ids(gguf: GgufFile) -> dict[str, int]:
    """Token ids by role (`bos_token`, `eos_token`, `unk_token`, `pad_token`), as far as given."""
    num_tokens = len(gguf.texts("tokenizer.ggml.tokens"))
    ids = {}
    for name, key in _SPECIAL_TOKEN_KEYS.items():
        if key not in gguf.metadata:
            continue
        ids[name] = gguf.integer(key)
        if not 0 <= ids[name] < num_tokens:
            raise CheckpointError(
                f"{gguf.path}: {key} is {ids[name]}: wanted 0 to {num_tokens - 1}"
            )
    if "bos_token" not in ids and gguf.flag("tokenizer.ggml.add_bos_token", False):
        raise CheckpointError(f"{gguf.path}: add_bos_token is set and there is no bos_token_id")
    return ids


def _require(gguf: GgufFile, key: str, supported: tuple[str, ...]) -> str:
    found = gguf.text(key)
    if found not in supported:
        raise CheckpointError(
            f"{gguf.path}: {key} is {found!r}: supported is {', '.join(supported)}"
        )
    return found


def _merges(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in gguf.texts("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(f"{gguf.path}: merge {merge!r} names tokens that do not exist")
        merges.append((left, right))
    return merges


def _add_marked_tokens(gguf: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens; ids stay."""
    token_types = gguf.integers("tokenizer.ggml.token_type")
    if len(token_types) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: {len(token_types)} token types for {len(tokens)} tokens"
        )
    marked = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in marked if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in marked
            if kind == _USER_DEFINED
        ]
    )
