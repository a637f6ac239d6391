"""A random Llama of a few hundred kilobytes, as a Hugging Face folder: one token per ASCII byte.

Its answers mean nothing and are the same on every machine up to rounding, which is all that tests
of endings, failures and bad input need. Every answer is ASCII, so that any substring of one can be
a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_TOKEN_ID, BOS_TOKEN_ID = 0, 1
FIRST_BYTE_ID = 2
VOCAB_SIZE = 130
END_TOKEN_ID = FIRST_BYTE_ID + 4
"""After this token (ASCII's end of transmission) the likeliest next one is the end of sequence."""

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 128, 2, 4, 2, 16
_MAX_POSITION = 32_768
_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 7) -> Path:
    """Write the checkpoint into `folder`, which is made, and return it."""
    folder.mkdir(parents=True)
    save_file(tiny_weights(seed), folder / "model.safetensors")
    write_json(folder / "config.json", tiny_config())
    write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID})
    write_json(
        folder / "tokenizer_config.json",
        {"chat_template": _CHAT_TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"},
    )
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokens(text: str) -> list[int]:
    """The token ids of an ASCII text."""
    return [FIRST_BYTE_ID + byte for byte in text.encode("ascii")]


def token_id(shown: str) -> int:
    """The token that logprobs show as `shown`."""
    return EOS_TOKEN_ID if shown == "<eos>" else FIRST_BYTE_ID + ord(shown)


def prompt_tokens(length: int, *, salt: int = 0) -> list[int]:
    """A prompt of `length` tokens; prompts with another salt differ from the first token on."""
    draw = np.random.default_rng((salt, length))
    return [int(token) for token in draw.integers(END_TOKEN_ID + 1, VOCAB_SIZE, length)]


def tiny_config() -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": _MAX_POSITION,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_TOKEN_ID,
        "bos_token_id": BOS_TOKEN_ID,
    }


def tiny_weights(seed: int) -> dict[str, np.ndarray]:
    """Weights drawn large enough that the likeliest token is rarely a tie."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        values = draw.standard_normal((rows, columns)) * (scale / np.sqrt(columns))
        return np.asarray(values, np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN, 8.0),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB_SIZE, _HIDDEN, 3.0),
    }
    end = weights["model.embed_tokens.weight"][END_TOKEN_ID]
    weights["lm_head.weight"][EOS_TOKEN_ID] = 0.3 * end
    weights["lm_head.weight"][BOS_TOKEN_ID] = 0.0
    query, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}self_attn.q_proj.weight": matrix(query, _HIDDEN, 2.0),
            f"{prefix}self_attn.k_proj.weight": matrix(kv, _HIDDEN, 2.0),
            f"{prefix}self_attn.v_proj.weight": matrix(kv, _HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(_HIDDEN, query),
            f"{prefix}mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights


def write_json(path: Path, value: dict[str, Any]) -> None:
    """One JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    vocab = {"<eos>": EOS_TOKEN_ID, "<bos>": BOS_TOKEN_ID}
    vocab |= {shown: FIRST_BYTE_ID + byte for byte, shown in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<eos>", "<bos>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer


def _byte_characters() -> Sequence[str]:
    """How byte-level tokenizers write the ASCII bytes: printable ones as they are, others moved.

    The characters that stand for bytes without a printable form follow each other from U+0100 on.
    """
    printable = range(ord("!"), ord("~") + 1)
    shown, moved = [], 0
    for byte in range(128):
        if byte in printable:
            shown.append(chr(byte))
        else:
            shown.append(chr(0x100 + moved))
            moved += 1
    return shown
