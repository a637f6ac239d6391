"""What an answer says of its tokens: their ids, why it stopped, and the best of several choices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.request import FinishReason, TokenLogprobs
from router.core.generation import TokenChunk
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.scripted_generator import Call, plays, says

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT_PATH: {"prompt": "Hi"},
}
PATHS = list(BODIES)
MODEL = tiny_model()
EOS = min(MODEL.eos_token_ids)
HELLO = MODEL.encode("Hello world", add_special_tokens=False, param="text")


async def answer(edge: Edge, path: str, **fields: Any) -> Any:
    async with edge.client() as client:
        reply = await client.post(path, json=BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    if fields.get("stream"):
        return [one for one in events(reply.content) if one != "[DONE]"]
    return reply.json()


def stops_at(token_id: int) -> list[TokenChunk]:
    """An answer that a node ended at this token."""
    last = TokenChunk(
        first_index=len(HELLO), token_ids=(token_id,), finish_reason=FinishReason.STOP
    )
    return [TokenChunk(first_index=0, token_ids=HELLO), last]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("token_id", "fields", "reason"),
    [
        (EOS, {}, None),
        (EOS, {"stop_token_ids": [EOS]}, None),
        (EOS, {"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
        (9, {"stop_token_ids": [8, 9]}, 9),
        (9, {"stop_token_ids": [9], "stop": ["never"]}, 9),
    ],
)
async def test_the_token_that_ended_an_answer_is_its_reason(
    path: str, token_id: int, fields: dict[str, Any], reason: int | None
) -> None:
    edge = make_edge(plays(stops_at(token_id)))
    (choice,) = (await answer(edge, path, **fields))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    last = (await answer(edge, path, **fields, stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("path", PATHS)
async def test_the_string_that_ended_an_answer_is_its_reason(path: str) -> None:
    edge = make_edge(says("Hello world"))
    (choice,) = (await answer(edge, path, stop=["lo", "llo", "world"]))["choices"]
    assert choice["stop_reason"] == "llo"  # of two that end together the longest
    (choice,) = (await answer(edge, path, stop=["x"]))["choices"]
    assert choice["stop_reason"] is None


async def test_an_answer_that_met_its_length_has_no_reason() -> None:
    edge = make_edge(says("Hello world", FinishReason.LENGTH))
    (choice,) = (await answer(edge, TEXT_PATH, stop_token_ids=[HELLO[-1]]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"logprobs": None, "stop": ["never"]}])
async def test_token_ids_are_returned_where_asked_for(path: str, fields: dict[str, Any]) -> None:
    edge = make_edge(says("Hello world"))
    whole = await answer(edge, path, **fields, n=2, return_token_ids=True)
    prompt = list(edge.generator.calls[0].prompt_token_ids)
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*HELLO, EOS]] * 2
    stream = await answer(edge, path, **fields, n=2, return_token_ids=True, stream=True)
    told: dict[int, list[int]] = {0: [], 1: []}
    for one in stream:
        for choice in one["choices"]:
            told[choice["index"]] += choice.get("token_ids", [])
    assert told == {0: [*HELLO, EOS], 1: [*HELLO, EOS]}
    if path == CHAT_PATH:
        assert whole["prompt_token_ids"] == prompt
        assert [one["prompt_token_ids"] for one in stream if "prompt_token_ids" in one] == [prompt]
    else:
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompt] * 2
        firsts = [one["choices"][0] for one in stream]
        found = [one["prompt_token_ids"] for one in firsts if "prompt_token_ids" in one]
        assert found == [prompt] * 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_token_ids_are_not_returned_unasked(path: str, is_stream: bool) -> None:
    found = await answer(make_edge(), path, stream=is_stream)
    assert "token_ids" not in str(found)


@pytest.mark.covers("T03")
async def test_the_tokens_behind_a_stop_string_are_not_returned() -> None:
    chunk = TokenChunk(first_index=0, token_ids=HELLO, finish_reason=None)
    edge = make_edge(plays([chunk]))
    first_text = MODEL.decode(HELLO[:1])
    whole = await answer(edge, TEXT_PATH, stop=[first_text], return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [HELLO[0]]


def logprobs_by_seed(means: dict[int, float]) -> Any:
    """A script whose choices have tokens of these log probabilities, by their order."""
    calls: list[Call] = []

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        calls.append(call)
        mean = means[len(calls) - 1]
        text = HELLO[: 1 + len(calls) % 2]
        yield TokenChunk(
            first_index=0,
            token_ids=text,
            logprobs=tuple(TokenLogprobs(mean) for _ in text),
            finish_reason=FinishReason.LENGTH,
        )

    return play


async def test_the_best_choices_are_the_likeliest_per_token() -> None:
    edge = make_edge(logprobs_by_seed({0: -3.0, 1: -1.0, 2: -2.0}))
    whole = await answer(edge, TEXT_PATH, n=2, best_of=3, return_token_ids=True)
    assert [call.sampling.logprobs for call in edge.generator.calls] == [0, 0, 0]
    assert len({call.sampling.seed for call in edge.generator.calls}) == 3
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert ids == [[HELLO[0]], list(HELLO[:2])]  # the second one, then the third one
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]
    assert whole["usage"]["completion_tokens"] == 5  # of all three


async def test_the_best_are_chosen_for_each_prompt() -> None:
    edge = make_edge(logprobs_by_seed({0: -1.0, 1: -2.0, 2: -2.0, 3: -1.0}))
    whole = await answer(edge, TEXT_PATH, prompt=["a", "b"], best_of=2, return_token_ids=True)
    prompts = [choice["prompt_token_ids"] for choice in whole["choices"]]
    assert prompts == [list(edge.generator.calls[at].prompt_token_ids) for at in (0, 2)]
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [2, 1]
