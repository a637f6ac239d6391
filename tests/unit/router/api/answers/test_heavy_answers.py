"""What an answer may weigh, and that no answer holds the event loop for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.request import FinishReason, TokenLogprobs
from router.api.answers import answer as answer_module
from router.api.answers import json_parts
from router.api.answers.answer import AnswerTurns
from router.api.answers.json_parts import LOGPROBS_PER_PART
from router.api.planning import choices
from router.api.planning.choices import MAX_ANSWER_LOGPROBS
from router.core.generation import PromptResult, TokenChunk
from router.text.output.logprobs_json import chat_token
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import events, make_edge
from tests.support.http.scripted_generator import Call, Script, prompt_logprobs

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
MODEL = tiny_model()


def scored(size: int = 1) -> Script:
    """As many tokens as are allowed, `size` of them at a time, with log probabilities."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        num, num_top = call.sampling.max_tokens, call.sampling.logprobs
        for first in range(0, num, size):
            ids = tuple(5 + i % 200 for i in range(first, min(first + size, num)))
            logprobs: tuple[TokenLogprobs, ...] = ()
            if num_top is not None:
                logprobs = tuple(
                    TokenLogprobs(
                        -i / 8, tuple((5 + (i + k) % 200, -k / 2) for k in range(num_top))
                    )
                    for i in ids
                )
            yield TokenChunk(
                first_index=first,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=FinishReason.LENGTH if first + size >= num else None,
                of_prompt=None if first else PromptResult(prompt_logprobs=prompt_logprobs(call)),
            )

    return play


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (
            CHAT_PATH,
            CHAT | {"n": 10, "max_tokens": 20, "logprobs": True, "top_logprobs": 4},
            "max_tokens is 20, which with top_logprobs 4 makes 1000 log probabilities of 10",
        ),
        (
            CHAT_PATH,
            CHAT | {"n": 10, "max_completion_tokens": 99, "logprobs": True},
            "max_completion_tokens is 99, which with top_logprobs 0 makes 990 log probabilities",
        ),
        (
            TEXT_PATH,
            TEXT | {"max_tokens": 101, "logprobs": 4},
            "max_tokens is 101, which with logprobs 4 makes 505 log probabilities of 1 choice",
        ),
        (
            TEXT_PATH,
            TEXT | {"prompt": ["Hi"] * 10, "max_tokens": 51, "logprobs": 0},
            "max_tokens is 51, which with logprobs 0 makes 510 log probabilities of 10 choice",
        ),
        (
            TEXT_PATH,
            TEXT | {"prompt": ["Hi"] * 3, "n": 2, "max_tokens": 50, "logprobs": 1},
            "makes 600 log probabilities of 6 choice(s): wanted at most 500, so max_tokens of at "
            "most 41",
        ),
        (
            TEXT_PATH,
            TEXT | {"best_of": 10, "max_tokens": 51},
            "max_tokens is 51, which with best_of 10 makes 510 log probabilities of 10 choice",
        ),
        (
            TEXT_PATH,
            TEXT | {"best_of": 5, "max_tokens": 51, "logprobs": 1},
            "max_tokens is 51, which with logprobs 1 makes 510 log probabilities of 5 choice",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_more_log_probabilities_than_an_answer_may_have(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], wanted: str, is_stream: bool
) -> None:
    if is_stream and "best_of" in body:
        return  # not streamed at all
    monkeypatch.setattr(choices, "MAX_ANSWER_LOGPROBS", 500)
    edge = make_edge(scored())
    async with edge.client() as client:
        refused = await client.post(path, json=body | {"stream": is_stream})
        error = refused.json()["error"]
        assert refused.status_code == 400, error
        assert wanted in error["message"]
        assert "wanted at most 500" in error["message"]
        assert error["param"] in body
        assert edge.generator.calls == []
        # As many as may be, and as many as before without any.
        limit = int(error["message"].rpartition(" ")[2])
        served = await client.post(path, json=body | {error["param"]: limit})
        assert served.status_code == 200
        without = {k: v for k, v in body.items() if k not in ("logprobs", "top_logprobs")}
        served = await client.post(path, json=without | {"best_of": None})
        assert served.status_code == 200


