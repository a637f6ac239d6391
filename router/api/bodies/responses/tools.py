"""The tools of `/v1/responses` as functions of a chat.

A custom tool becomes a function with one text argument, and the tools of a namespace become
functions with its name before theirs. Tools that OpenAI's server runs are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.client_tools import TEXT_ARGUMENT, ClientTool, function_name
from router.api.bodies.places import Places
from router.api.bodies.unknown_fields import LeftOut

_INPUT = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}
_OWN = ("function", "custom")
"""The kinds of tools that the client runs."""


class Tools:
    """The functions that the tools of a request become."""

    def __init__(self, places: Places, left_out: LeftOut) -> None:
        """Begin without a tool."""
        self._functions: list[Any] = []
        self._names: set[str] = set()
        self._first_left_out: tuple[Any, str] | None = None
        self._places = places
        self._left_out = left_out
        self.client_tools: dict[str, ClientTool] = {}

    def ended(self) -> list[Any]:
        """Return the functions of a chat; where all was left out, a tool that it refuses."""
        if not self._functions and self._first_left_out is not None:
            self._put(*self._first_left_out)
        return self._functions

    def add(self, tool: Any, field: str, *, is_found: bool = False) -> None:
        """Add a tool, which may be several functions or none. Raises `InvalidRequest`.

        One that `is_found` in the input, and was there before, is not added again.
        """
        kind = _kind(tool)
        if kind == "namespace":
            for number, inner in enumerate(_inner_tools(tool, field)):
                where = f"{field}.tools.{number}"
                if _kind(inner) in _OWN:
                    about = "" if number else tool.get("description")
                    self._add_own(inner, where, tool["name"], about, is_found)
                else:
                    self._leave_out(inner, where)
        elif kind in _OWN:
            self._add_own(tool, field, None, "", is_found)
        else:
            self._leave_out(tool, field)

    def choice(self, choice: Any) -> Any:
        """Return `tool_choice` as chats have it."""
        kind = _kind(choice)
        if kind in _OWN:
            return _named(choice)
        if kind != "allowed_tools":
            return choice
        choice, place = _flat(choice, "tool_choice")
        tools = choice.get("tools")
        if isinstance(tools, list):
            fields = {f"{place}.tools.{number}": tool for number, tool in enumerate(tools)}
            own = {field: tool for field, tool in fields.items() if _kind(tool) in _OWN} or fields
            for number, field in enumerate(own):
                self._places.put(f"tool_choice.allowed_tools.tools.{number}", field)
                self._places.put(f"tool_choice.allowed_tools.tools.{number}.function", field)
            tools = [_named(tool) if _kind(tool) in _OWN else tool for tool in own.values()]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def _add_own(
        self, tool: Mapping[str, Any], field: str, namespace: str | None, about: Any, is_found: bool
    ) -> None:
        """Add a tool that the client runs; `about` is the text about its namespace."""
        tool, field = _flat(tool, field)
        name: Any = tool.get("name")
        is_custom = tool["type"] == "custom"
        called: Any = function_name(name, namespace) if isinstance(name, str) else name
        if is_found and isinstance(name, str) and called in self._names:
            return
        function = {key: value for key, value in tool.items() if key != "type"} | {"name": called}
        if is_custom:
            function = {"name": called, "description": self._description(tool, field)}
            function["parameters"] = _INPUT
        function["description"] = _joined(about, function.get("description"))
        if isinstance(name, str):
            self._names.add(called)
            if is_custom or namespace is not None:
                self.client_tools[called] = ClientTool(name, namespace, is_custom)
        self._put({"type": "function", "function": function}, field)

    def _description(self, tool: Mapping[str, Any], field: str) -> Any:
        """Return the description of a custom tool for the model, with the grammar of its input."""
        form: Any = tool.get("format")
        if _kind(form) != "grammar":
            return tool.get("description")
        grammar, syntax = form.get("definition"), form.get("syntax")
        if not isinstance(grammar, str) or not isinstance(syntax, str):
            raise InvalidRequest(
                f"{field}.format is not a grammar: wanted the texts syntax and definition",
                param=f"{field}.format",
            )
        self._left_out.add("the grammars of custom tools, which are told and not enforced")
        told = f"The input follows this grammar ({syntax}):\n{grammar}"
        return _joined(tool.get("description"), told)

    def _leave_out(self, tool: Any, field: str) -> None:
        """Leave out a tool that OpenAI's server runs; what is no tool is refused as a function."""
        kind = _kind(tool)
        if not isinstance(kind, str):
            self._put(tool, field)
            return
        self._left_out.add_type("tools", kind)
        self._first_left_out = self._first_left_out or (tool, field)

    def _put(self, tool: Any, field: str) -> None:
        path = f"tools.{len(self._functions)}"
        self._places.put(path, field)
        self._places.put(f"{path}.function", field)
        self._functions.append(tool)


def _kind(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, Mapping) else None


def _flat(tool: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], str]:
    """Return a tool of the client, or a choice of one, and where its fields are.

    Chats have them one level deeper, and some clients send that shape here as well.
    """
    kind = tool["type"]
    inner = tool.get(kind)
    if "name" in tool or not isinstance(inner, Mapping):
        return tool, field
    return {**inner, "type": kind}, f"{field}.{kind}"


def _inner_tools(namespace: Mapping[str, Any], field: str) -> list[Any]:
    if not isinstance(namespace.get("name"), str):
        raise InvalidRequest(f"{field}.name is not the name of a namespace", param=f"{field}.name")
    tools = namespace.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest(f"{field}.tools is not a list of tools", param=f"{field}.tools")
    return tools


def _joined(first: Any, second: Any) -> Any:
    """Return two texts as one, or the one that is there; what is no text is refused later."""
    if not first or not second:
        return first or second
    texts = (first, second)
    return "\n\n".join(texts) if all(isinstance(one, str) for one in texts) else texts


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function that a choice names."""
    tool, _ = _flat(tool, "")
    name, namespace = tool.get("name"), tool.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = function_name(name, namespace)
    return {"type": "function", "function": {"name": name}}
