"""From a body of Anthropic's `/v1/messages` to the body of a chat.

A message of the user may hold results of calls: they become messages of the role `tool`, before the
text beside them. A text of the assistant that is the last message is continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.openai.schemas import Nothing, WholeBody

Turn = dict[str, Any]

CHAT_FIELDS = {
    "max_tokens": "max_completion_tokens",
    "stop_sequences": "stop",
    "output_config.format": "response_format",
    "messages": "continue_final_message",
}
"""Fields under the names that chats have for them, for errors."""

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "seed", "priority")
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class MessageBody(WholeBody):
    """`POST /v1/messages`."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo")
    )
    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "context_management": (None, {}),
    }

    max_tokens: int
    messages: list[Any]
    system: str | list[Any] | None = None
    stop_sequences: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    priority: Any = None


def chat_of_message(body: MessageBody) -> dict[str, Any]:
    """Return the body of a chat that asks for the same. Raises `InvalidRequest`."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    turns = [] if body.system is None else [_turn("system", _texts(body.system, "system"))]
    for index, message in enumerate(body.messages):
        turns += _turns(message, f"messages.{index}")
    continues = bool(turns) and _is_open(turns[-1])
    choice = body.tool_choice or {}
    config = body.output_config or {}
    return chat | {
        "messages": turns,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "chat_template_kwargs": _variables(body.thinking),
        "reasoning_effort": config.get("effort"),
        "response_format": _format(config.get("format")),
    }


def _turn(role: str, content: Any) -> Turn:
    return {"role": role, "content": content}


def _is_open(turn: Turn) -> bool:
    """Return whether the answer goes on from `turn`, the last one: the beginning of its text."""
    is_text = bool(turn.get("content")) and "tool_calls" not in turn
    return turn["role"] == "assistant" and is_text


def _turns(message: Any, field: str) -> list[Turn]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise InvalidRequest(
            f"{field}.role is {str(role)[:40]!r}: wanted user or assistant", param=f"{field}.role"
        )
    content = message.get("content")
    if not isinstance(content, list):
        return [_turn(role, content)]
    return _answered(content, field) if role == "assistant" else _asked(content, field)


def _answered(content: list[Any], field: str) -> list[Turn]:
    """Return the turn of the assistant: what it thought, its text and its calls."""
    turn: Turn = {"role": "assistant"}
    texts: list[Any] = []
    for index, block in enumerate(content):
        kind = _kind(block)
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + str(
                block.get("thinking", "")
            )
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{field}.content.{index}"))
    return [turn | {"content": texts or None}]


def _asked(content: list[Any], field: str) -> list[Turn]:
    """Return the results of calls, and then what the user says."""
    turns, texts = [], []
    for index, block in enumerate(content):
        where = f"{field}.content.{index}"
        if _kind(block) == "tool_result":
            result = _texts(block.get("content") or "", f"{where}.content")
            turns.append(_turn("tool", result) | {"tool_call_id": block.get("tool_use_id")})
        else:
            texts.append(_text(block, where))
    return [*turns, _turn("user", texts)] if texts or not turns else turns


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _texts(content: Any, field: str) -> Any:
    if not isinstance(content, list):
        return content
    return [_text(block, f"{field}.{index}") for index, block in enumerate(content)]


def _text(block: Any, field: str) -> dict[str, Any]:
    kind = _kind(block)
    if kind != "text":
        raise InvalidRequest(
            f"{field}.type is {str(kind)[:40]!r}: this server takes text alone",
            param=f"{field}.type",
        )
    return {"type": "text", "text": block.get("text")}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
        return tool
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice and not (isinstance(kind, str) and kind in _MODES):
        raise InvalidRequest(
            f"tool_choice.type is {json.dumps(kind)[:64]}: wanted auto, any, tool or none",
            param="tool_choice.type",
        )
    return _MODES.get(str(kind))


def _variables(thinking: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the variable of chat templates that lets a model think or not."""
    if thinking is None:
        return None
    return {"enable_thinking": thinking.get("type") != "disabled"}


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
