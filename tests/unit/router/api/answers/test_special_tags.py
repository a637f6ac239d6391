"""Models whose tags of calls and of thinking are special tokens: these tags alone are read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from common.request import FinishReason
from router.text.text_model import TextModel
from router.tools.formats import HERMES
from tests.support.http.edge_model import EOS, MODEL_NAME, write_model_folder
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import chunks, plays
from tests.support.http.tool_models import HERMES_TEMPLATE, NOW

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
THINKS: dict[str, Any] = CHAT | {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT = "hm\n</think>\n\nHello"
CALL = HERMES.call_text("now", "{}")


@cache
def model() -> TextModel:
    with TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
        return TextModel.load(folder, MODEL_NAME, 0)


def ids_of(text: str) -> list[int]:
    return list(model().spelt(text))


async def answer(token_ids: list[int], finish: FinishReason, body: dict[str, Any]) -> Any:
    """The one choice, whole; that of a stream adds up to the same text."""
    edge = make_edge(plays(chunks(token_ids, finish)), model=model())
    async with edge.client() as client:
        whole = await client.post("/v1/chat/completions", json=body)
        streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    (choice,) = whole.json()["choices"]
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    for name in ("content", "reasoning_content"):
        assert "".join(one.get(name) or "" for one in deltas) == (choice["message"].get(name) or "")
    return choice


@pytest.mark.covers("T14")
@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("shown", [False, True])
async def test_the_end_of_an_answer_is_no_text_of_it(field: str, shown: bool) -> None:
    body = THINKS | {field: True, "skip_special_tokens": not shown}
    choice = await answer(ids_of(THOUGHT + EOS), FinishReason.STOP, body)
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "Hello" + (EOS if shown else "")


@pytest.mark.parametrize("shown", [False, True])
async def test_an_end_that_is_ignored_is_no_text(shown: bool) -> None:
    body = THINKS | {"ignore_eos": True, "skip_special_tokens": not shown}
    choice = await answer(ids_of(f"{THOUGHT}{EOS} world"), FinishReason.LENGTH, body)
    assert choice["message"]["content"] == ("Hello" + (EOS if shown else "") + " world")


async def test_a_call_is_read_and_the_end_behind_it_is_no_text() -> None:
    body = CHAT | {"tools": [NOW], "include_stop_str_in_output": True}
    choice = await answer(ids_of(f"Now.\n{CALL}{EOS}"), FinishReason.STOP, body)
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Now.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
