"""The parts of a whole answer, put together."""

from __future__ import annotations

from dataclasses import dataclass

from router.tools.answer_parser import AnswerParser
from router.tools.parts import CallArguments, CallStart, TextPart, ThinkingPart


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """What is thought, the text, and each call's name and arguments."""

    thinking: str
    text: str
    calls: tuple[tuple[str, str], ...]


def whole_answer(parser: AnswerParser, text: str) -> AnswerParts:
    """Return the parts of `text`; `parser` is new."""
    thinking, texts = [], []
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parser.push(text, is_last=True):
        match part:
            case ThinkingPart(more):
                thinking.append(more)
            case TextPart(more):
                texts.append(more)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(number, more):
                arguments[number].append(more)
    calls = tuple(zip(names, map("".join, arguments), strict=True))
    return AnswerParts(thinking="".join(thinking), text="".join(texts), calls=calls)
