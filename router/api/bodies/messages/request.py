"""From a body of Anthropic's `/v1/messages` to the body of a chat.

A message of the user may hold results of calls: they become messages of the role `tool`, before the
text beside them. A text of the assistant that is the last message is continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.api.bodies.places import Places
from router.api.bodies.schemas import Nothing, WholeBody

Turn = dict[str, Any]

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


def chat_of_message(body: MessageBody, places: Places) -> dict[str, Any]:
    """Return the body of a chat that asks for the same, and note the `places` of its parts.

    Raises `InvalidRequest`.
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    conversation = _Conversation(places)
    if body.system is not None:
        conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages.{index}")
    turns = conversation.turns
    continues = bool(turns) and _is_open(turns[-1])
    choice = body.tool_choice or {}
    config = body.output_config or {}
    return chat | {
        "messages": turns,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tools": None if body.tools is None else _tools(body.tools, places),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "chat_template_kwargs": _variables(body.thinking),
        "reasoning_effort": config.get("effort"),
        "response_format": _format(config.get("format")),
    }


class _Conversation:
    """The turns of a chat that messages become, and the places of these messages and blocks."""

    def __init__(self, places: Places) -> None:
        self.turns: list[Turn] = []
        self._places = places

    def add_system(self, system: Any) -> None:
        """Add the text, or the blocks of text, that come before all messages."""
        self._begin("system", "system", content="system")["content"] = _texts(system, "system")

    def add(self, message: Any, field: str) -> None:
        """Add a message, which may be several turns. Raises `InvalidRequest`."""
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant"):
            raise InvalidRequest(
                f"{field}.role is {str(role)[:40]!r}: wanted user or assistant",
                param=f"{field}.role",
            )
        content = message.get("content")
        if not isinstance(content, list):
            self._begin(role, field)["content"] = content
        elif role == "assistant":
            self._add_answered(content, field)
        else:
            self._add_asked(content, field)

    def _add_answered(self, content: list[Any], field: str) -> None:
        """Add the turn of the assistant: what it thought, its text and its calls."""
        turn, texts = self._begin("assistant", field), {}
        for index, block in enumerate(content):
            kind, where = _kind(block), f"{field}.content.{index}"
            if kind == "tool_use":
                self._add_call(block, where)
            elif kind == "thinking":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + str(
                    block.get("thinking", "")
                )
            elif kind != "redacted_thinking":
                texts[where] = _text(block, where)
        self._add_texts(texts)
        turn["content"] = turn["content"] or None

    def _add_call(self, block: Mapping[str, Any], field: str) -> None:
        function = {"name": block.get("name"), "arguments": block.get("input")}
        calls = self.turns[-1].setdefault("tool_calls", [])
        calls.append({"id": block.get("id"), "type": "function", "function": function})
        path = f"{self._path}.tool_calls.{len(calls) - 1}"
        self._places.put(path, field)
        self._places.put(f"{path}.function", field)
        self._places.put(f"{path}.function.arguments", f"{field}.input")

    def _add_asked(self, content: list[Any], field: str) -> None:
        """Add the results of calls, and then what the user says."""
        texts, has_results = {}, False
        for index, block in enumerate(content):
            where = f"{field}.content.{index}"
            if _kind(block) == "tool_result":
                has_results = True
                turn = self._begin("tool", where, tool_call_id=f"{where}.tool_use_id")
                turn["content"] = _texts(block.get("content") or "", f"{where}.content")
                turn["tool_call_id"] = block.get("tool_use_id")
            else:
                texts[where] = _text(block, where)
        if texts or not has_results:
            self._begin("user", field)
            self._add_texts(texts)

    def _add_texts(self, texts: Mapping[str, Any]) -> None:
        """Make texts, under their places, the content of the last turn."""
        self.turns[-1]["content"] = list(texts.values())
        for number, place in enumerate(texts):
            self._places.put(f"{self._path}.content.{number}", place)

    def _begin(self, role: str, field: str, **places: str) -> Turn:
        """Return a new turn that comes from `field`, and its parts from `places`."""
        self.turns.append({"role": role})
        self._places.put(self._path, field)
        for name, place in places.items():
            self._places.put(f"{self._path}.{name}", place)
        return self.turns[-1]

    @property
    def _path(self) -> str:
        """Where the last turn is in the chat."""
        return f"messages.{len(self.turns) - 1}"


def _is_open(turn: Turn) -> bool:
    """Return whether the answer goes on from `turn`, the last one: the beginning of its text."""
    is_text = bool(turn.get("content")) and "tool_calls" not in turn
    return turn["role"] == "assistant" and is_text


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


def _tools(tools: list[Any], places: Places) -> list[Any]:
    return [_tool(tool, f"tools.{index}", places) for index, tool in enumerate(tools)]


def _tool(tool: Any, field: str, places: Places) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
        return tool
    places.put(f"{field}.function", field)
    places.put(f"{field}.function.parameters", f"{field}.input_schema")
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
