"""In which part of an answer stop strings are searched, whatever pieces the answer comes in.

Stop strings end text. What a model thinks is no text, and repeats what it was asked, stop strings
too: an answer that ended there would have no text. So they are searched after the thinking and
the white space after it, and before the first call. The grammar of an answer with tools lets no
trigger stand without a call after it, and no text after the last call.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from router.tools.answer_parser import AnswerSyntax
from router.tools.formats import FORMATS
from router.tools.thinking import BEGIN, END, ThinkingFormat, held_behind


class Scoped(NamedTuple):
    """New text of an answer, in its order; each is '' where nothing new is certain."""

    thought: str
    """The thinking with its tags, and white space after it."""
    searched: str
    called: str
    """The first call, and all that follows."""


class _State(Enum):
    OPENING = "the first tag of thinking may come"
    THINKING = "the last tag may come"
    GAP = "white space after the thinking may come"
    ANSWER = "a call may come"
    TEXT = "no call can come"
    CALLS = "a call has begun"


class StopScope:
    """Cuts one answer in three, and leaves nothing out. `trigger` is the first text of a call."""

    def __init__(self, trigger: str, thinking: ThinkingFormat, *, is_alone: bool) -> None:
        """Begin an answer. Without `trigger` it holds no calls.

        `is_alone`: a call begins where the answer does, or there is none.
        """
        self._trigger = trigger
        self._is_alone = is_alone
        self._held = ""
        self._state = {
            ThinkingFormat.NONE: _State.ANSWER,
            ThinkingFormat.TAGGED: _State.OPENING,
            ThinkingFormat.BEGUN: _State.THINKING,
        }[thinking]

    def push(self, text: str, *, is_last: bool = False) -> Scoped:
        """Add text; return what is certain now. With `is_last` nothing is held any longer."""
        self._held += text
        thought = searched = ""
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.THINKING:
            thought = self._think(is_last)
        if self._state is _State.GAP:
            thought += self._pass_gap()
        if self._state is _State.ANSWER:
            searched = self._find_alone() if self._is_alone else self._find()
        if self._state is _State.CALLS:
            return Scoped(thought, searched, self._taken())
        if is_last or self._state is _State.TEXT:
            searched += self._taken()
        return Scoped(thought, searched, "")

    def _open(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._state = _State.THINKING
        elif not BEGIN.startswith(bare):
            self._state = _State.ANSWER

    def _think(self, is_last: bool) -> str:
        at = self._held.find(END)
        if at >= 0:
            self._state = _State.GAP
            return self._taken(at + len(END))
        return self._taken(len(self._held) - (0 if is_last else held_behind(self._held, END)))

    def _pass_gap(self) -> str:
        rest = self._held.lstrip()
        if rest:
            self._state = _State.ANSWER
        return self._taken(len(self._held) - len(rest))

    def _find_alone(self) -> str:
        bare = self._held.lstrip()
        if bare.startswith(self._trigger):
            self._state = _State.CALLS
        elif not self._trigger.startswith(bare):
            self._state = _State.TEXT
        return ""

    def _find(self) -> str:
        if not self._trigger:
            return self._taken()
        at = self._held.find(self._trigger)
        if at >= 0:
            self._state = _State.CALLS
            return self._taken(at)
        return self._taken(len(self._held) - held_behind(self._held, self._trigger))

    def _taken(self, size: int | None = None) -> str:
        """Take the first `size` characters that are held; without `size`, all of them."""
        size = len(self._held) if size is None else size
        taken, self._held = self._held[:size], self._held[size:]
        return taken


def stop_scope(syntax: AnswerSyntax) -> StopScope | None:
    """Return where stop strings are searched in an answer; None: in all of it."""
    if syntax.is_plain:
        return None
    if not syntax.call_format:
        return StopScope("", syntax.thinking, is_alone=False)
    trigger = FORMATS[syntax.call_format].trigger
    is_alone = syntax.calls_alone or not trigger
    return StopScope(trigger or "{", syntax.thinking, is_alone=is_alone)
