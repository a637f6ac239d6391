"""What the clients of a soak ask: plain completions, constrained ones, tools, large bodies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.support.cluster.api import CHAT, COMPLETIONS, Fields
from tests.support.http.tool_models import function
from tests.support.models.tiny_model import prompt_tokens

LARGE_BODY_BYTES = 256 << 10
"""More than a router plans beside its streams."""
WORD = "^[a-z]{5,60}$"
LIST = r'start: "[" item ("," item)* "]"' + "\n" + "item: /[0-9]{1,9}/"


class Shape(Enum):
    """What is asked for. Each but `PLAIN` and `TOOLS` is a completion that differs in one field."""

    PLAIN = "plain"
    LARGE = "large"
    SCHEMA = "schema"
    REGEX = "regex"
    LARK = "lark"
    TOOLS = "tools"


NUM_PROMPTS = {Shape.PLAIN: 12} | {shape: 2 for shape in Shape if shape is not Shape.PLAIN}


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of one shape; its answer is the same each time."""

    shape: Shape
    number: int
    is_sampled: bool

    @property
    def path(self) -> str:
        """The endpoint."""
        return CHAT if self.shape is Shape.TOOLS else COMPLETIONS

    def fields(self, max_tokens: int, salt: str) -> Fields:
        """The body of a request; a schema is a new one for each `salt`, and asks for the same.

        Those of tools are in the prompt, so they stay.
        """
        number = self.number
        fields: Fields = {
            "max_tokens": max_tokens,
            "temperature": 1.0 if self.is_sampled else 0.0,
            "seed": 100 + number,
        }
        if self.shape is Shape.TOOLS:
            return fields | _tools(number)
        fields["prompt"] = prompt_tokens(20 + 31 * number, salt=500 + number)
        fields["logprobs"] = 0
        return fields | _MORE[self.shape](salt)


def questions(*shapes: Shape) -> list[Question]:
    """All questions of these shapes."""
    return [
        Question(shape, number, is_sampled)
        for shape in shapes
        for number in range(NUM_PROMPTS[shape])
        for is_sampled in (False, True)
    ]


def _object(salt: str) -> dict[str, Any]:
    return {
        "type": "object",
        "title": salt,
        "properties": {"word": {"type": "string", "pattern": WORD}, "number": {"type": "integer"}},
        "required": ["word", "number"],
        "additionalProperties": False,
    }


def _tools(number: int) -> Fields:
    tool: Any = function("look", "Look it up")
    tool["function"] |= {"parameters": _object("of a tool"), "strict": True}
    return {
        "messages": [{"role": "user", "content": f"Look up number {number}."}],
        "tools": [tool],
        "tool_choice": "required",
        "logprobs": True,
    }


_MORE: dict[Shape, Callable[[str], Fields]] = {
    Shape.PLAIN: lambda _: {"ignore_eos": True},
    Shape.LARGE: lambda _: {"ignore_eos": True, "metadata": "x" * LARGE_BODY_BYTES},
    Shape.SCHEMA: lambda salt: {"guided_json": json.dumps(_object(salt))},
    Shape.REGEX: lambda _: {"guided_regex": f"{WORD[1:-1]}( {WORD[1:-1]})*"},
    Shape.LARK: lambda salt: {"guided_grammar": f"// {salt}\n{LIST}"},
}
