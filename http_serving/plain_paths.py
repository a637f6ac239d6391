"""Paths that have one meaning: no two ways to write what one layer allows and another one answers.

A server decodes escapes before it looks for a route, a proxy in front of it may not, and a pattern
that ends with `$` also matches before a newline. A path that is not plain is refused before anyone
compares it with anything.
"""

from __future__ import annotations

import re

from starlette.types import Scope

MAX_SHOWN_CHARS = 64

_SUSPICIOUS = re.compile(rb"[^!-~]|[%\\]|//|/\.|^[^/]|^$")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def path_problem(scope: Scope) -> str:
    """Return what is wrong with the path of a request, in words; nothing for a plain one.

    A plain path begins with a slash. It has no characters that cannot be shown, no backslash, no
    empty part, no `.` or `..`, no escaped dot and no `%` that begins no escape.
    """
    raw = _raw(scope)
    if not _SUSPICIOUS.search(raw):
        return ""
    path: str = scope["path"]
    parts = path.split("/")
    problems = (
        ("does not begin with '/'", parts[0] or len(parts) < 2),
        ("has a character that cannot be shown", not path.isprintable()),
        ("has a backslash", "\\" in path),
        ("has an empty part", "" in parts[1:-1]),
        ("has a part '.' or '..'", "." in parts or ".." in parts),
        ("has an escaped dot", b"%2e" in raw.lower()),
        ("has a '%' that begins no escape", _BROKEN_ESCAPE.search(raw)),
    )
    what = next((words for words, is_so in problems if is_so), "")
    return what and f"the path {path[:MAX_SHOWN_CHARS]!r} {what}"


def has_escaped_slash(scope: Scope) -> bool:
    """Return whether a slash of the path is written `%2F`: it may be a part of a name."""
    raw = _raw(scope)
    return b"%" in raw and b"%2f" in raw.lower()


def _raw(scope: Scope) -> bytes:
    """Return the path as the client sent it, where the server tells it."""
    raw: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if raw is None else raw
