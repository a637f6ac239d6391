"""The tools of a request, and which of them it may, or must, call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments.

    Without `is_strict` a part of the schema that cannot be enforced is left out.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    is_strict: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the tool as OpenAI has it, which is how chat templates know it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or EMPTY_PARAMETERS)
        return {"type": "function", "function": function}


EMPTY_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model is told about, and what it may do with them.

    `callable_names` are those that it may call; with `must_call` its whole answer is calls.
    `is_named`: the request names the one function that is called.
    """

    tools: tuple[Tool, ...]
    callable_names: frozenset[str]
    must_call: bool = False
    is_named: bool = False
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.callable_names)
