"""The JSON of a body, checked before anything is built from it: its encoding and its structure.

It is in UTF-8, with or without a byte order mark (RFC 8259, section 8.1). Ten megabytes of text are
ten megabytes; ten megabytes of brackets are millions of objects, seconds of work and a gigabyte of
memory. Only characters outside of strings count, so strings may hold anything.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any, NewType

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


# Those of 4 bytes come first: the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# JSON begins with two characters of ASCII, so the place of zeros tells what wrote them.
_ZEROS = ((b"\0\0\0", "UTF-32"), (b"\0", "UTF-16"))


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in a text: a pair of surrogates, a half that is alone, or any other."""


JsonText = NewType("JsonText", bytes)
"""A body that may be parsed."""


def checked_text(body: bytes) -> JsonText:
    """Return a body without a byte order mark; it need not be valid JSON.

    Raises `InvalidRequest` for UTF-16 and UTF-32, and for too many parts.
    """
    text = _utf8(body)
    check_structure(text)
    return JsonText(text)


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


def check_utf8(text: JsonText) -> None:
    """Raise `InvalidRequest` for a body that is in another encoding, such as ISO 8859-1."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not in UTF-8: byte {text[error.start]:#04x} at {error.start} is no "
            "character there"
        ) from None


def with_whole_characters(text: bytes) -> JsonText:
    """Return JSON with U+FFFD for each half of a pair of surrogates.

    Clients that cut a text at a number of UTF-16 units leave one of a character beyond U+FFFF.
    """
    return JsonText(_ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text))


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


def _utf8(body: bytes) -> bytes:
    """Return `body` without a byte order mark. Raises `InvalidRequest` for UTF-16 and UTF-32."""
    if body[:1].isascii() and b"\0" not in body[:4]:
        return body
    if body.startswith(codecs.BOM_UTF8):
        return body[len(codecs.BOM_UTF8) :]
    found = next((name for mark, name in _MARKS if body.startswith(mark)), None)
    if found is None:
        found = next((name for zeros, name in _ZEROS if zeros in body[:4]), None)
    if found is None:
        return body
    raise InvalidRequest(f"the body is encoded in {found}: wanted UTF-8")
