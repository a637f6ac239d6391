"""How much structure a body may have, found before anything is built from it.

Ten megabytes of text are ten megabytes; ten megabytes of brackets are millions of objects, seconds
of work and a gigabyte of memory. Only what is outside of texts counts, so texts may hold anything.
"""

from __future__ import annotations

from common.errors import InvalidRequest

MAX_JSON_CONTAINERS = 32_768
"""Objects and lists: several times the most messages with several parts each."""
MAX_JSON_MEMBERS = 65_536
"""Names in all objects together."""
MAX_JSON_TEXTS = 131_072
"""Names too."""
MAX_JSON_COMMAS = 1 << 21
"""Numbers, by what separates them: the token ids of many long prompts. Each is held in 70 bytes."""
SMALL_BODY_BYTES = 32_768
"""Has no room for that much."""


def check_structure(body: bytes) -> None:
    """Raise `InvalidRequest` for a JSON body of too many parts; it need not be valid JSON."""
    if len(body) <= SMALL_BODY_BYTES:
        return
    # Of a run of backslashes pairs go, and then one that is left takes its quote with it.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check("texts", plain.count(b'"') // 2, MAX_JSON_TEXTS)
    bare = b"".join(plain.split(b'"')[::2])
    _check("objects and lists", bare.count(b"[") + bare.count(b"{"), MAX_JSON_CONTAINERS)
    _check("fields in its objects", bare.count(b":"), MAX_JSON_MEMBERS)
    _check("commas between its parts", bare.count(b","), MAX_JSON_COMMAS)


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"the body has {count} {what}: wanted at most {most}")
