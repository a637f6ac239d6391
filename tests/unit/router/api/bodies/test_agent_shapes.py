"""What coding agents send beside messages and functions: served, or left out with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.bodies.unknown_fields import MAX_FIELD_CHARS, MAX_IGNORED
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = f"{MESSAGES}/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TEXT: dict[str, Any] = {"type": "text", "text": "Hi"}
OWN: dict[str, dict[str, Any]] = {
    MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", "name": "f", "parameters": {"type": "object"}},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": "Hi", **fields}
    return {"max_tokens": 9, "messages": [USER], **fields}


async def post(edge: Edge, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def edge_that_says(text: str = "x", **config: Any) -> Edge:
    return make_edge(says(text), model=hermes_model(), **config)


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def message(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


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


@pytest.mark.covers("J27")
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "no such file"),
        ([TEXT | {"text": "a"}, TEXT | {"text": "b"}], "a\nb"),
        ("", ""),
        ([], ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("is_error", [True, False, None])
async def test_a_result_that_is_an_error_says_so(
    content: Any, shown: str, is_error: bool | None
) -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": is_error}
    said = [USER, message("assistant", use), message("user", result)]
    edge = edge_that_says()
    await post(edge, MESSAGES, body_of(MESSAGES, messages=said, tools=[OWN[MESSAGES]]))
    wanted = f"Error:\n{shown}" if is_error else shown
    assert f"<tool_response>{wanted}</tool_response>" in prompt_of(edge)


@pytest.mark.covers("J27")
async def test_an_image_of_a_call_that_failed_says_so() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    image = {"type": "image", "source": PICTURE}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image], "is_error": True}
    said = [USER, message("assistant", use), message("user", result)]
    edge = edge_that_says()
    await post(edge, MESSAGES, body_of(MESSAGES, messages=said, tools=[OWN[MESSAGES]]))
    assert "<tool_response>Error:\n[image left out" in prompt_of(edge)
    result["content"] = [TEXT | {"text": 5}]
    error = await post(edge, MESSAGES, body_of(MESSAGES, messages=said), status=400)
    assert "messages.2.content.0.content.0.text" in error["error"]["message"]


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
    assert [name for name in names if f'\\"{name}\\"' in grammar.text] == [called]


CALLED: dict[str, list[Any]] = {
    CHATS: [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1"},
    ],
    RESPONSES: [
        USER,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1"},
    ],
    MESSAGES: [
        USER,
        message("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        message("user", {"type": "tool_result", "tool_use_id": "1"}),
    ],
}
"""A call whose tool returned nothing, by endpoint."""


@pytest.mark.covers("J12")
@pytest.mark.parametrize(
    "nothing", [{}, {"content": None, "output": None}, {"content": [], "output": []}]
)
@pytest.mark.parametrize("path", CALLED)
async def test_a_tool_may_have_returned_nothing(path: str, nothing: dict[str, Any]) -> None:
    *before, last = CALLED[path]
    result = last["content"][0] if path == MESSAGES else last
    field = "output" if path == RESPONSES else "content"
    given = {**result, **{name: value for name, value in nothing.items() if name == field}}
    last = message("user", given) if path == MESSAGES else given
    edge = edge_that_says()
    name = "input" if path == RESPONSES else "messages"
    await post(edge, path, {**body_of(path), name: [*before, last]})
    assert "<tool_response></tool_response>" in prompt_of(edge)


@pytest.mark.covers("J28")
@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ({"temp": 21, "where": "Köln"}, '{"temp": 21, "where": "Köln"}'),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
        ([1, None], "[1, null]"),
        ({}, "{}"),
        (0, "0"),
        (4.5, "4.5"),
        (False, "false"),
        (["a", "b"], "a\nb"),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
@pytest.mark.parametrize("path", CALLED)
async def test_what_a_tool_returned_may_be_any_json(path: str, returned: Any, shown: str) -> None:
    *before, last = CALLED[path]
    if path != CHATS and returned == ["a", "b"]:
        return  # there each part says what it is
    if path == MESSAGES:
        last = message("user", last["content"][0] | {"content": returned})
    else:
        last = last | {"output" if path == RESPONSES else "content": returned}
    edge = edge_that_says()
    name = "input" if path == RESPONSES else "messages"
    await post(edge, path, {**body_of(path), name: [*before, last]})
    assert f"<tool_response>{shown}</tool_response>" in prompt_of(edge)


# --- images that tools returned -------------------------------------------------------------------

PICTURE: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
SHOWN = "data:image/png;base64,iVBORw0KGgo="
RESULTS: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"type": "image", "source": PICTURE}, "image"),
    (MESSAGES, {"type": "document", "source": PICTURE}, "file"),
    (RESPONSES, {"type": "input_image", "image_url": SHOWN}, "image"),
    (RESPONSES, {"type": "input_file", "file_data": "x"}, "file"),
    (CHATS, {"type": "image_url", "image_url": {"url": SHOWN}}, "image"),
    (CHATS, {"type": "file", "file": {"file_data": "x"}}, "file"),
    (CHATS, {"type": "input_audio", "input_audio": {"data": "x"}}, "sound"),
    (CHATS, {"type": "video_url", "video_url": {"url": SHOWN}}, "video"),
    (RESPONSES, {"type": "input_audio", "input_audio": {"data": "x"}}, "sound"),
    (RESPONSES, {"type": "input_video", "video_url": SHOWN}, "video"),
]


def with_result(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which a tool returned `parts`."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": list(parts)}
        return {"input": [USER, call, output]}
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": list(parts)}
        said = [USER, message("assistant", use), message("user", result)]
    else:
        made = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        result = {"role": "tool", "tool_call_id": "1", "content": list(parts)}
        said = [USER, {"role": "assistant", "tool_calls": made}, result]
    return {"max_tokens": 9, "messages": said}


@pytest.mark.covers("J22")
@pytest.mark.parametrize(("path", "part", "name"), RESULTS)
async def test_what_a_tool_returned_beside_text_is_left_out_and_told(
    path: str, part: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "Saved a.png."}
    edge = edge_that_says()
    for parts in ([part], [text, part], [part, text]):
        await post(edge, path, with_result(path, *parts))
    note = f"[{name} left out: this server takes text alone]"
    assert f"<tool_response>{note}\nSaved a.png.</tool_response>" in prompt_of(edge)
    (warning,) = warnings(caplog)
    assert f"parts of results of the type {part['type']!r}" in warning
    refused = await post(edge_that_says(strict_fields=True), path, with_result(path, part), 400)
    assert part["type"] in refused["error"]["message"]


@pytest.mark.covers("J22")
@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
async def test_what_a_user_shows_is_refused(path: str) -> None:
    (part,) = (one for at, one, name in RESULTS if at == path and name == "image")
    body = (
        {"input": [message("user", part)]}
        if path == RESPONSES
        else {
            "max_tokens": 9,
            "messages": [message("user", part)],
        }
    )
    error = await post(edge_that_says(), path, body, status=400)
    assert "takes text alone" in error["error"]["message"]
    odd = await post(edge_that_says(), path, with_result(path, {"type": "smell"}), status=400)
    assert "'smell'" in odd["error"]["message"]


# --- documents ------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"type": "text", "media_type": "text/plain", "data": "Line one.\nTwo."}
BLOCKS = {"type": "content", "content": [{"type": "text", "text": "Line one.\nTwo."}]}
WHOLE = {"type": "content", "content": "Line one.\nTwo."}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize("source", [PLAIN, BLOCKS, WHOLE])
async def test_a_document_of_text_is_text(
    source: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    document = {
        "type": "document",
        "source": source,
        "title": "Notes",
        "context": "Of May",
        "citations": {"enabled": True},
    }
    edge = edge_that_says()
    asked = {
        "max_tokens": 9,
        "messages": [message("user", document, {"type": "text", "text": "What is it?"})],
    }
    await post(edge, MESSAGES, asked)
    shown = "Notes\nOf May\nLine one.\nTwo."
    assert f"{shown}\nWhat is it?" in prompt_of(edge)
    await post(edge, MESSAGES, with_result(MESSAGES, document))
    assert f"<tool_response>{shown}</tool_response>" in prompt_of(edge)
    bare = {"type": "document", "source": source, "title": None, "context": None}
    await post(edge, MESSAGES, with_result(MESSAGES, bare))
    assert "<tool_response>Line one.\nTwo.</tool_response>" in prompt_of(edge)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("source", "param", "words"),
    [
        (PDF, "source", "is 'base64 application/pdf': this server takes text alone"),
        ({"type": "url", "url": "https://a.example/b"}, "source", "is 'url'"),
        ({"type": "file", "file_id": "f"}, "source", "is 'file'"),
        (None, "source", "is '': this server takes text alone: wanted the document's text"),
        ({"type": "text", "data": 5}, "source.data", "is not text"),
        ({"type": "content", "content": 5}, "source.content", "is not a list"),
        ({"type": "content", "content": [{"type": "image"}]}, "source.content.0.type", "'image'"),
    ],
)
async def test_another_document_is_refused_with_what_it_is(
    source: Any, param: str, words: str
) -> None:
    asked = {"max_tokens": 9, "messages": [message("user", {"type": "document", "source": source})]}
    error = (await post(edge_that_says(), MESSAGES, asked, status=400))["error"]["message"]
    assert error.startswith(f"messages.0.content.0.{param} ")
    assert words in error
