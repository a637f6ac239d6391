"""The parts of an answer: thinking, text and calls, each in pieces as they come."""

from __future__ import annotations

from typing import NamedTuple


class TextPart(NamedTuple):
    """More of the answer's text; `is_apart`: of another message than the text before it."""

    text: str
    is_apart: bool = False

    @property
    def behind_text(self) -> str:
        """The text as it follows the text before it."""
        return apart(self.text, self.is_apart)


class ThinkingPart(NamedTuple):
    """More of what a model thinks; `is_apart`: in another message than the thinking before it."""

    text: str
    is_apart: bool = False

    @property
    def behind_text(self) -> str:
        """The text as it follows the thinking before it."""
        return apart(self.text, self.is_apart)


class CallStart(NamedTuple):
    """The beginning of the call `number`, counted from 0, to the function `name`."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call `number`: a piece of the text of a JSON object."""

    number: int
    text: str


def apart(text: str, is_apart: bool) -> str:
    """Return `text` as it follows another one: an empty line between messages."""
    return f"\n\n{text}" if is_apart else text


Part = TextPart | ThinkingPart | CallStart | CallArguments
