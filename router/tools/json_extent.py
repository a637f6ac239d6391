"""Where a JSON object or list in a text ends, with the text in pieces."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"{}\[\]]*')
"""Text outside of strings that neither begins nor ends anything."""
_IN_STRING = re.compile(r'[^"\\]*')


class JsonExtent:
    """Follows a JSON object or list up to its last bracket. It does not judge what is inside."""

    def __init__(self) -> None:
        """Begin before its first character."""
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_over = False

    def end_in(self, text: str) -> int:
        """Return how many characters of `text`, the next piece, belong to it."""
        at = 0
        while at < len(text) and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            plain = (_IN_STRING if self._is_string else _PLAIN).match(text, at)
            at = plain.end() if plain else at
            if at < len(text):
                self._take(text[at])
                at += 1
        return at

    def _take(self, char: str) -> None:
        if self._is_string:
            self._is_escaped = char == "\\"
            self._is_string = char != '"'
        elif char == '"':
            self._is_string = True
        else:
            self._depth += 1 if char in "{[" else -1
            self.is_over = self._depth <= 0


class JsonArguments:
    """Reads arguments that are a JSON object."""

    def __init__(self) -> None:
        """Begin before the object."""
        self._extent = JsonExtent()

    @property
    def is_over(self) -> bool:
        """Whether the object is whole."""
        return self._extent.is_over

    def take(self, text: str) -> tuple[str, int]:
        """Return the JSON in `text`, the next piece, and its length."""
        end = self._extent.end_in(text)
        return text[:end], end
