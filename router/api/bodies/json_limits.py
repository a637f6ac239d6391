"""Bounds on the structure of a body, checked before anything is built from it.

Ten megabytes of text are ten megabytes; ten megabytes of brackets are millions of objects, seconds
of work and a gigabyte of memory. Only characters outside of strings count, so strings may hold
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest

MAX_JSON_CONTAINERS = 32_768
"""Most objects and lists: several times the most messages with several parts each."""
MAX_JSON_MEMBERS = 65_536
"""Most names in all objects together."""
MAX_JSON_TEXTS = 131_072
"""Most strings, names included."""
MAX_JSON_COMMAS = 1 << 21
"""Most commas, which bound numbers: the token ids of many long prompts, at 70 bytes each."""
SMALL_BODY_BYTES = 32_768
"""Bodies up to this size cannot exceed the limits."""


def check_structure(body: bytes) -> None:
    """Raise `InvalidRequest` for a JSON body of too many parts; it need not be valid JSON."""
    if len(body) <= SMALL_BODY_BYTES:
        return
    # Escaped backslashes are removed first; a backslash that is left escapes a quote.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check("texts", plain.count(b'"') // 2, MAX_JSON_TEXTS)
    bare = b"".join(plain.split(b'"')[::2])
    _check("objects and lists", bare.count(b"[") + bare.count(b"{"), MAX_JSON_CONTAINERS)
    _check("fields in its objects", bare.count(b":"), MAX_JSON_MEMBERS)
    _check("commas between its parts", bare.count(b","), MAX_JSON_COMMAS)


def check_depth(value: Mapping[str, Any], most: int, field: str) -> None:
    """Raise `InvalidRequest` for more than `most` levels of objects and lists, without recursion.

    `field` is where `value` is in the body.
    """
    parts: list[Any] = [value]
    for _ in range(most):
        inner: list[Any] = []
        for part in parts:
            values = part.values() if isinstance(part, Mapping) else part
            inner += [one for one in values if isinstance(one, Mapping | list)]
        if not inner:
            return
        parts = inner
    raise InvalidRequest(f"{field} has more than {most} levels: wanted at most {most}", param=field)


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"the body has {count} {what}: wanted at most {most}")
