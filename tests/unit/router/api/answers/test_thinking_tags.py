"""Models that mark their thinking with other tags than most, and with tokens of any kind."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from common.request import FinishReason
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from tests.support.http.edge_model import MODEL_NAME, grammars_of, write_model_folder
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import chunks, plays
from tests.support.http.tool_models import HERMES_TEMPLATE

SEED, MAGISTRAL = ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Two and two?"}]}
STOPS = {"stop": ["Question:"]}
THOUGHT = "Question: two and two?"


@cache
def model(tags: tuple[str, str], kind: str, reasoning_format: str = "auto") -> TextModel:
    """A model whose tags are special tokens, other added tokens, or text alone."""
    begin, end = tags
    with TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = [AddedToken(tag, special=kind == "special", normalized=False) for tag in tags]
        if kind != "text":
            tokenizer.add_tokens(added)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        template = HERMES_TEMPLATE.replace("<think>", begin).replace("</think>", end)
        (folder / "chat_template.jinja").write_text(template)
        chat = ChatSettings(reasoning_format=reasoning_format)
        return TextModel.load(folder, MODEL_NAME, 0, chat)


@pytest.fixture(params=["special", "added", "text"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def edge_that_says(of: TextModel, said: str, size: int = 1) -> Edge:
    return make_edge(plays(chunks(of.spelt(said), FinishReason.STOP, size=size)), model=of)


async def answer(edge: Edge, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def deltas_of(stream: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


@pytest.mark.covers("T41")
@pytest.mark.parametrize("tags", [SEED, MAGISTRAL])
@pytest.mark.parametrize("size", [1, 1000])
async def test_thinking_is_told_from_the_answer(
    tags: tuple[str, str], kind: str, size: int
) -> None:
    of = model(tags, kind)
    said = f"{tags[0]}\n{THOUGHT}\n{tags[1]}\n\nFour. Question: three?"
    told = await answer(edge_that_says(of, said, size), "/v1/chat/completions", CHAT | STOPS)
    (choice,) = told["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Four. ")
    thinking = len(of.spelt(said[: said.index("\n\n")]))
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == thinking


@pytest.mark.covers("T41")
@pytest.mark.parametrize("tags", [SEED, MAGISTRAL])
async def test_a_stream_tells_thinking_from_the_answer(tags: tuple[str, str], kind: str) -> None:
    edge = edge_that_says(model(tags, kind), f"{tags[0]}hm{tags[1]}Four.")
    async with edge.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    deltas = deltas_of(response.text)
    for name, wanted in (("reasoning_content", "hm"), ("content", "Four.")):
        assert "".join(one.get(name) or "" for one in deltas) == wanted


HIDDEN: list[dict[str, Any]] = [
    {"include_reasoning": False},
    {"reasoning": {"exclude": True}},
    {"reasoning": {"exclude": True, "enabled": True}, "include_reasoning": True},
]
SHOWN: list[dict[str, Any]] = [
    {},
    {"include_reasoning": True},
    {"include_reasoning": None},
    {"reasoning": {"exclude": False}},
]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("asked", "is_shown"), [*((one, False) for one in HIDDEN), *((one, True) for one in SHOWN)]
)
async def test_thinking_is_left_out_where_it_is_not_wanted(
    asked: dict[str, Any], is_shown: bool, size: int
) -> None:
    of = model(SEED, "special")
    said = f"{SEED[0]}hm{SEED[1]}Four."
    told = await answer(edge_that_says(of, said, size), "/v1/chat/completions", CHAT | asked)
    (choice,) = told["choices"]
    assert choice["message"]["content"] == "Four."
    assert ("reasoning_content" in choice["message"]) is is_shown
    thinking = len(of.spelt(said[: said.index("Four")]))
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == thinking
    edge = edge_that_says(of, said, size)
    async with edge.client() as client:
        streamed = await client.post("/v1/chat/completions", json=CHAT | asked | {"stream": True})
    deltas = deltas_of(streamed.text)
    assert "".join(one.get("content") or "" for one in deltas) == "Four."
    thought = "".join(one.get("reasoning_content") or "" for one in deltas)
    assert thought == ("hm" if is_shown else "")
    assert ("reasoning_content" in streamed.text) is is_shown


@pytest.mark.covers("T41")
@pytest.mark.parametrize("tags", [SEED, MAGISTRAL])
@pytest.mark.parametrize("thinks", [None, True, False])
async def test_a_constraint_begins_behind_the_thinking(
    tags: tuple[str, str], kind: str, thinks: bool | None
) -> None:
    of = model(tags, kind)
    edge = edge_that_says(of, "yes")
    body = CHAT | {"structured_outputs": {"choice": ["yes", "no"]}}
    if thinks is not None:
        body |= {"chat_template_kwargs": {"enable_thinking": thinks}}
    await answer(edge, "/v1/chat/completions", body)
    (call,) = edge.generator.calls
    assert call.sampling.grammar is not None
    thought = f"{'' if thinks else tags[0]}hm\n{tags[1]}\n\n"
    for text, is_right in ((f"{thought}no", thinks is not False), ("no", not thinks)):
        matcher = grammars_of(of).matcher(call.sampling.grammar)
        ids = list(of.spelt(text))
        takes_all = matcher.try_consume_tokens(ids) == len(ids)
        assert (takes_all and matcher.is_accepting()) is is_right, text


@pytest.mark.covers("T41")
async def test_an_operator_who_names_no_tags_gets_those_of_the_template() -> None:
    edge = edge_that_says(model(SEED, "special", "think"), f"{SEED[0]}hm{SEED[1]}Four.")
    (choice,) = (await answer(edge, "/v1/chat/completions", CHAT))["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Four.")
