"""tokenizer.json and tokenizer_config.json out of a GGUF file's metadata.

Supported are SentencePiece BPE vocabularies (`tokenizer.ggml.model` "llama") and byte-level BPE
ones ("gpt2") whose pre-tokenizer is one of `_PRE_TOKENIZERS`. A wrong pre-tokenizer would give
plausible but different tokens, so an unknown one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from pdserve.checkpoints.gguf_sentencepiece import sentencepiece_tokenizer

# Token types of the GGUF specification.
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_CHAT_TEMPLATES = {
    "default": "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
}
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GPT_OSS_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Every digit stands alone, even from the space before it, then GPT-2's rule.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# Words take one leading sign or space, numbers come in threes, line ends stay together.
_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with digits that stand alone.
_QWEN_2_WORDS = _LLAMA_3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


# Words of GPT-4o: a run of capitals may begin one, what is elided ends one, and a sign takes the
# slashes behind it.
_CAPITALS, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ELIDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]*[{_LOWER}]+{_ELIDED}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]+[{_LOWER}]*{_ELIDED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt_4o() -> pre_tokenizers.PreTokenizer:
    return _words(_GPT_4O_WORDS)


def _llama_3() -> pre_tokenizers.PreTokenizer:
    return _words(_LLAMA_3_WORDS)


def _qwen_2() -> pre_tokenizers.PreTokenizer:
    return _words(_QWEN_2_WORDS)


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA_3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_GPT_4_NAMES = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
"""The words of Llama 3, which took them from GPT-4; merges alone make tokens of them. Phi-4's, and
GLM's."""
_QWEN_2_NAMES = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "gpt-4o": _gpt_4o,
    **dict.fromkeys(_QWEN_2_NAMES, _qwen_2),
    **dict.fromkeys((*_LLAMA_3_NAMES, *_GPT_4_NAMES), _llama_3),
}


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Return the tokenizer that `gguf` describes. Raises CheckpointError for unsupported kinds."""
    model = _require(gguf, "tokenizer.ggml.model", ("gpt2", "llama"))
    tokens = gguf.texts("tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.tokens names a token twice")
    token_types = gguf.integers("tokenizer.ggml.token_type")
    if len(token_types) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: {len(token_types)} token types for {len(tokens)} tokens"
        )
    if model == "llama":
        tokenizer = sentencepiece_tokenizer(gguf, vocabulary, token_types)
        _add_marked_tokens(tokenizer, tokens, token_types, special_types=(_UNKNOWN, _CONTROL))
    else:
        tokenizer = _byte_level_tokenizer(gguf, vocabulary)
        _add_marked_tokens(tokenizer, tokens, token_types, special_types=(_CONTROL,))
    if _adds_bos(gguf):
        bos_id = special_token_ids(gguf)["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A",
            pair=f"{tokens[bos_id]} $A $B",
            special_tokens=[(tokens[bos_id], bos_id)],
        )
    return tokenizer


def tokenizer_config(gguf: GgufFile, max_positions: int) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens by role, and the chat templates if any.

    `max_positions` is the longest text in tokens.
    """
    tokens = gguf.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(gguf),
    }
    for name, token_id in special_token_ids(gguf).items():
        config[name] = tokens[token_id]
    templates = [
        {"name": name, "template": gguf.text(key)}
        for name, key in _CHAT_TEMPLATES.items()
        if key in gguf.metadata
    ]
    if templates:
        config["chat_template"] = templates if len(templates) > 1 else templates[0]["template"]
    return config


def special_token_ids(gguf: GgufFile) -> dict[str, int]:
    """Return token ids by role (`bos_token`, `eos_token`, `unk_token`, `pad_token`) where given.

    Raises `CheckpointError` when texts start with a BOS token that the file does not name.
    """
    found = {name: _token_id(gguf, key) for name, key in _SPECIAL_TOKEN_KEYS.items()}
    ids = {name: token_id for name, token_id in found.items() if token_id is not None}
    if "bos_token" not in ids and _adds_bos(gguf):
        raise CheckpointError(
            f"{gguf.path}: texts start with the BOS token and there is no bos_token_id"
        )
    return ids


def ends_of_turns(gguf: GgufFile) -> list[int]:
    """Return the tokens with which a chat model ends its turn.

    A file may name one, and one that ends a message that calls tools, as GLM's do. gpt-oss ends a
    turn with an answer or with a call, as its generation_config.json says, and what a file names
    ends a part of a turn.
    """
    if gguf.text("general.architecture") == "gpt-oss":
        tokens = {text: index for index, text in enumerate(gguf.texts("tokenizer.ggml.tokens"))}
        return [tokens[text] for text in _GPT_OSS_ENDS if text in tokens]
    named = (_token_id(gguf, f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom"))
    return [token_id for token_id in named if token_id is not None]


def _token_id(gguf: GgufFile, key: str) -> int | None:
    if key not in gguf.metadata:
        return None
    token_id = gguf.integer(key)
    num_tokens = len(gguf.texts("tokenizer.ggml.tokens"))
    if not 0 <= token_id < num_tokens:
        raise CheckpointError(f"{gguf.path}: {key} is {token_id}: wanted 0 to {num_tokens - 1}")
    return token_id


def _adds_bos(gguf: GgufFile) -> bool:
    """Return whether texts start with the BOS token; unless the file says so, its model decides."""
    is_llama = (
        gguf.text("tokenizer.ggml.model") == "llama"
        or gguf.text("tokenizer.ggml.pre", "") in _LLAMA_3_NAMES
    )
    return gguf.flag("tokenizer.ggml.add_bos_token", is_llama)


def _byte_level_tokenizer(gguf: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    name = _require(gguf, "tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS))
    # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
    options = {"ignore_merges": True} if name in _LLAMA_3_NAMES else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(gguf, vocabulary), **options))
    if name in _QWEN_2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


def _add_marked_tokens(
    tokenizer: Tokenizer, tokens: list[str], token_types: list[int], special_types: tuple[int, ...]
) -> None:
    """Add `special_types` as special tokens, user-defined ones as plain ones; ids stay."""
    marked = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in marked
            if kind in special_types
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in marked
            if kind == _USER_DEFINED
        ]
    )
