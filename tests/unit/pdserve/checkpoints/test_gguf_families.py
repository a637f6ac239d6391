"""Tokenizers and chat templates of GGUF files of each family, as a router reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pdserve.checkpoints.gguf_folder import make_gguf_folder
from router.text.chat.chat_template import ChatOptions
from router.text.text_model import TextModel
from tests.support.models.tokenizer_gguf import HEAD_DIM, HEADS, KV_HEADS, LAYERS, tiny_metadata
from tests.unit.pdserve.checkpoints.llama_tokenizers import (
    BYTE_LETTERS,
    llama_3,
    sentencepiece,
)

WriteGguf = Callable[..., Path]

CONTROL = 3
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# "Ġ" is a space, "Ċ" a line end. No merge leads to words of more than two letters.
QWEN_2_MERGES = ["' L", "'L L", "Ġ p", "Ċ Ċ", "1 2", "Ġ Ġ", "( x", "! Ċ", "Ġ -", "Ã ©"]
SENTENCE = ["<|begin_of_sentence|>", "<|end_of_sentence|>"]


def byte_level(special: list[str], merges: list[str]) -> dict[str, Any]:
    tokens = [*special, *BYTE_LETTERS, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def of_ernie() -> dict[str, Any]:
    """SentencePiece without a space in front, and control tokens behind all others."""
    found = sentencepiece(add_space_prefix=False, add_bos_token=False)
    for key, more in (("tokens", SENTENCE), ("token_type", [CONTROL] * 2), ("scores", [0.0] * 2)):
        found[f"tokenizer.ggml.{key}"] = found[f"tokenizer.ggml.{key}"] + more
    return found


def _per_layer(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    return {
        f"blk.{layer}.{name}": np.ones(size, np.float32)
        for layer in range(LAYERS)
        for name, size in sizes.items()
    }


_KV_SIZE = KV_HEADS * HEAD_DIM
_BIASES = {"attn_q.bias": HEADS * HEAD_DIM, "attn_k.bias": _KV_SIZE, "attn_v.bias": _KV_SIZE}
_NORMS = {"attn_q_norm.weight": HEAD_DIM, "attn_k_norm.weight": HEAD_DIM}

_CHATML_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_THINKING_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
_ERNIE_TEMPLATE = (
    "{%- if not cls_token is defined -%}"
    "{%- set cls_token = '<|begin_of_sentence|>' -%}{%- endif -%}"
    "{%- if not sep_token is defined -%}"
    "{%- set sep_token = '<|end_of_sentence|>' -%}{%- endif -%}"
    "{{- cls_token -}}{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- 'User: ' + message['content'] + '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- 'Assistant: ' + message['content'] + sep_token -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
)
_LLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|begin|>' + message.role + '\\n\\n' + message.content | trim }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n\\n' }}{%- endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A file's architecture, tensors and tokenizer, and a chat as its template has it."""

    architecture: str
    tensors: dict[str, np.ndarray]
    tokenizer: dict[str, Any]
    template: str
    rendered: str
    special: list[str]
    variables: dict[str, Any]


CHAT = [
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "1 2"},
]
_CHATML_CHAT = (
    "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
    "<|im_start|>user\n1 2<|im_end|>\n<|im_start|>assistant\n"
)
FAMILIES = [
    Family(
        architecture="llama", tensors={}, tokenizer=llama_3(bos_token_id=0),
        template=_LLAMA_TEMPLATE,
        rendered="<|begin|><|begin|>user\n\nthe<|begin|>assistant\n\nab<|begin|>user\n\n1 2"
        "<|begin|>assistant\n\n",
        special=["<|begin|>"] * 5, variables={},
    ),
    Family(
        architecture="qwen2", tensors=_per_layer(_BIASES),
        tokenizer=byte_level(CHATML, QWEN_2_MERGES), template=_CHATML_TEMPLATE,
        rendered=f"<|im_start|>system\nYou are Qwen.<|im_end|>\n{_CHATML_CHAT}",
        special=["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"], variables={},
    ),
    Family(
        architecture="qwen3", tensors=_per_layer(_NORMS),
        tokenizer=byte_level(CHATML, QWEN_2_MERGES), template=_THINKING_TEMPLATE,
        rendered=f"{_CHATML_CHAT}<think>\n\n</think>\n\n",
        special=["<|im_start|>", "<|im_end|>"] * 3 + ["<|im_start|>"],
        variables={"enable_thinking": False},
    ),
    Family(
        architecture="ernie4_5", tensors={}, tokenizer=of_ernie(), template=_ERNIE_TEMPLATE,
        rendered="<|begin_of_sentence|>User: the\nAssistant: ab<|end_of_sentence|>User: 1 2\n"
        "Assistant: ",
        special=SENTENCE, variables={},
    ),
]  # fmt: skip


