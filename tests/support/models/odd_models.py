"""Folders of models that are odd in one way, as found in the wild; each is a tiny one otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.support.cluster.serving_up import serving_up
from tests.support.models.tiny_model import VOCAB_SIZE, make_tiny_model, write_json

ROWS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}[assistant] {% endif %}"
TOOLS = (
    "{%- if tools %}<tools>{{ tools|tojson }}</tools> Answer in <tool_call> "
    '{"name": ..., "arguments": ...} </tool_call>\n{%- endif %}'
)
THINKS = "{% if add_generation_prompt %}[assistant] <think>\n{% endif %}"
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('one system message, first') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
)
EXTRA = "<extra>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OBJECT = r'\{"a": [0-9], "b": "[xy]"\}'
CONSTRAINED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, OBJECT),
    ({"structured_outputs": {"regex": r"\d{4}-\d{2}"}}, "[0-9]{4}-[0-9]{2}"),
    ({"guided_choice": [" a b"]}, " a b"),
)  # fmt: skip
"""Fields of a request, and the expression of all answers to it."""


def rewrite(path: Path, **fields: Any) -> None:
    """Change some fields of a JSON file, which need not be there; None takes one out."""
    old = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {key: one for key, one in (old | fields).items() if one is not None})


def template(folder: Path, text: Any) -> None:
    """Give the model another chat template, or none."""
    rewrite(folder / "tokenizer_config.json", chat_template=text)


def larger_tokenizer(folder: Path, *, special: bool) -> None:
    """Add a token that the model does not have."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(EXTRA, special=special)])
    tokenizer.save(str(path))


def sentencepiece(folder: Path) -> None:
    """Write a tokenizer whose decoder drops the first space of a text, as Llama 2's does."""
    shown = {i: f"<0x{i:02X}>" for i in range(128)}
    shown |= {byte: chr(byte) for byte in range(0x21, 0x7F)} | {0x20: "▁"}
    vocab = {"<eos>": 0, "<bos>": 1} | {text: 2 + byte for byte, text in shown.items()}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<bos>")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    layout = json.loads(tokenizer.to_str())
    layout["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    write_json(folder / "tokenizer.json", layout)


def _ends_by_the_tokenizer(folder: Path) -> None:
    rewrite(folder / "config.json", eos_token_id=1)
    rewrite(folder / "generation_config.json", eos_token_id=1)


def _ends_turns_by_its_template(folder: Path) -> None:
    """The token that is drawn at the end is one by another file, and no file calls it an end."""
    _ends_by_the_tokenizer(folder)
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_text().replace('"<eos>"', '"<|eot_id|>"'))
    (end,) = (one for one in layout["added_tokens"] if one["content"] == "<|eot_id|>")
    layout["added_tokens"].remove(end)
    write_json(path, layout)
    rewrite(folder / "tokenizer_config.json", eos_token=None, added_tokens_decoder={end["id"]: end})
    template(folder, ROWS.replace("\n", "<|eot_id|>") + BEGIN)


def _names_a_token_it_lacks(folder: Path) -> None:
    larger_tokenizer(folder, special=True)
    template(folder, EXTRA + ROWS + BEGIN)


Change = Callable[[Path], None]

ODD: Mapping[str, Change] = {
    "thinks in its template": lambda f: template(f, f"{ROWS}{THINKS}{{# </think> #}}"),
    "has no template": lambda f: template(f, None),
    "has two named templates": lambda f: template(f, [
        {"name": "default", "template": ROWS + BEGIN},
        {"name": "tool_use", "template": TOOLS + ROWS + BEGIN},
    ]),
    "takes one system message": lambda f: template(f, STRICT + BEGIN),
    "names a token beyond the vocabulary": _names_a_token_it_lacks,
    "has floats for whole numbers": lambda f: rewrite(
        f / "generation_config.json", top_k=50.0, top_p=1, temperature=1),
    "keeps one token by default": lambda f: rewrite(
        f / "generation_config.json", top_k=-1, top_p=0.0),
    "ends by its tokenizer": _ends_by_the_tokenizer,
    "ends turns by its template": _ends_turns_by_its_template,
    "has one special token too many": lambda f: larger_tokenizer(f, special=True),
    "has one plain token too many": lambda f: larger_tokenizer(f, special=False),
    "has an end beyond the vocabulary": lambda f: rewrite(
        f / "generation_config.json", eos_token_id=[0, 99_999]),
    "has the tokenizer of SentencePiece": sentencepiece,
}  # fmt: skip


def make_odd_model(folder: Path, *changes: str) -> Path:
    """Write a tiny model that is odd in these ways, and return its folder, which is made."""
    make_tiny_model(folder)
    for change in changes:
        ODD[change](folder)
    return folder


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[httpx.Client]:
    """A cluster of `pdserve up` over the model; the block gets a client of its router."""
    with (
        serving_up(folder, model, "--mixed", "1", "--tool-template", "builtin", *flags) as up,
        httpx.Client(base_url=f"http://127.0.0.1:{up.port}/v1", timeout=60) as client,
    ):
        yield client


def check_completions(client: httpx.Client) -> None:
    """Plain and constrained completions are served, and the end token ends one."""
    plain = answer(client, "completions", prompt="ab", max_tokens=4)
    assert plain["choices"][0]["finish_reason"] in ("stop", "length")
    ended = answer(client, "completions", prompt=chr(4), max_tokens=30)["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    for fields, wanted in CONSTRAINED:
        one = answer(client, "completions", prompt="ab", max_tokens=90, **fields)["choices"][0]
        assert re.fullmatch(wanted, one["text"]), (fields, one)
        assert one["finish_reason"] == "stop"


def check_chats(client: httpx.Client) -> None:
    """Plain and constrained chats and calls of a tool are served."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 90}
    assert answer(client, "chat/completions", **asked)["choices"][0]["message"]["content"] != ""
    for fields, wanted in CONSTRAINED:
        one = answer(client, "chat/completions", **asked, **fields)["choices"][0]
        assert re.fullmatch(wanted, one["message"]["content"]), (fields, one)
    function = {"name": "set", "parameters": SCHEMA}
    calls: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    message = answer(client, "chat/completions", **asked, **calls)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert re.fullmatch(OBJECT, call["function"]["arguments"])


def answer(client: httpx.Client, path: str, **fields: Any) -> Any:
    """The answer of a request, which must be served."""
    reply = client.post(path, json={"temperature": 0} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()
