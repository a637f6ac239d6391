"""Server-sent events in the framing of OpenAI's API, and the JSON inside them.

JSON text has no raw line breaks, so one `data:` line always holds one event. That is so for clients
too that split text at what Unicode calls the end of a line, as Python's `str.splitlines` and what
is built on it (`iter_lines` of httpx and requests) do: JSON may hold these characters raw, and here
it never does.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which every client skips: it shows that the connection is alive."""
MEDIA_TYPE = "text/event-stream; charset=utf-8"
JSON_TYPE = "application/json; charset=utf-8"
"""The type of JSON, which is always in UTF-8; Windows PowerShell wants to be told so."""

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


_LINE_ENDS = {one: f"\\u{ord(one):04x}" for one in ("\x85", "\u2028", "\u2029")}
"""The ends of lines that JSON does not require to be escaped."""


def to_json(value: object) -> str:
    """Return compact JSON; `ValueError` for NaN and infinity, which JSON does not have."""
    return _in_one_line(_encoder.encode(value))


def text_json(text: str) -> str:
    """Return the JSON of a text; called for every token, so without the encoder's overhead."""
    return _in_one_line(encode_basestring(text))


def _in_one_line(encoded: str) -> str:
    if not encoded.isascii():
        for end, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(end, escaped)
    return encoded


def event(payload: str) -> bytes:
    """Return one event with `payload`, which is one line of JSON."""
    return event_text(payload).encode()


def named_event(name: str, payload: object) -> bytes:
    """Return one event with a name, as APIs with many kinds of events have them."""
    return f"event: {name}\ndata: {to_json(payload)}\n\n".encode()


def event_text(payload: str) -> str:
    """Return the event before it is encoded, to be joined with others."""
    return f"data: {payload}\n\n"
