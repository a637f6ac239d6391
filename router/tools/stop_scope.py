"""The part of an answer in which stop strings are searched, whatever pieces the answer comes in.

Stop strings end text. What a model thinks is no text, and repeats what it was asked, stop strings
too: an answer that ended there would have no text. So they are searched after the thinking and
the white space after it (`thinking.ThinkingCut`), and before the first call. The grammar of an
answer with tools lets no trigger stand without a call after it, and no text after the last call. In
harmony they are searched in each message for the user, alone.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from router.tools.answer_parser import AnswerSyntax
from router.tools.formats import FORMATS
from router.tools.harmony.message_cut import MessageCut, PieceKind, Place
from router.tools.thinking import LeadingSpace, ThinkingCut, num_maybe_tag


class Scoped(NamedTuple):
    """New text of an answer, in its order; each is '' where nothing new is certain."""

    thought: str
    """The thinking with its tags, and white space around it."""
    searched: str
    called: str
    """What ends the text that is searched: a call and all that follows, or what is between two
    messages for the user."""


class _State(Enum):
    ANSWER = "a call may come"
    TEXT = "no call can come"
    CALLS = "a call has begun"


class StopScope:
    """Cuts one answer in three, and leaves nothing out. `trigger` is the first text of a call."""

    def __init__(self, trigger: str, thinking: ThinkingCut, *, is_alone: bool) -> None:
        """Begin an answer with its thinking. Without `trigger` it holds no calls.

        `is_alone`: a call begins where the answer does, or there is none.
        """
        self._thinking = thinking
        self._trigger = trigger
        self._is_alone = is_alone
        self._held = ""  # less than a trigger
        self._space = LeadingSpace()
        self._state = _State.ANSWER if trigger else _State.TEXT

    def push(self, text: str, *, is_last: bool = False) -> list[Scoped]:
        """Add text; return what is certain now. With `is_last` nothing is held any longer."""
        opening, thought, closing, answer = self._thinking.push(text, is_last=is_last)
        searched = called = ""
        if self._state is _State.ANSWER:
            find = self._find_alone if self._is_alone else self._find
            searched, called = find(answer)
            if is_last:
                searched += self._space.take() + self._held
                self._held = ""
        elif self._state is _State.TEXT:
            searched = answer
        else:
            called = answer
        return [Scoped(opening + thought + closing, searched, called)]

    def _find_alone(self, text: str) -> tuple[str, str]:
        """Return the text, or the call with white space before it, once either is certain."""
        held = self._held + (text if self._held else self._space.push(text))
        self._held = ""
        if held.startswith(self._trigger):
            self._state = _State.CALLS
            return "", self._space.take() + held
        if not self._trigger.startswith(held):
            self._state = _State.TEXT
            return self._space.take() + held, ""
        self._held = held
        return "", ""

    def _find(self, text: str) -> tuple[str, str]:
        """Return the text that cannot begin a call, and the call if it has begun."""
        before, trigger, rest = (self._held + text).partition(self._trigger)
        num_held = 0 if trigger else num_maybe_tag(before, self._trigger)
        end = len(before) - num_held
        before, self._held = before[:end], before[end:]
        if trigger:
            self._state = _State.CALLS
        return before, trigger + rest


class MessageScope:
    """Cuts one answer in harmony, and leaves nothing out."""

    def __init__(self, cut: MessageCut, *, thinks: bool) -> None:
        """Begin an answer, which `cut` cuts. Without `thinks`, what it thinks is text."""
        self._cut = cut
        self._searched = {PieceKind.TEXT} if thinks else {PieceKind.TEXT, PieceKind.THOUGHT}

    def push(self, text: str, *, is_last: bool = False) -> list[Scoped]:
        """Add text; return what is certain now. With `is_last` nothing is held any longer."""
        scoped = []
        for piece in self._cut.push(text, is_last=is_last):
            is_searched = piece.kind in self._searched and piece.text == piece.raw
            scoped.append(Scoped("", piece.raw, "") if is_searched else Scoped("", "", piece.raw))
        return scoped


def stop_scope(syntax: AnswerSyntax) -> StopScope | MessageScope | None:
    """Return where stop strings are searched in an answer; None: in all of it."""
    if syntax.is_plain:
        return None
    if syntax.place is not Place.NONE:
        return MessageScope(syntax.message_cut(), thinks=syntax.thinks)
    if not syntax.call_format:
        return StopScope("", syntax.thinking_cut(), is_alone=False)
    trigger = FORMATS[syntax.call_format].trigger
    is_alone = syntax.calls_alone or not trigger
    return StopScope(trigger or "{", syntax.thinking_cut(), is_alone=is_alone)
