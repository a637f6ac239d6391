"""Conversations as coding agents have them, from the first request to the last one.

The requests have the shapes that Codex and Claude Code send; their texts are our own. The answers
are scripted, and go back in the next request as they came.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from router.tools.formats import HERMES
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model

CONTEXT = 8192


def new_edge() -> Edge:
    return make_edge(says(""), model=hermes_model(CONTEXT))


async def asked(edge: Edge, path: str, body: dict[str, Any], said: str) -> list[dict[str, Any]]:
    """The events of a stream in which the model says `said`."""
    edge.generator.script = says(said, size=3)
    async with edge.client() as client:
        reply = await client.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    *frames, end = reply.text.split("\n\n")
    assert end == ""
    return [json.loads(frame.split("\ndata: ")[1]) for frame in frames]


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# --- Codex on /v1/responses -----------------------------------------------------------------------

PATCH = '*** Begin Patch\n*** Update File: a.py\n+print("é")\n*** End Patch'
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You write code.",
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Changes files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
        {
            "type": "namespace",
            "name": "mcp__notes",
            "description": "Notes of the team.",
            "tools": [
                {
                    "type": "function",
                    "name": "read",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
                }
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "one",
    "text": {"verbosity": "medium"},
    "client_metadata": {"session": "one"},
    "chat_template_kwargs": {"enable_thinking": True},
}


def said_by_user(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


async def turn_of_codex(edge: Edge, items: list[Any], said: str) -> list[dict[str, Any]]:
    """The items of one answer, which its stream and its last event have alike."""
    events = await asked(edge, "/v1/responses", CODEX | {"input": items}, said)
    declared: TypeAdapter[object] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        declared.validate_python(event)
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    kind = "response.custom_tool_call_input."
    texts = [one["delta"] for one in events if one["type"] == f"{kind}delta"]
    whole = [one["input"] for one in events if one["type"] == f"{kind}done"]
    custom = [item["input"] for item in done if item["type"] == "custom_tool_call"]
    assert ["".join(texts)] if texts else [] == whole == custom
    return done


@pytest.mark.covers("J04")
async def test_a_conversation_of_codex(caplog: pytest.LogCaptureFixture) -> None:
    edge = new_edge()
    history: list[Any] = [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [{"type": "custom", "name": "exec", "description": "Runs JavaScript."}],
        },
        said_by_user("Ask before you delete.", "developer"),
        said_by_user("<environment_context>cwd: app</environment_context>"),
        said_by_user("Print é."),
    ]
    run = HERMES.call_text("exec_command", '{"cmd": "cat a.py"}')
    items = await turn_of_codex(edge, history, f"\nI look.\n</think>\n\nI read it.\n{run}")
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert (items[2]["name"], items[2]["arguments"]) == ("exec_command", '{"cmd": "cat a.py"}')
    assert "namespace" not in items[2]
    output = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "x = 1"}
    history += [*items, output]

    change = HERMES.call_text("apply_patch", json.dumps({"input": PATCH}))
    items = await turn_of_codex(edge, history, f"\nhm\n</think>\n\n{change}")
    assert "<think>I look.</think>I read it." in prompt_of(edge)
    assert "<tool_response>x = 1</tool_response>" in prompt_of(edge)
    (call,) = [item for item in items if item["type"] == "custom_tool_call"]
    assert (call["name"], call["input"]) == ("apply_patch", PATCH)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    history += [*items, output]

    read = HERMES.call_text("mcp__notes.read", '{"id": 7}')
    items = await turn_of_codex(edge, history, f"\nhm\n</think>\n\n{read}")
    assert HERMES.call_text("apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False)) in (
        prompt_of(edge)
    )
    (call,) = [item for item in items if item["type"] == "function_call"]
    assert (call["namespace"], call["name"], call["arguments"]) == (
        *("mcp__notes", "read"),
        '{"id": 7}',
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": [TEXT_PART]}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    history += [*items, output, search, {"type": "item_reference", "id": "rs_1"}]

    items = await turn_of_codex(edge, history, "\nhm\n</think>\n\nIt prints é.")
    assert items[-1]["content"][0]["text"] == "It prints é."
    assert read in prompt_of(edge)
    assert "<tool_response>note 7</tool_response>" in prompt_of(edge)
    left_out = "".join(warnings(caplog))
    for kind in ("'web_search'", "'tool_search'", "'web_search_call'", "'item_reference'"):
        assert left_out.count(kind) == 1, "told once, however many requests"
    assert len(warnings(caplog)) == 6, "of those, one grammar and one unknown field"


TEXT_PART = {"type": "input_text", "text": "note 7"}


# --- Claude Code on /v1/messages ------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 500,
    "system": [
        {"type": "text", "text": "You write code."},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "metadata": {"user_id": "one"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"file_path": {"type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
        },
        {
            "name": "ToolSearch",
            "description": "Finds tools.",
            "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
        {
            "name": "mcp__notes__read",
            "description": "Reads a note.",
            "input_schema": {"type": "object", "properties": {"id": {"type": "integer"}}},
            "defer_loading": True,
            **CACHED,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
}


async def turn_of_claude(edge: Edge, messages: list[Any], said: str) -> dict[str, Any]:
    """The message of one answer, put together from its stream, after its prompt was counted."""
    body = CLAUDE | {"messages": messages}
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    async with edge.client() as client:
        count = await client.post("/v1/messages/count_tokens", json=counted)
    events = await asked(edge, "/v1/messages?beta=true", body, said)
    assert count.json() == {"input_tokens": len(edge.generator.calls[-1].prompt_token_ids)}
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"pieces": ""})
        if event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            if kind == "signature_delta":
                blocks[-1]["signature"] = piece
            else:
                blocks[-1]["pieces"] += piece
    for block in blocks:
        text, kind = block.pop("pieces"), block["type"]
        block |= {"input": json.loads(text)} if kind == "tool_use" else {kind: text}
    return {"role": "assistant", "content": blocks}


def results(said: dict[str, Any], *contents: Any) -> dict[str, Any]:
    calls = [block["id"] for block in said["content"] if block["type"] == "tool_use"]
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": called, "content": content}
            for called, content in zip(calls, contents, strict=True)
        ],
    }


@pytest.mark.covers("J05")
async def test_a_conversation_of_claude_code(caplog: pytest.LogCaptureFixture) -> None:
    edge = new_edge()
    reminder = {"type": "text", "text": "<system-reminder>cwd: app</system-reminder>"}
    history: list[Any] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "Print é.", **CACHED}]},
        {"role": "system", "content": "Agents: none."},
    ]
    read = HERMES.call_text("Read", '{"file_path": "a.py"}')
    find = HERMES.call_text("ToolSearch", '{"query": "notes"}')
    said = await turn_of_claude(edge, history, f"\nI look.\n</think>\n\nI read.\n{read}\n{find}")
    assert [block["type"] for block in said["content"]] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert said["content"][2]["input"] == {"file_path": "a.py"}
    assert "You write code.\nBe brief.\n\nAgents: none.\n# Tools" in prompt_of(edge)
    reference = {"type": "tool_reference", "tool_name": "mcp__notes__read"}
    history += [said, results(said, "x = 1", [reference])]

    note = HERMES.call_text("mcp__notes__read", '{"id": 7}')
    said = await turn_of_claude(edge, history, f"\nhm\n</think>\n\n{note}")
    assert "<think>I look.</think>I read." in prompt_of(edge)
    assert "<tool_response>mcp__notes__read</tool_response>" in prompt_of(edge)
    found = {
        "type": "search_result",
        "title": "Note 7",
        "source": "notes",
        "content": [{"type": "text", "text": "Use print."}],
    }
    history += [said, results(said, [found])]
    history.append({"role": "system", "content": [{"type": "text", "text": "Do not stop."}]})

    redacted = {"type": "redacted_thinking", "data": "xyz"}
    searched = [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "é"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
    ]
    said = await turn_of_claude(edge, history, "\nhm\n</think>\n\nIt prints é.")
    assert "<tool_response>Note 7\nnotes\nUse print.</tool_response>" in prompt_of(edge)
    said["content"] = [redacted, *searched, *said["content"]]
    history += [said, {"role": "user", "content": "Thanks."}]

    said = await turn_of_claude(edge, history, "\nhm\n</think>\n\nBye.")
    assert said["content"][-1] == {"type": "text", "text": "Bye."}
    assert "Be brief.\n\nAgents: none.\n\nDo not stop.\n# Tools" in prompt_of(edge)
    assert "<think>hm</think>It prints é.<|im_end|>" in prompt_of(edge)
    left_out = "".join(warnings(caplog))
    for kind in (
        *("'context_management'", "'web_search_20250305'", "'server_tool_use'"),
        "'web_search_tool_result'",
    ):
        assert left_out.count(kind) == 1, "told once, however many requests"
    assert len(warnings(caplog)) == 4
