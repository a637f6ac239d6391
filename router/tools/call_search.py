"""Where the first call of an answer begins, whatever pieces the answer comes in.

Stop strings end text, so they are searched before that place alone. The grammar of an answer with
tools lets no trigger stand without a call after it, and no text after the last call.
"""

from __future__ import annotations

from enum import Enum

from router.tools.answer_parser import AnswerSyntax
from router.tools.formats import FORMATS
from router.tools.thinking import BEGIN, END, ThinkingFormat, held_behind


class _State(Enum):
    OPENING = "the first tag of thinking may come"
    THINKING = "the last tag may come"
    ANSWER = "a call may come"
    TEXT = "no call can come"
    CALLS = "a call has begun"


class CallSearch:
    """Cuts one answer in two, and leaves nothing out. `trigger` is the first text of a call."""

    def __init__(self, trigger: str, thinking: ThinkingFormat, *, is_alone: bool) -> None:
        """Begin an answer; `is_alone`: a call begins where the answer does, or there is none."""
        self._trigger = trigger
        self._is_alone = is_alone
        self._held = ""
        self._state = {
            ThinkingFormat.NONE: _State.ANSWER,
            ThinkingFormat.TAGGED: _State.OPENING,
            ThinkingFormat.BEGUN: _State.THINKING,
        }[thinking]

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add text; return what is before the first call, and what is after its beginning.

        Each is '' where nothing new is certain. With `is_last` nothing is held any longer.
        """
        self._held += text
        before = ""
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.THINKING:
            before = self._think()
        if self._state is _State.ANSWER:
            before += self._find_alone() if self._is_alone else self._find()
        if self._state is _State.CALLS:
            return before, self._taken()
        if is_last or self._state is _State.TEXT:
            before += self._taken()
        return before, ""

    def _open(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._state = _State.THINKING
        elif not BEGIN.startswith(bare):
            self._state = _State.ANSWER

    def _think(self) -> str:
        at = self._held.find(END)
        if at >= 0:
            self._state = _State.ANSWER
            return self._taken(at + len(END))
        return self._taken(len(self._held) - held_behind(self._held, END))

    def _find_alone(self) -> str:
        bare = self._held.lstrip()
        if bare.startswith(self._trigger):
            self._state = _State.CALLS
        elif not self._trigger.startswith(bare):
            self._state = _State.TEXT
        return ""

    def _find(self) -> str:
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


def call_search(syntax: AnswerSyntax) -> CallSearch | None:
    """Return the search for the first call of an answer; None where the answer holds no calls."""
    if not syntax.call_format:
        return None
    trigger = FORMATS[syntax.call_format].trigger
    is_alone = syntax.calls_alone or not trigger
    return CallSearch(trigger or "{", syntax.thinking, is_alone=is_alone)
