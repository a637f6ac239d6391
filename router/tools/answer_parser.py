"""The parts of one answer: what is thought, then text and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.tools.call_parser import CallParser
from router.tools.formats import FORMATS
from router.tools.parts import Part, TextPart, ThinkingPart
from router.tools.thinking import ThinkingFormat, ThinkingSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """What the text of a request's answers may hold.

    `call_format` is the name of a format; '' where the answer holds no calls. `is_named`: the
    request names the one function that is called.
    """

    thinking: ThinkingFormat = ThinkingFormat.NONE
    call_format: str = ""
    is_named: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether an answer is text and nothing else."""
        return self.thinking is ThinkingFormat.NONE and not self.call_format


PLAIN = AnswerSyntax()


class AnswerParser:
    """Parses one answer, whatever pieces it comes in."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        """Begin an answer."""
        self._thinking = ThinkingSplit(syntax.thinking)
        self._calls = CallParser(FORMATS[syntax.call_format]) if syntax.call_format else None

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Add text; return the parts that are certain now, and with `is_last` all that is left."""
        return _joined(self._parts(text, is_last))

    def _parts(self, text: str, is_last: bool) -> Iterator[Part]:
        yield from self._split(*self._thinking.push(text))
        if is_last:
            yield from self._split(*self._thinking.flush())
            if self._calls:
                yield from self._calls.flush()

    def _split(self, thought: str, answered: str) -> Iterator[Part]:
        if thought:
            yield ThinkingPart(thought)
        if answered and self._calls:
            yield from self._calls.push(answered)
        elif answered:
            yield TextPart(answered)


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Join text that follows text."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            joined[-1] = TextPart(last.text + part.text)
        else:
            joined.append(part)
    return joined
