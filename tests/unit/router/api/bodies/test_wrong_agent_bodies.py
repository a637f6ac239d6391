"""Each part of an agent's body replaced by what it cannot be: planned, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.api.bodies.asked import RequestKind
from router.api.planning.planner import Planner
from router.http.errors import ModelNotFound
from router.http.sse import to_json
from tests.support.http.tool_models import hermes_model

TEXT: dict[str, Any] = {"type": "text", "text": "Hi"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "n",
    "description": "Notes.",
    "tools": [FUNCTION, {"type": "mcp"}],
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "instructions": "Be brief.",
    "tools": [CUSTOM, SPACE, {"type": "web_search"}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "mcp"}],
    },
    "context_management": [{"type": "compaction"}],
    "input": [
        {"type": "additional_tools", "tools": [FUNCTION, SPACE]},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [{"text": "hm"}], "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "q", "namespace": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "y"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{", "reasoning": "a"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "text", "text": "y"}]},
        {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}},
        {"type": "shell_call_output", "call_id": "3", "output": [{"stdout": "a"}]},
        {"type": "item_reference", "id": "5"},
    ],
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [TEXT],
    "tools": [
        {"name": "f", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "x"}]},
    "messages": [
        {"role": "user", "content": [TEXT]},
        {"role": "system", "content": [TEXT]},
        {
            "role": "assistant",
            "reasoning": "a",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [
                        {"type": "tool_reference", "tool_name": "f"},
                        {"type": "search_result", "title": "a", "source": "b", "content": [TEXT]},
                    ],
                }
            ],
        },
    ],
}
WRONG: list[Any] = [None, 5, "x", "", [], [5], {}, {"type": {"a": []}}, {"type": ["a"], "name": []}]

Path = tuple[str | int, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where each part of `value` is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from paths(part, (*path, key))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RequestKind.RESPONSE, RESPONSE),
        (RequestKind.MESSAGE, MESSAGE),
        (RequestKind.COUNTED_MESSAGE, MESSAGE),
    ],
)
def test_no_wrong_part_is_an_error_of_the_server(kind: RequestKind, body: dict[str, Any]) -> None:
    planner = Planner(hermes_model(), 4096, lambda: 7)
    planner.plan(kind, to_json(body).encode())
    num_refused = 0
    for path in paths(body):
        for wrong in WRONG:
            changed = part = deepcopy(body)
            for key in path[:-1]:
                part = part[key]  # type: ignore[index]
            part[path[-1]] = wrong  # type: ignore[index]
            try:
                planner.plan(kind, to_json(changed).encode())
            except (InvalidRequest, ModelNotFound):
                num_refused += 1
    assert num_refused > 100
