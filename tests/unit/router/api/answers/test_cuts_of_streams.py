"""Streams whose tokens come in random groups, on every API: their deltas join to the same answer.

The groups cut through characters, tags, the heads of calls and stop strings. A client that cuts a
stream into lines cuts through no event.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.request import FinishReason
from router.text.text_model import TextModel
from router.tools.formats import HERMES
from tests.support.examples import everyday
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import chunks, plays, says
from tests.support.http.tool_models import hermes_model
from tests.unit.router.api.answers.streamed_parts import (
    APIS,
    Api,
    Part,
    grouped,
    joined,
)

NUM_GROUPINGS = everyday(25, of=100)
CITY = '{"city": "Zürich 🌞"}'
ANSWER = "\nIt is Zürich 🏔, so\n</think>\n\nI look 🌞 now.\n" + "\n".join(
    (HERMES.call_text("get_weather", CITY), HERMES.call_text("now", "{}"))
)
THOUGHT = ("thinking", "It is Zürich 🏔, so")
CALLS = [("get_weather", CITY), ("now", "{}")]


@pytest.mark.covers("G14", "G15", "T04", "G20")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@pytest.mark.parametrize(
    ("stop", "is_stopped", "wanted"),
    [
        ("🌞 now!", False, [THOUGHT, ("text", "I look 🌞 now."), *CALLS]),
        ("🌞 now", True, [THOUGHT, ("text", "I look ")]),
    ],
    ids=["a stop string that only begins", "a stop string"],
)
async def test_any_groups_of_tokens_stream_the_same_answer(
    api: Api, stop: str, is_stopped: bool, wanted: list[Part]
) -> None:
    model = hermes_model()
    text_ids = model.encode(ANSWER, add_special_tokens=False, param="")
    token_ids = [*text_ids, *sorted(model.eos_token_ids)]
    for seed in range(NUM_GROUPINGS):
        edge = make_edge(plays(grouped(token_ids, random.Random(seed))), model=model)
        body = api.body | {"stream": True, api.stop_field: [stop]}
        async with edge.client() as client:
            response = await client.post(api.path, json=body)
        assert response.status_code == 200, response.text
        *parts, (end, _) = joined(api, response.text)
        assert parts == wanted, f"grouping {seed}"
        assert end == api.ends[is_stopped], f"grouping {seed}"


@pytest.mark.covers("T27")
@pytest.mark.parametrize("stop", ["🌞 now!", "🌞 now"])
async def test_each_token_of_thinking_text_and_calls_has_its_log_probability_once(
    stop: str,
) -> None:
    """Streamed in any groups, and in a whole answer."""
    model, api = hermes_model(), APIS[0]
    token_ids = model.encode(ANSWER, add_special_tokens=False, param="")
    found = []
    for seed in range(NUM_GROUPINGS):
        edge = make_edge(plays(grouped([*token_ids], random.Random(seed))), model=model)
        body = api.body | {"stream": seed > 0, "stop": [stop], "logprobs": True}
        async with edge.client() as client:
            response = await client.post(api.path, json=body)
        texts = [response.text] if seed == 0 else response.text.split("\n\n")[:-2]
        choices = [json.loads(text.removeprefix("data: "))["choices"][0] for text in texts]
        scored = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        entries = [entry for entries in scored for entry in entries]
        found.append([(one["logprob"], bytes(one["bytes"])) for one in entries])
    assert found == found[:1] * NUM_GROUPINGS
    numbers, said = zip(*found[0], strict=True)
    assert numbers == tuple(-1.0 - place for place in range(len(numbers)))
    whole = b"".join(said).decode()
    assert whole == (ANSWER if stop.endswith("!") else ANSWER.partition(stop)[0])


LINE_ENDS = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\r\nj"
"""Where `str.splitlines` ends lines, and with it `iter_lines` of httpx and of requests. JSON may
have the last three that are no ASCII as they are."""
NAMED = json.dumps({"city": LINE_ENDS}, ensure_ascii=False)


@pytest.mark.covers("W08")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@pytest.mark.parametrize("size", [1, 1000])
async def test_no_client_finds_the_end_of_a_line_within_an_event(api: Api, size: int) -> None:
    model = hermes_model()
    text = f"\nI think {LINE_ENDS}!\n</think>\n\nSo {LINE_ENDS}.\n"
    text += HERMES.call_text("get_weather", NAMED)
    token_ids = model.encode(text, add_special_tokens=False, param="")
    edge = make_edge(plays(chunks(token_ids, FinishReason.STOP, size=size)), model=model)
    async with edge.client() as client:
        response = await client.post(api.path, json=api.body | {"stream": True})
    *parts, _ = joined(api, response.text)
    wanted = [("thinking", f"I think {LINE_ENDS}!"), ("text", f"So {LINE_ENDS}.")]
    assert parts == [*wanted, ("get_weather", NAMED)]


@pytest.mark.covers("W08")
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 2}, {"return_token_ids": True}])
async def test_nor_within_an_event_of_a_completion(more: dict[str, Any]) -> None:
    edge = make_edge(says(LINE_ENDS, FinishReason.LENGTH))
    body = {"prompt": LINE_ENDS, "stream": True, **more}
    async with edge.client() as client:
        response = await client.post("/v1/completions", json=body)
    lines = [line for line in response.text.splitlines() if line]
    assert {line[:6] for line in lines} == {"data: "}
    *events, done = [line[6:] for line in lines]
    assert done == "[DONE]"
    shown = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(shown) == LINE_ENDS * (2 if "echo" in more else 1)


def num_thinking(model: TextModel, token_ids: list[int]) -> int:
    """The tokens up to the one that completes the end of the thinking."""
    decoder = model.new_detokenizer(with_special_tags=True)
    text = ""
    for number, token_id in enumerate(token_ids, 1):
        text += decoder.push(token_id)
        if "</think>" in text:
            return number
    return len(token_ids)


@pytest.mark.covers("T02")
@pytest.mark.parametrize(
    ("api", "details"),
    [(APIS[0], "completion_tokens_details"), (APIS[1], "output_tokens_details")],
    ids=["chat", "responses"],
)
@pytest.mark.parametrize("text", [ANSWER, "\nIt is Zürich 🏔"], ids=["answered", "thought alone"])
@pytest.mark.parametrize("stop", [[], ["I look"]], ids=["no stop string", "a stop string"])
async def test_tokens_of_thinking_are_counted_in_any_groups_and_are_tokens_of_the_answer(
    api: Api, details: str, text: str, stop: list[str]
) -> None:
    model = hermes_model()
    token_ids = list(model.encode(text, add_special_tokens=False, param=""))
    wanted = num_thinking(model, token_ids)
    streamed: dict[str, Any] = {"stream": True, api.stop_field: stop}
    if details == "completion_tokens_details":
        streamed["stream_options"] = {"include_usage": True}
    for seed in range(NUM_GROUPINGS):
        edge = make_edge(plays(grouped(token_ids, random.Random(seed))), model=model)
        async with edge.client() as client:
            response = await client.post(api.path, json=api.body | streamed)
        events = [json.loads(line[6:]) for line in response.text.splitlines() if "usage" in line]
        last = events[-1].get("response", events[-1])["usage"]
        assert last[details]["reasoning_tokens"] == wanted, f"grouping {seed}"
        assert wanted <= last.get("completion_tokens", last.get("output_tokens"))
