"""The parts of one answer: what is thought, then text and calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from router.tools.call_parser import CallParser
from router.tools.formats import FORMATS
from router.tools.harmony.message_cut import MessageCut, Place
from router.tools.harmony.reading import AnalysisTokens, HarmonyParser
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart
from router.tools.tagged.kinds import ArgumentKinds
from router.tools.thinking import (
    THINK,
    Cut,
    LeadingSpace,
    ThinkingCut,
    ThinkingFormat,
    ThinkingTags,
    ThinkingTokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """What the text of a request's answers may hold.

    `tags` are those of the thinking, if there is any. `call_format` is the name of a format; ''
    where the answer holds no calls. `call_names` are the functions that may be called: a call of
    another one is text. `kinds` are the kinds of their arguments, where a format does not tell
    them. `is_named`: the request names the one function that is called.
    `calls_alone`: an answer is calls or text, never text and then calls. `place`: where in a
    message an answer in harmony begins, which has no other format.
    """

    thinking: ThinkingFormat = ThinkingFormat.NONE
    tags: ThinkingTags = THINK
    call_format: str = ""
    call_names: tuple[str, ...] = ()
    kinds: Mapping[str, ArgumentKinds] = field(default_factory=dict)
    is_named: bool = False
    calls_alone: bool = False
    place: Place = Place.NONE

    @property
    def is_plain(self) -> bool:
        """Whether an answer is text and nothing else."""
        return not (self.thinks or self.call_format or self.place is not Place.NONE)

    @property
    def thinks(self) -> bool:
        """Whether what is thought is told apart."""
        return self.thinking is not ThinkingFormat.NONE

    def message_cut(self) -> MessageCut:
        """Return what cuts one answer in harmony."""
        return MessageCut(self.place, self.call_names)

    def thinking_cut(self) -> ThinkingCut:
        """Return what cuts the thinking off one answer."""
        return ThinkingCut(self.thinking, self.tags)

    def thinking_tokens(self) -> ThinkingTokens | AnalysisTokens | None:
        """Return what counts the tokens of one answer's thinking; None: it does not think."""
        if not self.thinks:
            return None
        if self.place is not Place.NONE:
            return AnalysisTokens(self.message_cut())
        return ThinkingTokens(self.thinking, self.tags)


PLAIN = AnswerSyntax()

PIECE_CHARS = 1024
"""Characters of a whole answer parsed at once: each trigger without a call copies the rest."""


class _Trimmed:
    """A text without the white space around it, in pieces."""

    def __init__(self) -> None:
        self._space = LeadingSpace()
        self._has_begun = False

    def push(self, text: str) -> str:
        """Add text; return it up to its last character that is no white space."""
        bare = self._space.push(text)
        if not bare:
            return ""
        before = self._space.take()
        end = len(bare.rstrip())
        self._space.push(bare[end:])
        shown = before + bare[:end] if self._has_begun else bare[:end]
        self._has_begun = True
        return shown


class _TagParser:
    """Parses one answer whose thinking and calls stand between tags.

    White space around the thinking is dropped: templates write it again.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        """Begin an answer."""
        self._thinking = syntax.thinking_cut()
        self._thought = _Trimmed()
        self._calls: CallParser | None = None
        if syntax.call_format:
            form = FORMATS[syntax.call_format]
            self._calls = CallParser(
                form, syntax.call_names, syntax.kinds, is_alone=syntax.calls_alone
            )

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls if self._calls else 0

    @property
    def ends_in_calls(self) -> bool:
        """Whether what was pushed holds calls, and none that has begun and is not whole."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_in_call

    @property
    def is_in_arguments(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        return self._calls is not None and self._calls.is_in_arguments

    def push(self, text: str, *, is_last: bool = False) -> Iterator[Part]:
        """Add text; yield the parts that are certain now, and with `is_last` all that is left."""
        for at in range(0, len(text), PIECE_CHARS):
            yield from self._parts_of(self._thinking.push(text[at : at + PIECE_CHARS]))
        if is_last:
            yield from self._parts_of(self._thinking.push("", is_last=True))
            if self._calls:
                yield from self._calls.flush()

    def _parts_of(self, cut: Cut) -> Iterator[Part]:
        if thought := self._thought.push(cut.thought):
            yield ThinkingPart(thought)
        if cut.answer and self._calls:
            yield from self._calls.push(cut.answer)
        elif cut.answer:
            yield TextPart(cut.answer)


class AnswerParser:
    """Parses one answer, whatever pieces it comes in."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        """Begin an answer."""
        self._parser: _TagParser | HarmonyParser = (
            _TagParser(syntax)
            if syntax.place is Place.NONE
            else HarmonyParser(syntax.message_cut(), thinks=syntax.thinks)
        )

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._parser.num_calls

    @property
    def ends_in_calls(self) -> bool:
        """Whether what was pushed holds calls, and none that has begun and is not whole."""
        return self._parser.ends_in_calls

    @property
    def is_in_arguments(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        return self._parser.is_in_arguments

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Add text; return the parts that are certain now, and with `is_last` all that is left."""
        return _joined(self._parser.push(text, is_last=is_last))


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join text that follows text."""
    joined: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is TextPart:
            first, *others = [part for part in group if isinstance(part, TextPart)]
            text = first.text + "".join(part.behind_text for part in others)
            joined.append(TextPart(text, first.is_apart))
        else:
            joined += group
    return joined


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
            case ThinkingPart():
                thinking.append(part.behind_text)
            case TextPart():
                texts.append(part.behind_text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(number, more):
                arguments[number].append(more)
    calls = tuple(zip(names, map("".join, arguments), strict=True))
    return AnswerParts(thinking="".join(thinking), text="".join(texts), calls=calls)
