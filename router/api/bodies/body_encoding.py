"""The encoding of a JSON body: UTF-8, with or without a byte order mark (RFC 8259, section 8.1)."""

from __future__ import annotations

import codecs

from common.errors import InvalidRequest

# Those of 4 bytes come first: the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# JSON begins with two characters of ASCII, so the place of zeros tells what wrote them.
_ZEROS = ((b"\0\0\0", "UTF-32"), (b"\0", "UTF-16"))


def utf8_body(body: bytes) -> bytes:
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
