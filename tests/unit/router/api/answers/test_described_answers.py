"""`/openapi.json` describes what is really answered: whole, streamed, and refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import DeadlineExceeded, NodeLost, Overloaded
from common.request import TokenLogprobs
from router.api.answers.shapes import ChatAnswer, ChatEvent, CompletionAnswer, CompletionEvent
from router.core.generation import TokenChunk
from router.http.described import ERRORS, ErrorAnswer, schema_of
from tests.support.http.described import check, described_paths
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.scripted_generator import fails, plays, says

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT_PATH: {"prompt": "Hi"},
}
SCHEMAS = {
    CHAT_PATH: (schema_of(ChatAnswer), schema_of(ChatEvent)),
    TEXT_PATH: (schema_of(CompletionAnswer), schema_of(CompletionEvent)),
}
ERROR = schema_of(ErrorAnswer)
WISHES: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True, "n": 2},
    {"stop": "wor"},
    {"usage": True},
]


def with_logprobs() -> Edge:
    ids = tiny_model().encode("Hello", add_special_tokens=False, param="text")
    logprobs = tuple(TokenLogprobs(-0.5, ((1, -0.25),)) for _ in ids)
    return make_edge(plays([TokenChunk(first_index=0, token_ids=ids, logprobs=logprobs)]))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wishes", WISHES)
async def test_answers_are_as_described(path: str, wishes: dict[str, Any]) -> None:
    fields = dict(wishes)
    options = {"stream_options": {"include_usage": True}} if fields.pop("usage", False) else {}
    whole, event = SCHEMAS[path]
    async with make_edge(says("Hello world")).client() as client:
        check((await client.post(path, json=BODIES[path] | fields)).json(), whole)
        streamed = await client.post(path, json=BODIES[path] | fields | options | {"stream": True})
    found = events(streamed.content)
    assert found.pop() == "[DONE]"
    for one in found:
        check(one, event)


@pytest.mark.parametrize(("path", "wish"), [(CHAT_PATH, True), (TEXT_PATH, 1)])
async def test_log_probabilities_are_as_described(path: str, wish: Any) -> None:
    whole, event = SCHEMAS[path]
    body = BODIES[path] | {"logprobs": wish, "stop": ["o"]}
    async with with_logprobs().client() as client:
        answer = (await client.post(path, json=body)).json()
        streamed = await client.post(path, json=body | {"stream": True})
    assert answer["choices"][0]["logprobs"]
    check(answer, whole)
    for one in events(streamed.content)[:-1]:
        check(one, event)


@pytest.mark.parametrize(
    ("fields", "error", "status"),
    [
        ({"temperature": "hot"}, None, 400),
        ({"model": "other"}, None, 404),
        ({}, NodeLost("gone"), 502),
        ({}, Overloaded("full"), 503),
        ({}, DeadlineExceeded("late"), 504),
    ],
)
async def test_errors_are_as_described(
    fields: dict[str, Any], error: Exception | None, status: int
) -> None:
    edge = make_edge(fails(error) if error else None)
    async with edge.client() as client:
        response = await client.post(CHAT_PATH, json=BODIES[CHAT_PATH] | fields)
    assert response.status_code == status
    assert status in ERRORS
    check(response.json(), ERROR)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BODIES.items(),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_the_end_of_a_stream_is_as_described(path: str, body: dict[str, Any]) -> None:
    async with make_edge(says("Hello")).client() as client:
        streamed = await client.post(path, json=body | {"stream": True})
        paths = (await client.get("/openapi.json")).json()["paths"]
    content = paths[path]["post"]["responses"]["200"]["content"]
    says_done = "then [DONE]" in content["text/event-stream"]["description"]
    assert says_done is streamed.text.endswith("data: [DONE]\n\n")


async def test_the_description_has_the_answers_and_the_errors() -> None:
    paths = await described_paths(make_edge())
    for path, (whole, event) in SCHEMAS.items():
        described = paths[path]["post"]["responses"]
        content = described["200"]["content"]
        assert content["application/json"]["schema"] == whole
        assert content["text/event-stream"]["schema"] == event
        assert set(described) == {"200", *map(str, ERRORS)}
        assert described["503"]["content"]["application/json"]["schema"] == ERROR