async def test_without_max_tokens_an_answer_has_what_may_be_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "MAX_ANSWER_LOGPROBS", 500)
    edge = make_edge(scored())
    body = CHAT | {"n": 4, "logprobs": True, "top_logprobs": 4}
    async with edge.client() as client:
        answer = (await client.post(CHAT_PATH, json=body)).json()
        assert {call.sampling.max_tokens for call in edge.generator.calls} == {25}
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        await client.post(CHAT_PATH, json=CHAT)
        prompt = edge.generator.calls[-1].prompt_token_ids
        assert edge.generator.calls[-1].sampling.max_tokens == CONTEXT - len(prompt)
        await client.post(TEXT_PATH, json=TEXT | {"logprobs": 0})
        assert edge.generator.calls[-1].sampling.max_tokens == 16
        await client.post(TEXT_PATH, json=TEXT | {"prompt": ["Hi"] * 50, "logprobs": 4})
        assert edge.generator.calls[-1].sampling.max_tokens == 2


async def test_the_attack_that_made_48_mb() -> None:
    """672,000 of them stood in the event loop for 359 ms."""
    body = CHAT | {"n": 128, "max_tokens": 250, "logprobs": True, "top_logprobs": 20}
    edge = make_edge(scored())
    async with edge.client() as client:
        refused = await client.post(CHAT_PATH, json=body)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "makes 672000 log probabilities" in message
    assert f"wanted at most {MAX_ANSWER_LOGPROBS}" in message


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_choices_repeat_so_many_tokens_of_prompts(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(choices, "MAX_REPEATED_TOKENS", 300)
    body = {"prompt": [[5] * 50] * 2, "n": 4, "max_tokens": 1, field: True}
    edge = make_edge(scored())
    async with edge.client() as client:
        refused = await client.post(TEXT_PATH, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field)
        assert f"{field} is true, with which 4 choice(s) of each prompt repeat 400" in str(error)
        assert "wanted at most 300" in error["message"]
        for fewer in ({"n": 3}, {"n": 3, "best_of": 8}, {field: False}):
            assert (await client.post(TEXT_PATH, json=body | fewer)).status_code == 200
        # The choices of a chat have the tokens of their prompt once.
        chat = CHAT | {"n": 100, "max_tokens": 1, "return_token_ids": True}
        assert (await client.post(CHAT_PATH, json=chat)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_apis_without_log_probabilities_refuse_the_field_or_ignore_it(path: str) -> None:
    edge = make_edge(scored())
    body = {"input": "Hi"} if path == "/v1/responses" else CHAT | {"max_tokens": 16}
    async with edge.client() as client:
        await client.post(path, json=body | {"top_logprobs": 20, "logprobs": True})
    assert all(call.sampling.logprobs is None for call in edge.generator.calls)


BODIES = {
    "chat, one choice": (
        CHAT_PATH,
        CHAT | {"max_tokens": 150, "logprobs": True, "top_logprobs": 20},
    ),
    "chat, choices": (
        CHAT_PATH,
        CHAT | {"n": 20, "max_tokens": 90, "logprobs": True, "top_logprobs": 3},
    ),
    "completion": (TEXT_PATH, TEXT | {"max_tokens": 200, "logprobs": 20}),
    "completion, echo": (
        TEXT_PATH,
        {"prompt": "x" * 150, "n": 9, "max_tokens": 90, "logprobs": 5, "echo": True},
    ),
    "completion, echo alone": (
        TEXT_PATH,
        {"prompt": "x" * 200, "n": 4, "max_tokens": 0, "logprobs": 20, "echo": True},
    ),
    "tokens": (TEXT_PATH, TEXT | {"n": 50, "max_tokens": 200, "return_token_ids": True}),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", [1, 250])
async def test_a_whole_answer_is_the_same_in_any_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    path, body = BODIES[name]
    answers = []
    for per_part, ids_per_part, per_turn in ((10**9, 10**9, 10**9), (50, 7, 300)):
        monkeypatch.setattr(json_parts, "LOGPROBS_PER_PART", per_part)
        monkeypatch.setattr(json_parts, "_IDS_PER_PART", ids_per_part)
        monkeypatch.setattr(answer_module, "CHARS_PER_TURN", per_turn)
        async with make_edge(scored(size=size)).client() as client:
            answers.append((await client.post(path, json=body | {"seed": 1})).json())
    for answer in answers:
        answer.pop("id")
        answer.pop("created")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", [name for name in BODIES if name != "tokens"])
@pytest.mark.parametrize("size", [1, 250])
async def test_a_stream_adds_up_to_the_whole_answer_and_no_event_is_long(
    name: str, size: int
) -> None:
    path, body = BODIES[name]
    async with make_edge(scored(size=size)).client() as client:
        answer = (await client.post(path, json=body | {"seed": 1})).json()
        with_usage = {"seed": 1, "stream": True, "stream_options": {"include_usage": True}}
        stream = await client.post(path, json=body | with_usage)
    *payloads, last, done = events(stream.content)
    assert done == "[DONE]"
    assert last["usage"] == answer["usage"]
    whole, texts = answer["choices"], dict.fromkeys(range(len(answer["choices"])), "")
    column = "content" if path == CHAT_PATH else "token_logprobs"
    found: dict[int, list[Any]] = {}
    for payload in payloads:
        (choice,) = payload["choices"]
        shown = choice["delta"].get("content") if path == CHAT_PATH else choice["text"]
        texts[choice["index"]] += shown or ""
        if (logprobs := choice["logprobs"]) and logprobs[column]:
            found.setdefault(choice["index"], []).extend(logprobs[column])
            tops = logprobs["content"] if path == CHAT_PATH else logprobs["top_logprobs"]
            per_token = len(tops[-1]["top_logprobs"] if path == CHAT_PATH else tops[-1] or ())
            assert len(tops) * (1 + per_token) <= 1.1 * LOGPROBS_PER_PART
    assert found == {choice["index"]: choice["logprobs"][column] for choice in whole}
    texts_of_whole = [c["message"]["content"] if path == CHAT_PATH else c["text"] for c in whole]
    assert list(texts.values()) == texts_of_whole
    ends = [payload["choices"][0]["finish_reason"] for payload in payloads]
    assert len([end for end in ends if end]) == len(whole)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_came_at_once_is_shown_in_many_turns(is_stream: bool) -> None:
    """All tokens are here, and still nobody waits for more than a part of them."""
    body = CHAT | {"n": 25, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    made: list[int] = []
    wanted = chat_token

    def counted(*args: Any) -> Any:
        made[-1] += 21
        return wanted(*args)

    async def count() -> None:
        while True:
            made.append(0)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.api.answers.json_parts.chat_token", counted)
        async with make_edge(scored(size=200)).client() as client:
            await client.post(CHAT_PATH, json=body | {"stream": is_stream})
    counting.cancel()
    assert sum(made) == 25 * 200 * 21
    assert max(made) <= 2 * LOGPROBS_PER_PART


async def test_turns_are_one_at_a_time_and_in_order() -> None:
    turns, done = AnswerTurns(), list[tuple[int, str]]()
    turn = 0

    async def tick() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def work(name: str) -> None:
        for _ in range(3):
            await turns.next()
            done.append((turn, name))

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(work(name) for name in "abc"))
    ticking.cancel()
    assert [name for _, name in done] == list("abcabcabc")
    assert len({turn for turn, _ in done}) == 9


@pytest.mark.covers("T29")
async def test_an_answer_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(0, (5,), (TokenLogprobs(float("nan")),), FinishReason.LENGTH)

    async with make_edge(play).client() as client:
        answer = await client.post(CHAT_PATH, json=CHAT | {"logprobs": True})
    assert answer.status_code == 500
    assert json.loads(answer.text)["error"]["code"] == "internal_error"


@pytest.mark.covers("T29")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2}),
        (TEXT_PATH, TEXT | {"logprobs": 2}),
    ],
)
async def test_a_token_that_cannot_be_drawn_has_the_lowest_log_probability(
    path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    """Minus infinity, as a filter or a bias leaves it, is no JSON."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        top = ((5, 0.0), (6, float("-inf")))
        yield TokenChunk(0, (5,), (TokenLogprobs(0.0, top),), FinishReason.LENGTH)

    async with make_edge(play).client() as client:
        answer = await client.post(path, json=body | {"stream": is_streamed})
    assert answer.status_code == 200
    assert "Infinity" not in answer.text
    assert "-9999" in answer.text
