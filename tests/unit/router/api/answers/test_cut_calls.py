"""Calls that a stop token cuts off: no API says that they are to be run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.request import FinishReason
from router.tools.formats import HERMES
from tests.support.examples import everyday
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import chunks, plays
from tests.support.http.tool_models import NOW, WEATHER, hermes_model

STRIDE = everyday(7, of=1)
"""Tokens between two cuts."""
MODEL = hermes_model()
CALLS = ("get_weather", '{"city": "Paris"}'), ("now", "{}")
TEXT = "I look.\n" + "\n".join(HERMES.call_text(*call) for call in CALLS)
IDS = MODEL.encode(TEXT, add_special_tokens=False, param="")
FUNCTIONS = [WEATHER["function"], NOW["function"]]
QUESTION = [{"role": "user", "content": "Weather?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION, "tools": [WEATHER, NOW]},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **f} for f in FUNCTIONS]},
    "/v1/messages": {
        "max_tokens": 400,
        "messages": QUESTION,
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
    },
}


def num_begun(text: str) -> int:
    return text.count(HERMES.trigger)


def num_whole(text: str) -> int:
    return text.count('"}') + text.count("{}")


async def answer(path: str, num_tokens: int, *, stream: bool) -> list[Any]:
    """The whole answer, or the events of a stream, of which a stop token is the last token."""
    edge = make_edge(plays(chunks(IDS[: num_tokens + 1], FinishReason.STOP)), model=MODEL)
    body = BODIES[path] | {"stop_token_ids": [IDS[num_tokens]], "stream": stream}
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    return [json.loads(line) for line in lines]


def told(path: str, events: list[Any], *, stream: bool) -> tuple[bool, list[bool]]:
    """Whether an answer says that it ends in calls, and which of its calls are said to be whole;
    those of which nothing is said count as such."""
    last = events[-1]
    if path == "/v1/responses":
        items = (last["response"] if stream else last)["output"]
        done = [one["item"] for one in events if one.get("type") == "response.output_item.done"]
        assert done in ([], items)
        statuses = [one["status"] for one in items if one["type"] == "function_call"]
        return all(one == "completed" for one in statuses), [one == "completed" for one in statuses]
    if path == "/v1/messages":
        delta = events[-2]["delta"] if stream else last
        return delta["stop_reason"] == "tool_use", []
    return last["choices"][0]["finish_reason"] == "tool_calls", []


@pytest.mark.covers("T15")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_calls_are_to_be_run_where_all_of_them_are_whole(path: str, stream: bool) -> None:
    for num_tokens in range(1, len(IDS), STRIDE):
        text = MODEL.decode(IDS[:num_tokens])
        events = await answer(path, num_tokens, stream=stream)
        has_calls, are_whole = told(path, events, stream=stream)
        if path == "/v1/responses":
            assert sum(are_whole) == num_whole(text), text
            assert len(are_whole) - num_whole(text) in (0, 1), text
        else:
            assert has_calls is (num_begun(text) == num_whole(text) > 0), text
