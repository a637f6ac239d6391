"""The items of a response's input as turns of a chat.

An item of thinking, a message of the assistant and calls that follow each other are one turn.
Records of what OpenAI's server did by itself, or keeps, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.client_tools import TEXT_ARGUMENT, function_name
from router.api.bodies.places import Places
from router.api.bodies.responses.tools import Tools
from router.api.bodies.schemas import data_as_text
from router.api.bodies.thought_codes import thought_of
from router.api.bodies.unknown_fields import LeftOut

Turn = dict[str, Any]

_THOUGHTS = ("reasoning_content", "reasoning")
"""The fields of chats with the reasoning of a message, where it is no item of its own."""
_OTHER_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Calls of tools that the client runs and this server does not have: the name of each tool, and
the field with its arguments."""
_MEDIA = ("input_image", "input_file", "input_audio", "input_video")
"""Parts of what a tool returned that are no text."""
_OUTPUTS = (
    *("function_call_output", "custom_tool_call_output"),
    *(f"{kind}_output" for kind in _OTHER_CALLS),
)


class ResponseTurns:
    """The turns of a chat that items of the input become, and the places of these items."""

    def __init__(self, places: Places, left_out: LeftOut, tools: Tools) -> None:
        """Begin without a turn; items may bring more `tools`."""
        self._turns: list[Turn] = []
        self._places = places
        self._left_out = left_out
        self._tools = tools
        self._first_left_out: str | None = None

    def ended(self) -> list[Turn]:
        """Return all turns. Raises `InvalidRequest` where there were only items to leave out."""
        if not self._turns and self._first_left_out is not None:
            field = self._first_left_out
            raise InvalidRequest(
                f"{field} is a record that this server does not keep: wanted a message among the "
                "items",
                param=field,
            )
        return self._turns

    def add_text(self, role: str, text: str, field: str) -> None:
        """Add a text that is a turn of its own."""
        self._turns.append({"role": role, "content": text})
        self._note(field, content=field)

    def add(self, item: Any, field: str) -> None:
        """Add an item of the input. Raises `InvalidRequest`."""
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{field} is not an object", param=field)
        match _type(item):
            case "message":
                self._add_message(item, field)
            case "function_call":
                self._add_call(item, field, item.get("name"), item.get("arguments"))
            case "custom_tool_call":
                text = item.get("input")
                if not isinstance(text, str):
                    raise InvalidRequest(f"{field}.input is not text", param=f"{field}.input")
                self._add_call(item, field, item.get("name"), {TEXT_ARGUMENT: text})
            case "reasoning":
                thought = _thought(item, field)
                if thought:
                    self._turns.append({"role": "assistant", "reasoning_content": thought})
            case "additional_tools" | "tool_search_output":
                self._add_tools(item.get("tools"), f"{field}.tools")
            case str(kind) if kind in _OUTPUTS:
                self._add_output(item, field)
            case str(kind) if kind in _OTHER_CALLS:
                name, arguments = _OTHER_CALLS[kind]
                self._add_call(item, field, name, item.get(arguments))
            case str(kind):
                self._left_out.add_type("input items", kind)
                self._first_left_out = self._first_left_out or f"{field}.type"
            case kind:
                raise InvalidRequest(f"{field}.type is not text", param=f"{field}.type")

    def _add_tools(self, tools: Any, field: str) -> None:
        if not isinstance(tools, list):
            raise InvalidRequest(f"{field} is not a list of tools", param=field)
        for index, tool in enumerate(tools):
            self._tools.add(tool, f"{field}.{index}", is_found=True)

    def _add_message(self, item: Mapping[str, Any], field: str) -> None:
        content = _content(item.get("content"), f"{field}.content")
        role = item.get("role")
        if role == "assistant":
            turn = self._assistant()
            turn["content"] = content
            self._add_thoughts(turn, item, field)
        else:
            self._turns.append({"role": role, "content": content})
        self._note(field, content=f"{field}.content")

    def _add_call(self, item: Mapping[str, Any], field: str, name: Any, arguments: Any) -> None:
        namespace = item.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = function_name(name, namespace)
        function = {"name": name, "arguments": arguments}
        call = {"id": _call_id(item), "type": "function", "function": function}
        turn = self._assistant(is_call=True)
        self._add_thoughts(turn, item, field)
        calls = turn.setdefault("tool_calls", [])
        calls.append(call)
        path = f"messages.{len(self._turns) - 1}.tool_calls.{len(calls) - 1}"
        self._places.put(f"{path}.function", field)
        self._places.put(f"{path}.id", f"{field}.call_id")

    def _add_output(self, item: Mapping[str, Any], field: str) -> None:
        output, where = item.get("output"), f"{field}.output"
        if item["type"] == "shell_call_output":  # a list of what each command wrote
            content = json.dumps(output, ensure_ascii=False)
        else:
            content = _content(data_as_text(output), where, _MEDIA)
        self._turns.append({"role": "tool", "content": content, "tool_call_id": _call_id(item)})
        self._note(field, content=where, tool_call_id=f"{field}.call_id")

    def _add_thoughts(self, turn: Turn, item: Mapping[str, Any], field: str) -> None:
        """Add the thoughts in an item of the last `turn`, which follows no item of thinking."""
        for name in _THOUGHTS:
            if item.get(name) is not None and not any(one in turn for one in _THOUGHTS):
                turn[name] = item[name]
                self._places.put(f"messages.{len(self._turns) - 1}.{name}", f"{field}.{name}")

    def _assistant(self, *, is_call: bool = False) -> Turn:
        """Return the turn that an item of the assistant belongs to, which may be a new one."""
        last = self._turns[-1] if self._turns else None
        if last is not None and last["role"] == "assistant":
            is_open = is_call or not ("content" in last or "tool_calls" in last)
            if is_open:
                return last
        self._turns.append({"role": "assistant"})
        return self._turns[-1]

    def _note(self, field: str, **places: str) -> None:
        """Note that the last turn comes from `field`, and its parts from `places`."""
        path = f"messages.{len(self._turns) - 1}"
        self._places.put(path, field)
        for name, place in places.items():
            self._places.put(f"{path}.{name}", place)


