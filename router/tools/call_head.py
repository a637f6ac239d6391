"""The text of a call up to its arguments, matched character by character.

`{"name": "get_weather", "arguments": {` with white space between its parts. A head is short, so its
text can be held back until it is known to be one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_CHARS = 512
"""The longest head, white space included: a name has at most 128 characters."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class MatchedHead:
    """A head that is whole up to the bracket that begins the arguments, which is its last."""

    name: str


class CallHead:
    """Matches one head; `key` is the name of the arguments."""

    def __init__(self, key: str) -> None:
        """Begin before the object of the call."""
        self._key = f'"{key}"'
        self._num_chars = 0
        self._is_string = False
        self._tokens: list[str] = []

    def push(self, char: str) -> MatchedHead | bool:
        """Add a character. Return whether this can still become a head, or the head."""
        self._num_chars += 1
        if self._num_chars > MAX_HEAD_CHARS:
            return False
        if self._is_string:
            self._tokens[-1] += char
            self._is_string = char != '"'
            return self._can_go_on() and (self._is_string or self._is_whole())
        if char in _SPACE:
            return True
        if char not in '{":,':
            return False
        self._tokens.append(char)
        self._is_string = char == '"'
        return self._head() or self._can_go_on()

    def _can_go_on(self) -> bool:
        """Return whether the last token, as far as it is known, is where it belongs."""
        at, token = len(self._tokens) - 1, self._tokens[-1]
        if at == 1:
            return '"name"'.startswith(token)
        if at == 3:
            return len(token) == 1 or _NAME.fullmatch(token.strip('"')) is not None
        if at == 5:
            return self._key.startswith(token)
        return at < 7 and token == "{_:_,_:"[at]

    def _is_whole(self) -> bool:
        """Return whether the string that ends now is the one that belongs there."""
        wanted = {1: '"name"', 5: self._key}.get(len(self._tokens) - 1)
        return self._tokens[-1] == wanted if wanted else len(self._tokens[-1]) > 2

    def _head(self) -> MatchedHead | None:
        if len(self._tokens) == 8 and self._tokens[7] == "{":
            return MatchedHead(self._tokens[3].strip('"'))
        return None