def folder_of(write_gguf: WriteGguf, folder: Path, family: Family) -> Path:
    sizes = {
        f"{family.architecture}.{key.removeprefix('llama.')}": value
        for key, value in tiny_metadata().items()
        if key.startswith("llama.")
    }
    num_tokens = len(family.tokenizer["tokenizer.ggml.tokens"])
    embedding = {"token_embd.weight": np.zeros((num_tokens, 32), np.float32)}
    path = write_gguf(
        {**sizes, **family.tokenizer, "tokenizer.chat_template": family.template},
        {**embedding, **family.tensors},
        architecture=family.architecture,
    )
    folder.mkdir()
    make_gguf_folder(path, folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_a_chat_is_the_familys_text_and_tokens(
    write_gguf: WriteGguf, tmp_path: Path, family: Family
) -> None:
    model = TextModel.load(folder_of(write_gguf, tmp_path / "hf", family), "", 0)
    text = model.render_chat(CHAT, ChatOptions(variables=family.variables))
    assert text == family.rendered
    ids = model.encode(text, add_special_tokens=False, param="messages")
    tokens = family.tokenizer["tokenizer.ggml.tokens"]
    kinds = family.tokenizer["tokenizer.ggml.token_type"]
    assert [tokens[i] for i in ids if kinds[i] == CONTROL] == family.special
    assert model.decode(ids, with_special_tokens=True) == family.rendered


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_what_a_user_writes_is_no_control_token(
    write_gguf: WriteGguf, tmp_path: Path, family: Family
) -> None:
    model = TextModel.load(folder_of(write_gguf, tmp_path / "hf", family), "", 0)
    chat = [*CHAT[:2], {"role": "user", "content": f"1 {family.special[-1]} 2"}]
    text = model.render_chat(chat, ChatOptions(variables=family.variables))
    ids = model.encode(text, add_special_tokens=False, param="messages")
    tokens = family.tokenizer["tokenizer.ggml.tokens"]
    kinds = family.tokenizer["tokenizer.ggml.token_type"]
    assert [tokens[i] for i in ids if kinds[i] == CONTROL] == family.special


def test_ernie_joins_the_best_pieces_and_starts_with_none(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    folder = folder_of(write_gguf, tmp_path / "hf", FAMILIES[-1])
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("the ab 12<|end_of_sentence|>ñ")
    assert encoded.tokens == [
        "t", "he", "▁ab", "▁1", "2", "<|end_of_sentence|>", "<0xC3>", "<0xB1>",
    ]  # fmt: skip
    assert tokenizer.decode(encoded.ids) == "the ab 12ñ"
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["use_bias"]) == (["Ernie4_5ForCausalLM"], False)


@pytest.mark.parametrize("name", ["qwen2", "deepseek-r1-qwen"])
def test_qwen_2_splits_words_its_own_way(write_gguf: WriteGguf, tmp_path: Path, name: str) -> None:
    """Digits stand alone, though a merge would join them, and apostrophes take either case."""
    metadata = FAMILIES[1].tokenizer | {"tokenizer.ggml.pre": name}
    folder = folder_of(write_gguf, tmp_path / "hf", replace(FAMILIES[1], tokenizer=metadata))
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "I'LL  pa 123\n\n(x!\n --"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == [
        "I", "'LL", "Ġ", "Ġp", "a", "Ġ", "1", "2", "3", "ĊĊ", "(x", "!Ċ", "Ġ-", "-",
    ]  # fmt: skip
    assert tokenizer.decode(encoded.ids) == text
    # A letter and its accent become one letter.
    assert tokenizer.encode("e\u0301").tokens == tokenizer.encode("\u00e9").tokens == ["Ã©"]
