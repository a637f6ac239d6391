"""A conversation with two tools on a real cluster, by the official client, as docs/api.md shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.nodes import Role
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import redis_server

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SYSTEM = (
    "You are a helpful assistant. Call a function when you need its result. When you have it, "
    "answer in one plain sentence."
)
EXAMPLE = ("What is the capital of France?", "The capital of France is Paris.")
WEATHER_RESULT = "sunny, 21 degrees Celsius"
WEATHER_ANSWER = "The weather in Paris is sunny with a temperature of 21 degrees Celsius."
TIME_RESULT, TIME_ANSWER = "14:05", "The time in Tokyo is 14:05."


def function(name: str, description: str) -> dict[str, Any]:
    """Return a tool with one argument, the name of a city."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS: Any = [
    function("get_weather", "Get the current weather of a city"),
    function("get_time", "Get the current local time of a city"),
]


@pytest.fixture(scope="module")
def cluster(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and a decode node, which takes every prompt from it."""
    decode = ("--local-prefill-threshold", "0")
    spec = ClusterSpec(
        name="qwen",
        model=qwen_folder,
        nodes=(NodeSpec("prefill-1", Role.PREFILL), NodeSpec("decode-1", Role.DECODE, decode)),
        flags=("--max-model-len", "2048", "--kv-cache-memory", "64MiB"),
    )
    folder = tmp_path_factory.mktemp("qwen")
    with redis_server() as store, running([spec], store, folder) as (started,):
        yield started
        started.check_settled()


class Conversation:
    """The messages so far, and the model that goes on with them."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = openai.OpenAI(
            base_url=f"{cluster.url}/v1", api_key="x", max_retries=0, timeout=300
        )
        self._model = self._client.models.list().data[0].id
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def say(self, role: str, content: str) -> None:
        self._messages.append({"role": role, "content": content})

    def call(self) -> tuple[str, dict[str, Any]]:
        """Let the model make one call; return the function's name and the arguments."""
        message = self._answer("required")
        (call,) = message.tool_calls
        self._messages.append(message)
        return call.function.name, json.loads(call.function.arguments)

    def result(self, content: str) -> None:
        (call,) = self._messages[-1].tool_calls
        self._messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def answer(self) -> str:
        """Let the model answer in words."""
        content: str = self._answer("none").content
        return content

    def _answer(self, tool_choice: str) -> Any:
        fields: Any = {"tool_choice": tool_choice, "parallel_tool_calls": False}
        answer = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            tools=TOOLS,
            temperature=0,
            max_tokens=48,
            **fields,
        )
        return answer.choices[0].message


def test_two_tools_are_called_and_their_results_are_used(cluster: Cluster) -> None:
    """With one answer in words before it, the model words both answers."""
    talk = Conversation(cluster)
    talk.say("user", EXAMPLE[0])
    talk.say("assistant", EXAMPLE[1])
    talk.say("user", "What is the weather in Paris?")
    assert talk.call() == ("get_weather", {"city": "Paris"})
    talk.result(WEATHER_RESULT)
    assert talk.answer() == WEATHER_ANSWER
    talk.say("assistant", WEATHER_ANSWER)
    talk.say("user", "And what time is it in Tokyo?")
    assert talk.call() == ("get_time", {"city": "Tokyo"})
    talk.result(TIME_RESULT)
    assert talk.answer() == TIME_ANSWER


@pytest.mark.parametrize(
    "text",
    [
        SYSTEM,
        *EXAMPLE,
        WEATHER_RESULT,
        WEATHER_ANSWER,
        TIME_RESULT,
        TIME_ANSWER,
        'get_weather {"city": "Paris"}',
        'get_time {"city": "Tokyo"}',
    ],
)
def test_the_page_shows_this_conversation(text: str) -> None:
    assert text in " ".join(PAGE.read_text(encoding="utf-8").split())
