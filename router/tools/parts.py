"""The parts of an answer: thinking, text and calls, each in pieces as they come."""

from __future__ import annotations

from typing import NamedTuple


class TextPart(NamedTuple):
    """More of the answer's text."""

    text: str


class ThinkingPart(NamedTuple):
    """More of what a model thinks before its answer."""

    text: str


class CallStart(NamedTuple):
    """The beginning of the call `number`, counted from 0, to the function `name`."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call `number`: a piece of the text of a JSON object."""

    number: int
    text: str


Part = TextPart | ThinkingPart | CallStart | CallArguments
