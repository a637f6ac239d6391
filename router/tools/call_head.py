"""The text of a call up to its arguments, matched character by character.

`{"name": "get_weather", "arguments": {` with white space between its parts. A head is short, so its
text can be held back until it is known to be one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.tools.call_format import CallFormat

MAX_HEAD_CHARS = 512
"""The longest head, white space included: a name has at most 128 characters."""

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.-]")
_ID = re.compile(r"[A-Za-z0-9]{9}(?![A-Za-z0-9])")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class MatchedHead:
    """A head that is whole: its last `num_first` characters are the first of the arguments."""

    name: str
    num_first: int


class CallHead:
    """Matches one head of a format; `opening` is what stands before the name."""

    def __init__(self, form: CallFormat, opening: str) -> None:
        """Begin before the opening."""
        self._opening = _Bare(opening)
        self._heads = [(_Bare(form.after_name + first), len(first)) for first in form.first_texts]
        self._before_id = form.before_id
        self._num_chars = 0
        self._is_opened = not self._opening.text
        self._name = ""
        self._is_named = False
        self._rest = ""
        """What came behind the opening, or behind the name, without white space."""
        self._is_spaced = False

    def push(self, char: str) -> MatchedHead | bool:
        """Add a character. Return whether this can still become a head, or the head."""
        self._num_chars += 1
        if self._num_chars > MAX_HEAD_CHARS:
            return False
        if self._is_opened and not self._is_named:
            if _NAME_CHAR.fullmatch(char):
                self._name += char
                return True
            if not self._name:
                return char in _SPACE and not self._opening.text.endswith('"')
            self._is_named = True
        if char in _SPACE:
            self._is_spaced = True
            return True
        self._rest += char
        is_spaced, self._is_spaced = self._is_spaced, False
        if not self._is_opened:
            return self._open(is_spaced)
        rest = self._without_id()
        if rest is None:
            return True
        heads = [one for one in self._heads if one[0].begins_with(rest, is_spaced)]
        for bare, num_first in heads:
            if bare.text == rest:
                return MatchedHead(self._name, num_first)
        return bool(heads)

    def _without_id(self) -> str | None:
        """Return what came behind the name, or behind the id; None where that may not be whole."""
        before, rest = self._before_id, self._rest
        if not before or not rest.startswith(before):
            is_begun = before.startswith(rest) and bool(before)
            return None if is_begun and not self._may_be_head(rest) else rest
        rest = rest[len(before) :]
        found = _ID.match(rest)
        return rest[found.end() :] if found else (None if rest.isalnum() or not rest else rest)

    def _may_be_head(self, rest: str) -> bool:
        return any(bare.begins_with(rest, is_spaced=False) for bare, _ in self._heads)

    def _open(self, is_spaced: bool) -> bool:
        can_go_on = self._opening.begins_with(self._rest, is_spaced)
        if self._rest == self._opening.text:
            self._is_opened, self._rest = True, ""
        return can_go_on


class _Bare:
    """A text without its white space, of which it may have more or less, but not within words."""

    def __init__(self, text: str) -> None:
        self.text = "".join(text.split())
        self._breaks = {len("".join(text[:at].split())) for at in range(len(text))
                        if text[at].isspace()}  # fmt: skip

    def begins_with(self, rest: str, is_spaced: bool) -> bool:
        """Return whether this begins with `rest`; `is_spaced`: its last character has white space
        before it."""
        if not self.text.startswith(rest):
            return False
        at = len(rest) - 1
        is_in_word = at > 0 and rest[at - 1].isalnum() and rest[at].isalnum()
        return not is_spaced or not is_in_word or at in self._breaks
