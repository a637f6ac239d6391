"""From a body of Anthropic's `/v1/messages` to the body of a chat.

A text of the assistant that is the last message is continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.api.bodies.messages.conversation import MessageTurns, Turn
from router.api.bodies.places import Places
from router.api.bodies.schemas import Maybe, Nothing, Whole, WholeBody, checked_session
from router.api.bodies.unknown_fields import LeftOut

PLACES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
    "tool_choice.function": "tool_choice",
}
"""Fields of a chat, and where a client has them, for errors."""

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
    }
    left_out: ClassVar[Mapping[str, Nothing]] = {
        "context_management": (None, {}, [], {"edits": []})
    }

    max_tokens: Whole
    messages: list[Any]
    system: str | list[Any] | None = None
    stop_sequences: Any = None
    tools: list[Any] | None = None
    tool_choice: Maybe[dict[str, Any]] = None
    thinking: Maybe[dict[str, Any]] = None
    output_config: Maybe[dict[str, Any]] = None
    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    priority: Any = None


class CountedBody(MessageBody):
    """`POST /v1/messages/count_tokens`: a message of which the prompt alone is asked for."""

    max_tokens: Whole = 1


def chat_of_message(body: MessageBody, places: Places, left_out: LeftOut) -> dict[str, Any]:
    """Return the body of a chat that asks for the same.

    Notes the `places` of its parts, and what was left out. Raises `InvalidRequest`.
    """
    choice, config = body.tool_choice or {}, body.output_config or {}
    chat: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SAME},
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tools": None if body.tools is None else _tools(body.tools, places, left_out),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "thinking": body.thinking,
        "reasoning_effort": config.get("effort"),
        "response_format": _format(config.get("format")),
        "user": _user((body.model_extra or {}).get("metadata")),
    }
    conversation = MessageTurns(places, left_out)
    if body.system not in (None, []):
        conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages.{index}")
    turns = conversation.ended()
    continues = bool(turns) and _is_open(turns[-1])
    return chat | {
        "messages": turns,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
    }


def _user(metadata: Any) -> str | None:
    """Return what other APIs call `user`. Raises `InvalidRequest` for what is no such name."""
    name = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidRequest("metadata.user_id is not text", param="metadata.user_id")
    return checked_session(name, "metadata.user_id")


def _is_open(turn: Turn) -> bool:
    """Return whether the answer goes on from `turn`, the last one: the beginning of its text."""
    is_text = bool(turn.get("content")) and "tool_calls" not in turn
    return turn["role"] == "assistant" and is_text


def _tools(tools: list[Any], places: Places, left_out: LeftOut) -> list[Any]:
    """Return the client's own tools as functions.

    Those of the server are left out, unless there are no others.
    """
    kinds = [_kind(tool) for tool in tools]
    is_own = [not isinstance(kind, str) or kind == "custom" for kind in kinds]
    functions: list[Any] = []
    for number, tool in enumerate(tools):
        if is_own[number] or not any(is_own):
            path = f"tools.{len(functions)}"
            functions.append(_tool(tool, path, f"tools.{number}", places))
        else:
            left_out.add_type("tools", str(kinds[number]))
    return functions


def _kind(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, Mapping) else None


def _tool(tool: Any, path: str, field: str, places: Places) -> Any:
    places.put(path, field)
    if not isinstance(tool, Mapping) or _kind(tool) not in ("custom", None):
        return tool
    places.put(f"{path}.function", field)
    places.put(f"{path}.function.parameters", f"{field}.input_schema")
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


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
