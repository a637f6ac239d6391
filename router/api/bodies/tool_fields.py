"""The fields of a chat that are about tools: which tools there are, and which may be called.

The fields are read here and not by their declaration, because what is wrong is named in the words
of the API: `tools.3.function.name`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from grammars.bounds import MAX_EMBEDDED
from grammars.nothing_asked import fill_empty_lists
from grammars.schema_walk import copied_parts
from router.api.bodies.json_text import check_depth
from router.api.bodies.unknown_fields import LeftOut
from router.tools.definitions import Tool, ToolUse

MAX_TOOLS = MAX_EMBEDDED - 1
"""OpenAI takes 128, other servers have no bound; agents with several MCP servers send more. 256
tools of 4 properties are compiled in 0.3 s, those of 10 in 0.6 s (a core of a Xeon)."""
MAX_NAME_CHARS = 128
MAX_SCHEMA_DEPTH = 64
"""Objects and lists within each other in `parameters`."""

_FUNCTION = "function"
_MODES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def tool_use(
    tools: list[Any] | None, choice: Any, *, is_parallel: bool | None, left_out: LeftOut
) -> ToolUse | None:
    """Return the tools of a request and what may be done with them; None where none may be called.

    Tools of other kinds are `left_out` beside functions. Raises `InvalidRequest` for tools or a
    choice that are not as in OpenAI's documentation.
    """
    defined = _tools(tools or [], left_out)
    mode, names = _choice(choice, [tool.name for tool in defined])
    if mode == "none" or not defined:
        return None
    return ToolUse(
        tools=defined,
        callable_names=frozenset(names),
        must_call=mode in ("required", "function"),
        is_named=mode == "function",
        # The one function that is named is called once.
        is_parallel=is_parallel is not False and mode != "function",
    )


def _tools(tools: Sequence[Any], left_out: LeftOut) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} entries: wanted at most {MAX_TOOLS}", param="tools"
        )
    has_functions = any(_kind(tool) == _FUNCTION for tool in tools)
    defined: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        kind = _kind(tool)
        if has_functions and isinstance(kind, str) and kind != _FUNCTION:
            left_out.add_type("tools", kind)
            continue
        field = f"tools.{index}"
        made = _tool(tool, field)
        if made.name in defined:
            raise InvalidRequest(
                f"tools names the function {made.name!r} twice: wanted different names",
                param=f"{_place(tool, field)}.name",
            )
        defined[made.name] = made
    return tuple(defined.values())


def _kind(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, Mapping) else None


def _tool(tool: Any, field: str) -> Tool:
    kind = _kind(tool)
    if kind != _FUNCTION:
        raise _wrong(f"{field}.type", kind, "function, the one kind that this server has")
    function, place = _function(tool), _place(tool, field)
    if function is None:
        raise _wrong(f"{field}.function", tool.get("function"), "an object with a name")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        wanted = f"1 to {MAX_NAME_CHARS} letters, digits, underscores, dashes and dots"
        raise _wrong(f"{place}.name", name, wanted)
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{place}.description", description, "text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{place}.strict", strict, "true or false")
    return Tool(
        name=name,
        description=description,
        parameters=_parameters(function.get("parameters"), f"{place}.parameters"),
        is_strict=bool(strict),
    )


def _function(tool: Any) -> Mapping[str, Any] | None:
    """Return the function of a tool, or of a choice.

    It is one level deeper than in `/v1/responses`, whose shape some clients send to chats as well.
    """
    if not isinstance(tool, Mapping):
        return None
    function = tool if "name" in tool and "function" not in tool else tool.get("function")
    return function if isinstance(function, Mapping) else None


def _place(tool: Mapping[str, Any], field: str) -> str:
    """Return where the function of a tool is."""
    return f"{field}.function" if "function" in tool else field


def _parameters(schema: Any, field: str) -> Mapping[str, Any] | None:
    if schema in (None, {}, []):  # an empty list: so PHP writes an object without fields
        return None
    if not isinstance(schema, Mapping):
        raise _wrong(field, schema, "a JSON schema of an object")
    kind = schema.get("type", "object")
    # Where it may be null too, as a schema of something optional says, a call has an object.
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _wrong(f"{field}.type", kind, "object: arguments have names")
    check_depth(schema, MAX_SCHEMA_DEPTH, field)
    filled = dict(schema)
    for part in copied_parts(filled):
        fill_empty_lists(part)  # templates expect objects too
    return filled


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the mode, and the names of the functions that may be called.

    The mode may be the type of an object, as some clients send it.
    """
    if isinstance(choice, Mapping) and choice.get("type") in _MODES:
        choice = choice["type"]
    if choice in (None, {}, [], "none", "auto"):
        return choice or "auto", names
    if choice == "required":
        return "required", _known(names, names, "tools")
    if not isinstance(choice, Mapping):
        raise _wrong("tool_choice", choice, "none, auto, required or an object")
    kind = choice.get("type")
    if kind == "function":
        return "function", _known([_function_name(choice, "tool_choice")], names, "tool_choice")
    if kind != "allowed_tools":
        raise _wrong("tool_choice.type", kind, "function or allowed_tools")
    allowed = choice.get("allowed_tools")
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise _wrong(field, allowed, "an object with mode and tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{field}.mode", mode, "auto or required")
    if not isinstance(tools, list) or not tools:
        raise _wrong(f"{field}.tools", tools, "a list of functions")
    allowed_names = [
        _function_name(tool, f"{field}.tools.{index}") for index, tool in enumerate(tools)
    ]
    return mode, _known(allowed_names, names, f"{field}.tools")


def _function_name(tool: Any, field: str) -> str:
    function = _function(tool)
    name = function.get("name") if function else None
    if not isinstance(name, str):
        raise _wrong(f"{field}.function.name", name, "the name of a function in tools")
    return name


def _known(chosen: Sequence[str], names: Sequence[str], field: str) -> Sequence[str]:
    if not names:
        raise InvalidRequest("tool_choice asks for a call and tools is empty", param="tool_choice")
    for name in chosen:
        if name not in names:
            raise InvalidRequest(
                f"{field} names the function {name[:MAX_NAME_CHARS]!r}, which is not in tools",
                param=field,
            )
    return chosen


def _wrong(field: str, value: Any, wanted: str) -> InvalidRequest:
    if value is None:
        return InvalidRequest(f"{field} is missing: wanted {wanted}", param=field)
    shown = repr(value[:64]) if isinstance(value, str) else f"of type {type(value).__name__}"
    return InvalidRequest(f"{field} is {shown}: wanted {wanted}", param=field)
