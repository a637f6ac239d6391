"""What coding agents send beside messages and functions: served, or left out with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.bodies.unknown_fields import MAX_FIELD_CHARS, MAX_IGNORED
from tests.support.http.agents import (
    COUNT,
    MESSAGES,
    OWN,
    RESPONSES,
    TEXT,
    USER,
    body_of,
    edge_that_says,
    message,
    post,
    prompt_of,
    warnings,
)

SERVER_USE: dict[str, Any] = {
    "type": "server_tool_use",
    "id": "1",
    "name": "web_search",
    "input": {"query": "x"},
}
SERVER_RESULT: dict[str, Any] = {
    "type": "web_search_tool_result",
    "tool_use_id": "1",
    "content": [],
}

LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"context_management": {"edits": [{"type": "x"}]}}, "field 'context_management'"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "field 'context_management'"),
    *(
        (MESSAGES, {"tools": [{"type": kind, "name": kind[:4]}, OWN[MESSAGES]]}, f"type {kind!r}")
        for kind in ("web_search_20250305", "bash_20250124", "text_editor_20250728", "mcp_toolset")
    ),
    *(
        (RESPONSES, {"tools": [{"type": kind}, OWN[RESPONSES]]}, f"type {kind!r}")
        for kind in (
            *("web_search", "web_search_preview", "local_shell", "shell", "apply_patch", "mcp"),
            *("tool_search", "image_generation", "file_search", "code_interpreter", "computer"),
        )
    ),
    *(
        (RESPONSES, {"input": [{"type": kind, "id": "1"}, USER]}, f"items of the type {kind!r}")
        for kind in (
            *("item_reference", "web_search_call", "file_search_call", "image_generation_call"),
            *("code_interpreter_call", "mcp_call", "mcp_list_tools", "computer_call"),
            *("tool_search_call", "compaction", "compaction_trigger", "mcp_approval_response"),
        )
    ),
    *(
        (
            MESSAGES,
            {"messages": [USER, message("assistant", block, TEXT), USER]},
            str(block["type"]),
        )
        for block in (
            SERVER_USE,
            SERVER_RESULT,
            {"type": "mcp_tool_use", "id": "1", "name": "f", "input": {}, "server_name": "s"},
            {"type": "bash_code_execution_tool_result", "tool_use_id": "1", "content": {}},
            {"type": "compaction", "content": "We said Hi."},
        )
    ),
    (MESSAGES, {"messages": [message("user", {"type": "container_upload"}, TEXT)]}, "_upload'"),
]


@pytest.mark.covers("J01")
@pytest.mark.parametrize(("path", "fields", "words"), LEFT_OUT)
async def test_what_the_server_does_not_have_is_left_out_with_one_warning(
    path: str, fields: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    edge = edge_that_says()
    for _ in range(2):
        await post(edge, path, body_of(path, **fields))
    (warning,) = warnings(caplog)
    assert words in warning
    assert "--strict-fields" in warning
    plain = edge_that_says()
    has_tools = {"tools": [OWN[path]]} if "tools" in fields else {}
    said = fields.get("messages", [USER])
    kept = [USER, message("assistant", TEXT), USER] if len(said) > 1 else [USER]
    alike = {} if path == RESPONSES else {"messages": kept}
    await post(plain, path, body_of(path, **alike, **has_tools))
    assert prompt_of(edge) == prompt_of(plain), "as if it had not been there"


@pytest.mark.covers("J01")
@pytest.mark.parametrize(("path", "fields", "words"), LEFT_OUT)
async def test_strict_fields_refuse_it(path: str, fields: dict[str, Any], words: str) -> None:
    edge = edge_that_says(strict_fields=True)
    error = await post(edge, path, body_of(path, **fields), status=400)
    assert words in error["error"]["message"]
    assert not edge.generator.calls


@pytest.mark.covers("J01")
@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
        (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "mcp"}]}, "tools.0.type"),
        (
            RESPONSES,
            {"input": [{"type": "additional_tools", "tools": [{"type": "mcp"}]}, USER]},
            "input.0.tools.0.type",
        ),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type"),
        (MESSAGES, {"messages": [message("assistant", SERVER_USE)]}, "messages.0.content.0"),
        (MESSAGES, {"messages": [message("user", SERVER_RESULT)]}, "messages.0.content.0"),
        (MESSAGES, {"messages": [message("user", {"type": "image"})]}, "messages.0.content.0.type"),
        (
            RESPONSES,
            {"tools": [OWN[RESPONSES], {"type": "mcp"}], "tool_choice": {"type": "mcp"}},
            "tool_choice.type",
        ),
        (
            RESPONSES,
            {
                "tools": [OWN[RESPONSES]],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "mcp"}],
                },
            },
            "tool_choice.tools.0",
        ),
    ],
)
async def test_a_request_that_asks_for_nothing_else_is_refused(
    path: str, fields: dict[str, Any], field: str
) -> None:
    edge = edge_that_says()
    error = await post(edge, path, body_of(path, **fields), status=400)
    assert error["error"]["message"].startswith(field)
    assert not edge.generator.calls


async def test_an_empty_namespace_is_no_tool() -> None:
    edge = edge_that_says()
    await post(edge, RESPONSES, body_of(RESPONSES, tools=[SPACE | {"tools": []}]))
    assert "# Tools" not in prompt_of(edge)


@pytest.mark.parametrize("value", [None, {}, {"edits": []}])
async def test_an_empty_context_management_is_no_news(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = body_of(MESSAGES, context_management=value)
    await post(edge_that_says(strict_fields=True), MESSAGES, body)
    assert warnings(caplog) == []


async def test_how_much_is_logged_of_what_was_left_out_has_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = [{"type": f"{number:04}" + "x" * 1000} for number in range(MAX_IGNORED + 5)]
    await post(edge_that_says(), RESPONSES, {"input": [*items, USER]})
    assert len(warnings(caplog)) == MAX_IGNORED
    assert max(len(text.split("'")[1]) for text in warnings(caplog)) == MAX_FIELD_CHARS


async def test_tools_that_were_left_out_do_not_shift_the_names_of_others() -> None:
    web = {"type": "web_search_20250305", "name": "w"}
    for path, tools, field in (
        (MESSAGES, [web, web, OWN[MESSAGES] | {"input_schema": [1]}], "tools.2.input_schema"),
        (MESSAGES, [web, OWN[MESSAGES] | {"name": 5}], "tools.1.name"),
        (RESPONSES, [{"type": "mcp"}, OWN[RESPONSES] | {"parameters": [1]}], "tools.1.parameters"),
    ):
        error = await post(edge_that_says(), path, body_of(path, tools=tools), status=400)
        assert error["error"]["message"].startswith(field)


# --- /v1/messages ---------------------------------------------------------------------------------


@pytest.mark.covers("J02")
async def test_a_system_message_among_the_others_is_in_the_prompt() -> None:
    """The template of this model renders the first one alone, so the others join it."""
    edge = edge_that_says()
    said = [USER, {"role": "system", "content": [TEXT | {"text": "Skills: none."}]}, USER]
    silent = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    await post(edge, MESSAGES, body_of(MESSAGES, system="Be brief.", messages=[*said, silent]))
    assert prompt_of(edge).startswith("<|im_start|>system\nBe brief.\n\nSkills: none.<|im_end|>\n")
    assert prompt_of(edge).count("<|im_start|>user\nHi<|im_end|>") == 2


@pytest.mark.covers("J05")
async def test_references_to_tools_and_results_of_searches_are_text() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    found = {
        "type": "search_result",
        "title": "Weather",
        "source": "https://example.com/w",
        "content": [TEXT | {"text": "sunny"}, TEXT | {"text": "warm"}],
    }
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [reference, found]}
    said = [USER, message("assistant", use), message("user", result, found)]
    edge = edge_that_says()
    await post(edge, MESSAGES, body_of(MESSAGES, messages=said, tools=[OWN[MESSAGES]]))
    shown = "Weather\nhttps://example.com/w\nsunny\nwarm"
    assert f"<tool_response>get_weather\n{shown}</tool_response>" in prompt_of(edge)
    assert f"<|im_start|>user\n{shown}<|im_end|>" in prompt_of(edge)


@pytest.mark.covers("J05")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": [OWN[MESSAGES]]},
        {"tools": [OWN[MESSAGES], {"type": "web_search_20250305", "name": "w"}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [USER, {"role": "system", "content": "Be brief."}]},
    ],
)
async def test_the_tokens_of_a_message_are_counted(fields: dict[str, Any]) -> None:
    edge = edge_that_says()
    body = body_of(MESSAGES, **fields)
    usage = (await post(edge, MESSAGES, body))["usage"]
    body.pop("max_tokens")
    counted = await post(edge, COUNT, body)
    assert counted == {"input_tokens": usage["input_tokens"]}
    assert len(edge.generator.calls) == 1, "nothing is generated"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": [USER | {"content": "x" * 9000}]}, 400, "invalid_request_error", "tokens"),
    ],
)
async def test_what_cannot_be_counted_is_an_error_of_this_api(
    fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    body = body_of(MESSAGES, **fields)
    error = await post(edge_that_says(), COUNT, body, status=status)
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert words in error["error"]["message"]


# --- /v1/responses --------------------------------------------------------------------------------

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "By name.", "parameters": {}},
        {"type": "custom", "name": "query"},
        {"type": "mcp"},
    ],
}


@pytest.mark.covers("J03")
async def test_custom_tools_and_namespaces_are_functions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge = edge_that_says()
    await post(edge, RESPONSES, body_of(RESPONSES, tools=[PATCH, SPACE]))
    prompt = prompt_of(edge)
    for shown in (
        '"name": "apply_patch", "description": "Changes files.\\n\\nThe input follows this grammar '
        '(lark):\\nstart: \\"x\\""',
        '"properties": {"input": {"type": "string"}}',
        '"name": "crm.find", "description": "Customers.\\n\\nBy name."',
        '"name": "crm.query", "parameters"',
    ):
        assert shown in prompt
    assert len(warnings(caplog)) == 2
    assert "grammars of custom tools" in "".join(warnings(caplog))
    assert "'mcp'" in "".join(warnings(caplog))


@pytest.mark.covers("J03")
@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
async def test_tools_that_an_item_brings_are_functions_too(kind: str) -> None:
    """One that is there already stays as it is."""
    again = OWN[RESPONSES] | {"description": "Again."}
    item = {"type": kind, "role": "developer", "call_id": "1", "tools": [again, SPACE, SPACE]}
    edge = edge_that_says()
    await post(edge, RESPONSES, {"input": [item, USER], "tools": [OWN[RESPONSES]]})
    assert '"crm.find"' in prompt_of(edge)
    assert prompt_of(edge).count('"name": "f"') == 1
    assert "Again." not in prompt_of(edge)


@pytest.mark.covers("J04")
async def test_calls_of_tools_that_the_server_does_not_have_are_calls() -> None:
    items = [
        {"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "1", "output": "a.py"},
        {"type": "shell_call", "call_id": "2", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "home"}]},
        {"type": "apply_patch_call", "call_id": "3", "operation": {"path": "a.py"}},
        {"type": "apply_patch_call_output", "call_id": "3", "output": "done"},
        {"type": "custom_tool_call", "call_id": "4", "name": "q", "namespace": "crm", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "4", "output": "y"},
    ]
    edge = edge_that_says()
    await post(edge, RESPONSES, {"input": [USER, *items]})
    for shown in (
        '{"name": "local_shell", "arguments": {"command": ["ls"]}}',
        "<tool_response>a.py</tool_response>",
        '{"name": "shell", "arguments": {"commands": ["pwd"]}}',
        '<tool_response>[{"stdout": "home"}]</tool_response>',
        '{"name": "apply_patch", "arguments": {"path": "a.py"}}',
        '{"name": "crm.q", "arguments": {"input": "x"}}',
        "<tool_response>y</tool_response>",
    ):
        assert shown in prompt_of(edge)


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "find", "namespace": "crm"}, "crm.find"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "mcp"}, {"type": "custom", "name": "apply_patch"}],
            },
            "apply_patch",
        ),
    ],
)
async def test_a_choice_of_such_a_tool(choice: dict[str, Any], called: str) -> None:
    edge = edge_that_says()
    body = body_of(RESPONSES, tools=[OWN[RESPONSES], PATCH, SPACE], tool_choice=choice)
    await post(edge, RESPONSES, body)
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    names = ("f", "apply_patch", "crm.find", "crm.query")
    assert [name for name in names if f'"{name}\\"' in grammar.text] == [called]