def _type(item: Mapping[str, Any]) -> Any:
    """Return the type of an item, which messages and references to items may leave out."""
    kind = item.get("type")
    if kind is None:
        is_reference = item.get("role") is None and isinstance(item.get("id"), str)
        return "item_reference" if is_reference else "message"
    return kind


def _call_id(item: Mapping[str, Any]) -> Any:
    """Return the id of a call; outputs of a local shell have it as their own."""
    given = item.get("call_id")
    return item.get("id") if given is None else given


def _content(content: Any, field: str, others: Sequence[str] = ()) -> Any:
    """Return the content of a message with the parts' types under their names in chats.

    Parts of `others` are parts of a chat as they are.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal" or kind in others:
            parts.append(part)
        elif kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif not isinstance(part, Mapping):
            raise InvalidRequest(
                f"{field}.{index} is not a content part: wanted "
                '{"type": "input_text", "text": …}',
                param=f"{field}.{index}",
            )
        else:
            where = f"{field}.{index}.type"
            raise InvalidRequest(
                f"{where} is {str(kind)[:40]!r}: this server takes text alone", param=where
            )
    return parts


def _thought(item: Mapping[str, Any], field: str) -> str:
    """Return what an item says was thought, in a text or else in a code."""
    content, texts = item.get("content"), []
    if content is not None and not isinstance(content, list):
        raise InvalidRequest(f"{field}.content is not a list of parts", param=f"{field}.content")
    for part in content or ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.content has no text", param=f"{field}.content")
        texts.append(text)
    return "".join(texts) or thought_of(item.get("encrypted_content"))
