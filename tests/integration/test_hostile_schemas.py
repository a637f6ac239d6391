"""Hostile schemas over HTTP: each ends in bounded time, and a stream beside it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from common.grammar import GrammarKind
from tests.cluster.api import CHAT, COMPLETIONS, Api, Fields
from tests.cluster.tiny_model import prompt_tokens
from tests.fakes.hostile_grammars import HOSTILE
from tests.fakes.tool_models import function

pytestmark = pytest.mark.timeout(300)

LONGEST_GAP_S = 15.0
"""Between two events of the stream beside: only a process that hangs takes that long."""
LONGEST_ANSWER_S = 30.0
STREAM: Fields = {"prompt": prompt_tokens(60, salt=71), "max_tokens": 60, "temperature": 0}
FIELDS = {
    GrammarKind.JSON_SCHEMA: "guided_json",
    GrammarKind.REGEX: "guided_regex",
    GrammarKind.LARK: "guided_grammar",
}
REFUSED = {
    "doubling references",
    "itself",
    "two that name each other",
    "deep parentheses",
    "deep rules",
}
"""All others are followed, within bounds."""
MIB = 1 << 20


def asked_with_tool(schema: str) -> Fields:
    """A chat that must call a tool whose one argument has this schema."""
    parameters = {"type": "object", "properties": {"a": json.loads(schema)}, "required": ["a"]}
    tool: Any = function("bomb", "A bomb")
    tool["function"] |= {"parameters": parameters, "strict": True}
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, "tools": [tool], "tool_choice": "required"}


@contextmanager
def stream_beside(api: Api) -> Iterator[None]:
    """Streams go on, one after the other; each is what it is in peace, and none stands still."""
    stop, gaps_s, answers = threading.Event(), [0.0], []
    has_begun = threading.Event()

    def read() -> str:
        before_s = time.monotonic()
        with api.stream(**STREAM) as stream:
            while stream.read_event() is not None:
                now_s = time.monotonic()
                gaps_s.append(now_s - before_s)
                before_s = now_s
                has_begun.set()
            return "".join(event["choices"][0]["text"] for event in stream.events)

    def work() -> None:
        while not stop.is_set():
            answers.append(read())

    in_peace = read()
    has_begun.clear()
    with ThreadPoolExecutor(1) as worker:
        working = worker.submit(work)
        try:
            assert has_begun.wait(LONGEST_GAP_S)
            yield
        finally:
            stop.set()
            working.result()
    assert set(answers) == {in_peace}
    assert max(gaps_s) < LONGEST_GAP_S


def status_of(api: Api, path: str, body: dict[str, Any]) -> int:
    """The status of an answer that came in time; an error has the shape of the API's errors."""
    began_s = time.monotonic()
    answer = api.http.post(path, json={"model": api.model, "max_tokens": 8, **body})
    assert time.monotonic() - began_s < LONGEST_ANSWER_S
    if answer.status_code != 200:
        assert answer.json()["error"]["type"] == "invalid_request_error", answer.text
    return answer.status_code


def test_hostile_grammars(tiny_api: Api) -> None:
    # G13.
    with stream_beside(tiny_api):
        statuses = {
            name: status_of(
                tiny_api, COMPLETIONS, {"prompt": "Hi", FIELDS[grammar.kind]: grammar.text}
            )
            for name, grammar in HOSTILE.items()
        }
    assert set(statuses.values()) <= {200, 400}, statuses
    assert {name for name, status in statuses.items() if status == 400} == REFUSED


def test_hostile_schemas_inside_tools(tiny_api: Api) -> None:
    # G13.
    with stream_beside(tiny_api):
        statuses = {
            name: status_of(tiny_api, CHAT, asked_with_tool(grammar.text))
            for name, grammar in HOSTILE.items()
            if grammar.kind is GrammarKind.JSON_SCHEMA
        }
    assert set(statuses.values()) <= {200, 400}, statuses
    refused = {name for name, status in statuses.items() if status == 400}
    assert refused >= {"doubling references", "two that name each other"}


@pytest.mark.parametrize(("size", "status"), [(9 * MIB, 400), (10 * MIB, 413)])
def test_a_schema_of_many_megabytes(tiny_api: Api, size: int, status: int) -> None:
    """The first is below the bound of a body, the second above it."""
    text = json.dumps({"enum": ["x" * 1000] * (size // 1000)})
    with stream_beside(tiny_api):
        for body in (
            {"prompt": "Hi", "guided_json": text},
            {"prompt": "Hi", "guided_regex": "x" * size},
        ):
            assert status_of(tiny_api, COMPLETIONS, body) == status
        assert status_of(tiny_api, CHAT, asked_with_tool(text)) == status


def test_many_large_schemas_at_a_time(tiny_api: Api) -> None:
    """Each compiles for a while, and no step waits for any of them."""

    def ask(number: int) -> int:
        names = [f"p{number}_{i}" for i in range(1500)]
        parts = {name: {"type": "string", "pattern": f"^[a-z]{{1,9}}{name}$"} for name in names}
        schema = {"type": "object", "properties": parts, "required": names}
        body = {"prompt": "Hi", "guided_json": schema}
        return status_of(tiny_api, COMPLETIONS, body)

    with stream_beside(tiny_api), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [200] * 8
