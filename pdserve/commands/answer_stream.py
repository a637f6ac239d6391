"""The client side of answers that stream: events, and the texts in them."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator
from typing import Any

from pdserve.commands.http_client import RouterRefused, decoded, fetch_json, opened

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_LONGEST_LINE_BYTES = 1 << 20
_MOST_LINES = 1_000_000

_INVISIBLE = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")


def served_model(url: str, *, api_key: str) -> str:
    """Return the first model of the router. Raises `RouterRefused` when it names none."""
    reply = fetch_json(url, "/v1/models", api_key=api_key)
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RouterRefused(f"{url}/v1/models: the router names no model") from None


def answer_events(
    url: str, path: str, body: dict[str, Any], *, api_key: str, timeout_s: float
) -> Generator[dict[str, Any], None, None]:
    """Send a request whose answer streams, and yield the events of its stream.

    `timeout_s` bounds every single read. Closing the generator closes the connection, which ends
    the request. Raises `RouterUnreachable`, or `RouterRefused` for another status, an error in the
    stream, or a stream that breaks off.
    """
    with opened(url, "POST", path, body=body, api_key=api_key, timeout_s=timeout_s) as response:
        yield from _events(url, path, response)


def pieces(event: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield the texts of an event, with whether they are reasoning."""
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content"):
            yield True, reasoning
        if text := delta.get("content") or choice.get("text"):
            yield False, text


def printable(text: str) -> str:
    """Return a model's text without the control characters that a terminal would obey."""
    return text.translate(_INVISIBLE)


def _events(url: str, path: str, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for _ in range(_MOST_LINES):
        line = response.readline(_LONGEST_LINE_BYTES)
        if not line:
            raise RouterRefused(f"{url}{path}: the stream ended before [DONE]")
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = decoded(url, path, data)
        if not isinstance(event, dict):
            raise RouterRefused(f"{url}{path}: an event is not an object: {event!r}")
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise RouterRefused(f"{url}{path}: {message}")
        yield event
    raise RouterRefused(f"{url}{path}: more than {_MOST_LINES} lines in one answer")
