"""Calls of tools through a real cluster: a random model makes valid ones, since it must."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.http import tool_models

UNIT: Any = {"enum": ["C", "F"]}
DAYS: Any = {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3}
FORECAST: Any = tool_models.function("forecast", "The weather", unit=UNIT, days=DAYS)
NOW: Any = tool_models.NOW
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture
def client(tiny_cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny_cluster.url}/v1", api_key="x", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [FORECAST, NOW]}
    return client.chat.completions.create(**(asked | {"max_tokens": 400} | fields)).choices[0]


def check(call: Any) -> None:
    """The arguments are what the function's schema says, and nothing else."""
    (tool,) = [one for one in (FORECAST, NOW) if one["function"]["name"] == call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_must_be_a_call_is_one(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    check(call)


def test_a_conversation_with_a_named_function(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    choice = ask(client, tool_choice=named, seed=1)
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert call.function.name == "forecast"
    check(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASKED, choice.message, result]
    last = ask(client, messages=messages, tool_choice="none", seed=1, max_tokens=20)
    assert last.message.tool_calls is None
    assert last.message.content


def test_a_stream_is_the_whole_call_in_pieces(client: openai.OpenAI) -> None:
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    whole = ask(client, **fields).message.tool_calls[0].function
    with client.chat.completions.stream(
        model="tiny", messages=ASKED, tools=[FORECAST, NOW], max_tokens=400, **fields
    ) as stream:
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == (whole.name, whole.arguments)
    assert final.finish_reason == "tool_calls"


def test_a_response_that_must_be_a_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **FORECAST["function"]}
    asked: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(
        model="tiny", input="Hi", max_output_tokens=400, extra_body={"seed": 2}, **asked
    )
    (item,) = answer.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), tool["parameters"])
