"""A tool that is not strict refuses no request, on any endpoint; one that is strict names why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http.edge_model import grammars_of
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model

OTHER = {"type": "integer", "minimum": 3}
WRONG: dict[str, dict[str, Any]] = {
    "look-ahead": {"type": "string", "pattern": r"^(?!.*\.\.)[a-z.]+$"},
    "a word's boundary": {"type": "string", "pattern": r"\bab\b"},
    "a back-reference": {"type": "string", "pattern": r"(a)\1"},
    "another document": {"$ref": "https://example.com/s.json"},
    "a reference to nothing": {"$ref": "#/$defs/gone"},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "double": {"type": "number", "minimum": -1.7e308, "maximum": 1.7e308},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38},
    "an unknown type": {"type": "any"},
    "an identifier": {"const": 2**53 + 1},
    "a large remainder": {"multipleOf": 1_000_003},
    "nothing": {"enum": None},
    "a keyword": {"uniqueItems": True},
}


def asked(path: str, schema: dict[str, Any], *, strict: bool | None) -> dict[str, Any]:
    flag = {} if strict is None else {"strict": strict}
    user = [{"role": "user", "content": "Hello"}]
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": schema, **flag}
        return {"messages": user, "max_tokens": 9, "tools": [tool]}
    function = {"name": "f", "parameters": schema, **flag}
    if path == "/v1/responses":
        return {"input": "Hello", "tools": [{"type": "function", **function}]}
    return {"messages": user, "tools": [{"type": "function", "function": function}]}


FIELDS = {
    "/v1/chat/completions": "tools.0.function.parameters",
    "/v1/responses": "tools.0.parameters",
    "/v1/messages": "tools.0.input_schema",
}


def described(wrong: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": wrong, "w": OTHER}, "required": ["w"]}


@pytest.mark.covers("K03")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("path", FIELDS)
async def test_only_that_part_is_left_out(path: str, name: str) -> None:
    schema = described(WRONG[name])
    for strict in (None, False):
        edge = make_edge(says("Hello"), model=hermes_model())
        async with edge.client() as client:
            for _ in range(2):  # what is tried once is known
                answer = await client.post(path, json=asked(path, schema, strict=strict))
                assert answer.status_code == 200, answer.text
        first, second = (call.sampling.grammar for call in edge.generator.calls)
        assert first is not None
        assert first == second
        grammars_of(edge.model).matcher(first)
        rule = next(line for line in first.text.splitlines() if line.startswith("call_0"))
        begin = rule.index("%json ") + len("%json ")
        enforced, _ = json.JSONDecoder().raw_decode(rule, begin)
        assert enforced["properties"]["w"] == OTHER
        assert enforced["required"] == ["w"]
        assert list(enforced["properties"]) == ["v", "w"]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("path", FIELDS)
async def test_a_strict_one_is_refused_with_the_place(path: str, name: str) -> None:
    async with make_edge(says("Hello"), model=hermes_model()).client() as client:
        answer = await client.post(path, json=asked(path, described(WRONG[name]), strict=True))
    assert answer.status_code == 400
    assert "#/properties/v" in answer.json()["error"]["message"]
    assert FIELDS[path] in answer.text


async def test_the_model_is_told_of_the_whole_schema() -> None:
    edge = make_edge(says("Hello"), model=hermes_model())
    body = asked("/v1/chat/completions", described(WRONG["look-ahead"]), strict=None)
    async with edge.client() as client:
        await client.post("/v1/chat/completions", json=body)
    prompt = edge.model.decode(edge.generator.calls[0].prompt_token_ids)
    assert r"(?!.*" in prompt


async def test_a_format_is_refused_as_before() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": described({"type": "any"})},
    }
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    async with make_edge(says("x"), model=hermes_model()).client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        "response_format.json_schema.schema",
    )
