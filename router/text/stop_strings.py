"""Finding stop strings in text that arrives in pieces.

One Knuth-Morris-Pratt automaton per stop string walks the text character by character, so the
result depends on the text alone, never on where it was cut into pieces, and the work per
character is constant on average. The stop string that *ends* first wins; of those that end
together the longest, so that as little as possible of a stop string is ever shown.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024


class _Automaton:
    """How many characters of `pattern` the text now ends with."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _fallbacks(pattern)

    def advance(self, char: str) -> bool:
        """Take one character; whether the pattern is now complete."""
        matched = self.matched
        while matched and self.pattern[matched] != char:
            matched = self._fallback[matched - 1]
        if self.pattern[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.pattern)


def _fallbacks(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is a suffix."""
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
    """The text of one answer on its way out; holds back what may be the start of a stop string.

    At most `max(len(stop)) - 1` characters are held. After a stop string was found nothing more
    may be pushed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` holds non-empty strings; without any, text passes straight through."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Add `text`; return what can be shown now. Sets `is_stopped` when a stop string ended."""
        if self.is_stopped:
            raise ValueError("text after a stop string")
        if not self._automata:
            return text
        buffer = self._held + text
        start = len(self._held)
        for place, char in enumerate(text, start + 1):
            complete = [a for a in self._automata if a.advance(char)]
            if complete:
                self.is_stopped = True
                self._held = ""
                return buffer[: place - max(len(a.pattern) for a in complete)]
        safe = len(buffer) - max(a.matched for a in self._automata)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """The answer ended: what was held is text after all."""
        held, self._held = self._held, ""
        return held
