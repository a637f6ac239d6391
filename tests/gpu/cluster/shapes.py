"""Models of public shapes as folders without weights, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models.tiny_model import write_json

_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "vocab_size": 151936, "torch_dtype": "bfloat16", "head_dim": 128,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, the flags of its nodes, and the load on it; lengths are in tokens."""

    name: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    bits_lengths: Sequence[int] = (40, 100, 257, 500, 700, 1000)
    """Prompts whose answers are compared: one that a decode node computes itself, longer ones."""
    num_compared: int = 16
    compared_tokens: int = 96
    first_token_lengths: Sequence[int] = (1000, 4000)
    streamed_tokens: Mapping[int, int] = field(default_factory=lambda: {1: 256, 8: 256, 32: 256})
    """Tokens of an answer by the number of streams: with all prompts in, none has ended."""
    context: int = 1000
    """Tokens of a stream in the middle of its answer."""


TINY = Shape(
    name="tiny",
    config=_QWEN3 | _TINY,
    flags=(
        *("--block-size", "16", "--kv-cache-memory", "24MiB", "--num-threads", "1"),
        *("--max-num-batched-tokens", "128"),
    ),
    bits_lengths=(40, 100, 200),
    num_compared=8,
    first_token_lengths=(100, 300),
    context=200,
    streamed_tokens={1: 48, 4: 48},
)
SMALL = Shape(
    name="qwen3-0.6b",
    config=_QWEN3
    | {
        "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    flags=("--kv-cache-memory", "4GiB", "--max-num-batched-tokens", "4096",
           "--max-model-len", "8192", "--max-num-seqs", "64"),
)  # fmt: skip
LARGE = Shape(
    name="qwen3-8b",
    config=_QWEN3
    | {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    # Three nodes of 16.4 GB of weights share a card of 80 GB.
    flags=("--kv-cache-memory", "5632MiB", "--max-num-batched-tokens", "4096",
           "--max-model-len", "8192", "--max-num-seqs", "64"),
)  # fmt: skip
WIDE = replace(
    LARGE,
    flags=("--kv-cache-memory", "26GiB", "--max-num-batched-tokens", "4096",
           "--max-model-len", "8192", "--max-num-seqs", "128"),
    streamed_tokens={1: 256, 8: 256, 32: 256, 128: 768},
)  # fmt: skip
WIDE_CARD_MIB = 135_000
"""Memory of a card on which three nodes of `WIDE` fit."""


def make_folder(folder: Path, shape: Shape) -> Path:
    """Write config.json and a tokenizer of as many tokens as the model has; return the folder."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", shape.config | {"eos_token_id": 0, "bos_token_id": 1})
    write_json(
        folder / "tokenizer_config.json",
        {"chat_template": _CHAT_TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"},
    )
    _tokenizer(shape.config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def prompt_of(shape: Shape, length: int, salt: int) -> list[int]:
    """A prompt; those of another length or salt differ from the first token on."""
    size = shape.config["vocab_size"] - 300
    start = 104_729 * (salt + 1) + 31 * length
    return [300 + (7919 * at + start) % size for at in range(length)]


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, and further words that no text becomes, but that are shown: every token has a text."""
    names = ["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġ{number:x}" for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    return tokenizer
