"""Find stop strings in text that arrives in pieces.

One Knuth-Morris-Pratt automaton per stop string reads the text character by character, so the
result depends on the text alone, never on where it was cut into pieces, and the work per character
is constant on average. The stop string that *ends* first wins; of several that end together the
longest, so that as little as possible of a stop string is ever shown.

A special token has no text in an answer, and a stop string may name one, alone (`<|im_end|>`) or
beside text (`<|im_start|>user`). Each one that is named has a *mark*, a character that no text has,
half of a surrogate pair. The text that is searched has the mark where the answer has the token, and
a stop string is searched as it is spelled and with marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024

NO_TOKENS: Mapping[str, int] = MappingProxyType({})
_FIRST_MARK, _NUM_MARKS = 0xD800, 0x700
_MARKS = re.compile(r"[\ud800-\udeff]")
"""The others are of `router.tools.harmony.tags`."""


class _Automaton:
    """Counts how many characters of `pattern` the text ends with now."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _fallbacks(pattern)

    def advance(self, char: str) -> bool:
        """Add one character; return whether the pattern is complete now.

        The next match may begin inside a complete one.
        """
        matched = self.matched
        while matched and self.pattern[matched] != char:
            matched = self._fallback[matched - 1]
        if self.pattern[matched] == char:
            matched += 1
        is_complete = matched == len(self.pattern)
        self.matched = self._fallback[-1] if is_complete else matched
        return is_complete


def _fallbacks(pattern: str) -> list[int]:
    """Return each prefix's length of the longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[i]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[i]:
            matched += 1
        table[i] = matched
    return table


class StopStrings:
    """The text of one answer; holds back text that may be the start of a stop string.

    At most `max(len(stop)) - 1` characters are held. After a stop string was found nothing more may
    be pushed. `mark_of` has the marks, by token id.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        is_shown: bool = False,
        named_tokens: Mapping[str, int] = NO_TOKENS,
    ) -> None:
        """Start an answer; without `stops`, text is returned at once.

        `is_shown`: the stop string that ends the answer is a part of it. `named_tokens` are special
        tokens without a text that `stops` name: the id by the name. The first 1,792 are searched.
        Raises `ValueError` for an empty stop string.
        """
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        names = enumerate(islice(named_tokens, _NUM_MARKS), _FIRST_MARK)
        marks = {name: chr(number) for number, name in names}
        self.mark_of = {named_tokens[name]: mark for name, mark in marks.items()}
        self._stop_of = {_marked(stop, marks): stop for stop in stops} | {one: one for one in stops}
        self._automata = [_Automaton(pattern) for pattern in self._stop_of]
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """Add `text`; return what can be shown now, with the marks in it. Sets `found` at a stop
        string.

        Without `can_stop`, a stop string that ends in `text` is not one. Raises `ValueError` after
        a stop string.
        """
        if self.is_stopped:
            raise ValueError("text after a stop string")
        if not self._automata:
            return text
        buffer = self._held + text
        start = len(self._held)
        for end, char in enumerate(text, start + 1):
            complete = [a for a in self._automata if a.advance(char)]
            if complete and can_stop:
                pattern = max(
                    (a.pattern for a in complete), key=lambda one: len(self._stop_of[one])
                )
                self.found = self._stop_of[pattern]
                self._held = ""
                return buffer[: end - len(pattern)] + (self.found if self._is_shown else "")
        safe = len(buffer) - max(a.matched for a in self._automata)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """End a text, in which no stop string is that begins in it; return what was held of it."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    """Return a stop string with the marks of the tokens that it names, the longest names first."""
    names = sorted((name for name in marks if name in stop), key=len, reverse=True)
    if not names:
        return stop
    return re.sub("|".join(map(re.escape, names)), lambda found: marks[found[0]], stop)


def without_marks(text: str) -> str:
    """Return `text` as it is shown."""
    return _MARKS.sub("", text)
