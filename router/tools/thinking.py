"""An answer's text to thinking and the rest, whatever pieces it comes in.

White space around what is thought is dropped: templates write it again.
"""

from __future__ import annotations

from enum import Enum

BEGIN, END = "<think>", "</think>"


class ThinkingFormat(Enum):
    """Whether the answer may begin with thinking: no; between tags; or its first tag is written."""

    NONE = "none"
    TAGGED = "tagged"
    BEGUN = "begun"


def thinking_behind(prompt: str, *, can_think: bool) -> ThinkingFormat:
    """Return how an answer after the text of `prompt` begins, of a model that can think or not.

    A template may open the thinking itself, or open and close it: then the answer follows.
    """
    if not can_think:
        return ThinkingFormat.NONE
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return ThinkingFormat.BEGUN
    return ThinkingFormat.NONE if end.endswith(END) else ThinkingFormat.TAGGED


def held_behind(text: str, tag: str) -> int:
    """Return how many of the last characters of `text` may begin `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class _State(Enum):
    OPENING = "a first tag may come"
    THINKING = "the last tag may come"
    GAP = "white space after the thinking may come"
    ANSWER = "nothing more is cut off"


class ThinkingSplit:
    """Cuts the thinking off the beginning of one answer."""

    def __init__(self, form: ThinkingFormat) -> None:
        """Begin an answer."""
        self._held = ""
        self._has_thought = False
        self.has_begun = form is ThinkingFormat.BEGUN
        """Whether there is thinking."""
        self._state = {
            ThinkingFormat.NONE: _State.ANSWER,
            ThinkingFormat.TAGGED: _State.OPENING,
            ThinkingFormat.BEGUN: _State.THINKING,
        }[form]

    @property
    def is_over(self) -> bool:
        """Whether what comes is no thinking any more."""
        return self._state in (_State.GAP, _State.ANSWER)

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is thought and what is answered, each '' where nothing is new."""
        thought = ""
        self._held += text
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.THINKING:
            thought = self._think()
        if self._state is _State.GAP:
            self._held = self._held.lstrip()
            self._state = _State.ANSWER if self._held else _State.GAP
        return thought, self._all_held() if self._state is _State.ANSWER else ""

    def flush(self) -> tuple[str, str]:
        """End the answer; return what was held, as in `push`."""
        if self._state is _State.THINKING:
            return self._new_thought(self._all_held().rstrip()), ""
        return "", self._all_held()

    def _open(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._state = _State.THINKING
            self.has_begun = True
            self._held = bare[len(BEGIN) :]
        elif not BEGIN.startswith(bare):
            self._state = _State.ANSWER

    def _think(self) -> str:
        thought, tag, answer = self._held.partition(END)
        if tag:
            self._held, self._state = answer, _State.GAP
            return self._new_thought(thought.rstrip())
        kept = self._held[: len(self._held) - held_behind(self._held, END)].rstrip()
        self._held = self._held[len(kept) :]
        return self._new_thought(kept)

    def _new_thought(self, thought: str) -> str:
        """Return `thought` without the white space before the first one."""
        if not self._has_thought:
            thought = thought.lstrip()
            self._has_thought = bool(thought)
        return thought

    def _all_held(self) -> str:
        held, self._held = self._held, ""
        return held


class ThinkingTokens:
    """Counts the tokens of an answer's thinking, its tags among them.

    Text comes one token at a time: a group of tokens may hold the end of the thinking.
    """

    def __init__(self, form: ThinkingFormat) -> None:
        """Begin an answer."""
        self._split = ThinkingSplit(form)
        self._num = 0

    @property
    def num(self) -> int:
        """The tokens so far; 0 as long as the answer may still have no thinking."""
        return self._num if self._split.has_begun else 0

    @property
    def is_over(self) -> bool:
        """Whether the number is final."""
        return self._split.is_over

    def push(self, text: str) -> None:
        """Add the text that a token made certain, which may be ''."""
        if not self.is_over:
            self._num += 1
            self._split.push(text)
