"""Hostile schemas over HTTP: each ends in bounded time, and others are served beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from common.grammar import GrammarKind
from tests.support.attacks.beside import served_beside
from tests.support.clocks.stall_free_clock import timed
from tests.support.cluster.api import CHAT, COMPLETIONS, Api, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.memory import forget_peak, memory_of
from tests.support.grammars.hostile_grammars import BOUNDED, CRASHING, HOSTILE, LONG, SIBLINGS
from tests.support.http.tool_models import function

MIB = 1 << 20
MOST_GROWTH_BYTES = 128 * MIB
"""Growth of a router at the worst moment: bodies of 9 MB are in work, in a few copies each."""
MOST_OF_A_CHILD_BYTES = 256 * MIB
"""Memory of the process that compiles for a router, at the worst moment."""
LONGEST_ANSWER_S = 60.0
_SHORTEST = "remainders that multiply"
ATTACKS = {
    "bounded": BOUNDED,
    "crashing": CRASHING,
    "long": {_SHORTEST: LONG[_SHORTEST]},
    "all that are long": LONG,
}
"""Each long one takes its router's child to a limit, as all do in the tests of trials with all
examples."""
LARGE = (
    *("a sequence", "a long literal", "an enum of long texts", "many first items"),
    *("optional texts", "parts of a text", "one of many"),
)
"""The siblings that take more than a second of CPU time."""
SMALL = tuple(name for name in SIBLINGS if name not in LARGE)
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


def asked_with_tool(schema: str) -> Fields:
    """A chat that must call a tool whose one argument has this schema."""
    parameters = {"type": "object", "properties": {"a": json.loads(schema)}, "required": ["a"]}
    tool: Any = function("bomb", "A bomb")
    tool["function"] |= {"parameters": parameters, "strict": True}
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, "tools": [tool], "tool_choice": "required"}


@pytest.fixture(autouse=True)
def served_others(tiny_cluster: Cluster) -> Iterator[None]:
    with served_beside(tiny_cluster):
        yield


@pytest.fixture(autouse=True)
def bounded_routers(tiny_cluster: Cluster) -> Iterator[None]:
    """No router takes much more memory, whatever the schema."""
    (router, *_) = (p for p in tiny_cluster.processes.values() if p.name.startswith("router"))
    before = memory_of(router.pid)
    forget_peak(router.pid)
    yield
    growth = memory_of(router.pid, "VmHWM") - before
    assert growth < MOST_GROWTH_BYTES, f"the router grew by {growth / MIB:.0f} MiB"
    for child in router.children():
        peak = memory_of(child, "VmHWM")
        assert peak < MOST_OF_A_CHILD_BYTES, f"its child has {peak / MIB:.0f} MiB"


def asked(api: Api, path: str, body: dict[str, Any]) -> httpx.Response:
    """An answer that came in time; an error has the shape of the API's errors."""
    whole = {"model": api.model, "max_tokens": 8, **body}
    answer, took_s = timed(lambda: api.http.post(path, json=whole))
    assert took_s < LONGEST_ANSWER_S
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error", answer.text
    return answer


def status_of(api: Api, path: str, body: dict[str, Any]) -> int:
    return asked(api, path, body).status_code


@pytest.mark.covers("G13")
def test_hostile_grammars(tiny_api: Api) -> None:
    statuses = {
        name: status_of(tiny_api, COMPLETIONS, {"prompt": "Hi", FIELDS[grammar.kind]: grammar.text})
        for name, grammar in HOSTILE.items()
    }
    assert set(statuses.values()) <= {200, 400}, statuses
    assert {name for name, status in statuses.items() if status == 400} == REFUSED


@pytest.mark.parametrize(
    "attack",
    [*list(ATTACKS)[:-1], pytest.param("all that are long", marks=pytest.mark.endurance)],
)
def test_grammars_that_are_refused(tiny_api: Api, attack: str) -> None:
    """By what is counted, or by a limit of their trial: each says which."""
    for name, grammar in ATTACKS[attack].items():
        body = {"prompt": "Hi", FIELDS[grammar.kind]: grammar.text}
        answer = asked(tiny_api, COMPLETIONS, body)
        assert answer.status_code == 400, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert ": wanted " in message or "wanted at " in message, message


@pytest.mark.parametrize(
    "names", [SMALL, pytest.param(LARGE, marks=pytest.mark.endurance)], ids=["small", "large"]
)
def test_siblings_of_hostile_grammars(tiny_api: Api, names: tuple[str, ...]) -> None:
    for name in names:
        grammar = SIBLINGS[name]
        body = {"prompt": "Hi", "max_tokens": 40, FIELDS[grammar.kind]: grammar.text}
        assert asked(tiny_api, COMPLETIONS, body).status_code in (200, 400), name


@pytest.mark.covers("G13")
def test_hostile_schemas_inside_tools(tiny_api: Api) -> None:
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
    for body in (
        {"prompt": "Hi", "guided_json": text},
        {"prompt": "Hi", "guided_regex": "x" * size},
    ):
        assert status_of(tiny_api, COMPLETIONS, body) == status
    assert status_of(tiny_api, CHAT, asked_with_tool(text)) == status


def test_many_large_schemas_at_a_time(tiny_api: Api) -> None:
    """Each compiles for a while, and no step waits for any of them."""

    def ask(number: int) -> int:
        names = [f"p{number}_{i}" for i in range(800)]
        parts = {name: {"type": "string", "pattern": f"^[a-z]{{1,9}}{name}$"} for name in names}
        schema = {"type": "object", "properties": parts, "required": names}
        body = {"prompt": "Hi", "guided_json": schema}
        return status_of(tiny_api, COMPLETIONS, body)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [200] * 4
