"""The text of a call's one argument, out of the JSON of its arguments, whatever pieces it comes in.

What is certain is given at once: all but an escape that has begun, and the first half of a
surrogate pair, which the next escape completes.
"""

from __future__ import annotations

import json
import re

_ESCAPED = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_HALF = re.compile(r"(?:^|[^\\])(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")


class TextArgument:
    """Reads the text of the argument `name`, which is the only one."""

    def __init__(self, name: str) -> None:
        """Begin before the object of the arguments."""
        self._head = re.compile(rf'\s*\{{\s*"{re.escape(name)}"\s*:\s*"')
        self._held = ""
        self._has_begun = self._is_over = False

    def push(self, arguments: str) -> str:
        """Add JSON; return the text that is certain now and was not before."""
        if self._is_over:
            return ""
        self._held += arguments
        if not self._has_begun:
            head = self._head.match(self._held)
            if head is None:
                return ""
            self._has_begun = True
            self._held = self._held[head.end() :]
        return self._taken()

    def _taken(self) -> str:
        whole = _ESCAPED.match(self._held)
        assert whole is not None  # it may be empty
        end = whole.end()
        self._is_over = self._held[end : end + 1] == '"'
        half = None if self._is_over else _HALF.search(self._held[:end])
        if half is not None and not self._is_followed(end):
            end = half.start(1)
        taken, self._held = self._held[:end], self._held[end:]
        return _decoded(taken)

    def _is_followed(self, end: int) -> bool:
        """Return whether what begins at `end` cannot be the second half of a pair."""
        rest = self._held[end:]
        return bool(rest) and not "\\u".startswith(rest[:2])


def _decoded(escaped: str) -> str:
    """Return the text; half a surrogate pair, which is no text, is a replacement character."""
    try:
        text: str = json.loads(f'"{escaped}"', strict=False)
    except ValueError:
        return escaped
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
