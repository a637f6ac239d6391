"""The thinking at the beginning of an answer: its tags, where it ends, and its tokens. Pure.

`ThinkingCut` has the one rule of where thinking begins and ends. The thinking that clients read,
the text in which stop strings are searched, and the tokens of thinking all follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class ThinkingTags(NamedTuple):
    """The texts that begin and end the thinking of a model."""

    begin: str
    end: str


THINK = ThinkingTags("<think>", "</think>")
"""The tags of most models."""
_KNOWN_TAGS = (
    THINK,
    ThinkingTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingTags("[THINK]", "[/THINK]"),  # Magistral
)


def tags_in(templates: Iterable[str]) -> ThinkingTags | None:
    """Return the tags whose end a chat template has; None: it says nothing of thinking."""
    sources = tuple(templates)
    known = (tags for tags in _KNOWN_TAGS if any(tags.end in source for source in sources))
    return next(known, None)


class ThinkingFormat(Enum):
    """Whether the answer may begin with thinking: no; between tags; or its first tag is written."""

    NONE = "none"
    TAGGED = "tagged"
    BEGUN = "begun"


def thinking_behind(prompt: str, tags: ThinkingTags | None) -> ThinkingFormat:
    """Return how an answer after the text of `prompt` begins; without `tags` no model thinks.

    A template may open the thinking itself, or open and close it: then the answer follows.
    """
    if tags is None:
        return ThinkingFormat.NONE
    end = prompt.rstrip()
    if end.endswith(tags.begin):
        return ThinkingFormat.BEGUN
    return ThinkingFormat.NONE if end.endswith(tags.end) else ThinkingFormat.TAGGED


def thinking_of_continued(begun: str, prompt: str, tags: ThinkingTags | None) -> ThinkingFormat:
    """Return how an answer goes on whose beginning a client wrote, at the end of `prompt`."""
    if tags is None or not begun.strip():
        return thinking_behind(prompt, tags)
    is_thinking = begun.lstrip().startswith(tags.begin) and tags.end not in begun
    return ThinkingFormat.BEGUN if is_thinking else ThinkingFormat.NONE


def num_maybe_tag(text: str, tag: str) -> int:
    """Return how many of the last characters of `text` may begin `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class LeadingSpace:
    """Holds the white space at the beginning of a text until another character comes.

    It keeps pieces, so endless white space costs each character once.
    """

    def __init__(self) -> None:
        """Begin a text."""
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Add text, before which only white space came; return it without its white space."""
        bare = text.lstrip()
        if len(bare) < len(text):
            self._pieces.append(text[: len(text) - len(bare)])
        return bare

    def take(self) -> str:
        """Return the white space that is held, and hold none."""
        space = "".join(self._pieces)
        self._pieces.clear()
        return space


class Cut(NamedTuple):
    """New text of an answer, in its order; each is '' where nothing new is certain."""

    opening: str = ""
    """The first tag, and white space before it."""
    thought: str = ""
    closing: str = ""
    """The last tag, and white space after it."""
    answer: str = ""


class _State(Enum):
    OPENING = "a first tag may come"
    THINKING = "the last tag may come"
    GAP = "white space after the thinking may come"
    ANSWER = "nothing more is cut off"


class ThinkingCut:
    """Cuts one answer in four and leaves nothing out, however its text comes in pieces.

    An answer of the form TAGGED begins with thinking if its first text, after white space, is the
    first of the `tags`; one of the form BEGUN always does. Thinking ends with their last one, or
    with the answer. Both tags are text in the answer itself.
    """

    def __init__(self, form: ThinkingFormat, tags: ThinkingTags = THINK) -> None:
        """Begin an answer."""
        self._tags = tags
        self._held = ""  # less than a tag
        self._space = LeadingSpace()
        self.has_begun = form is ThinkingFormat.BEGUN
        """Whether there is thinking."""
        self._state = {
            ThinkingFormat.NONE: _State.ANSWER,
            ThinkingFormat.TAGGED: _State.OPENING,
            ThinkingFormat.BEGUN: _State.THINKING,
        }[form]

    @property
    def is_over(self) -> bool:
        """Whether no thinking can follow: what comes is white space after it, or the answer."""
        return self._state in (_State.GAP, _State.ANSWER)

    def push(self, text: str, *, is_last: bool = False) -> Cut:
        """Add text; return what is certain now. With `is_last` nothing is held any longer."""
        opening = thought = closing = ""
        if self._state is _State.OPENING:
            opening, text = self._open(text, is_last)
        if self._state is _State.THINKING:
            thought, closing, text = self._think(text, is_last)
        if self._state is _State.GAP:
            answer = text.lstrip()
            closing += text[: len(text) - len(answer)]
            text = answer
            if answer:
                self._state = _State.ANSWER
        return Cut(opening, thought, closing, text)

    def _open(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return the opening, if it is whole, and the text after it."""
        held = self._held + (text if self._held else self._space.push(text))
        self._held = ""
        begin = self._tags.begin
        if held.startswith(begin):
            self._state, self.has_begun = _State.THINKING, True
            return self._space.take() + begin, held[len(begin) :]
        if is_last or not begin.startswith(held):
            self._state = _State.ANSWER
            return "", self._space.take() + held
        self._held = held
        return "", ""

    def _think(self, text: str, is_last: bool) -> tuple[str, str, str]:
        """Return what is thought, the last tag if it is whole, and the text after it."""
        thought, tag, rest = (self._held + text).partition(self._tags.end)
        num_held = 0 if tag or is_last else num_maybe_tag(thought, self._tags.end)
        end = len(thought) - num_held
        thought, self._held = thought[:end], thought[end:]
        if tag:
            self._state = _State.GAP
        return thought, tag, rest


class ThinkingTokens:
    """Counts the tokens of an answer's thinking, its tags among them.

    Text comes one token at a time: a group of tokens may hold the end of the thinking.
    """

    def __init__(self, form: ThinkingFormat, tags: ThinkingTags = THINK) -> None:
        """Begin an answer."""
        self._cut = ThinkingCut(form, tags)
        self._num = 0

    @property
    def num(self) -> int:
        """The tokens so far; 0 as long as the answer may still have no thinking."""
        return self._num if self._cut.has_begun else 0

    @property
    def is_over(self) -> bool:
        """Whether the number is final."""
        return self._cut.is_over

    def push(self, text: str) -> None:
        """Add the text that a token made certain, which may be ''."""
        if not self.is_over:
            self._num += 1
            self._cut.push(text)
