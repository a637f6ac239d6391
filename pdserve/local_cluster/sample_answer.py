"""One chat request through the router, streamed to the terminal, to show that a cluster works."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from pdserve.commands.http_client import RouterRefused, decoded, fetch_json, opened

# Long enough to be handed off: the sample exercises a prefill node and a KV transfer.
PROMPT = (
    "We are writing a small quiz about the countries of Europe, their rivers, their food and "
    "their capital cities. The first question is an easy one: what is the capital of France? "
    "Answer in one short sentence."
)
PATH = "/v1/chat/completions"
_READ_TIMEOUT_S = 120.0
_LONGEST_LINE_BYTES = 1 << 20
_MOST_EVENTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """The answer and its times; `first_text_s` is from the request to the first text."""

    text: str
    first_text_s: float
    total_s: float
    num_tokens: int


def served_model(url: str, *, api_key: str) -> str:
    """Return the first model of the router. Raises `RouterRefused` when it names none."""
    reply = fetch_json(url, "/v1/models", api_key=api_key)
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RouterRefused(f"{url}/v1/models: the router names no model") from None


def stream_sample_answer(
    url: str, *, model: str, api_key: str, clock: Clock, write: Callable[[str], object]
) -> SampleAnswer:
    """Request an answer and `write` each piece of text as it arrives.

    Raises `RouterUnreachable`, or `RouterRefused` when the stream carries an error or no text.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_at_s = clock.now_s()
    first_text_s: float | None = None
    pieces: list[str] = []
    num_tokens = 0
    with opened(
        url, "POST", PATH, body=body, api_key=api_key, timeout_s=_READ_TIMEOUT_S
    ) as response:
        for event in _events(url, response):
            if text := _text(event):
                if first_text_s is None:
                    first_text_s = clock.now_s() - sent_at_s
                pieces.append(text)
                write(text)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if first_text_s is None:
        raise RouterRefused(f"{url}{PATH}: the answer has no text")
    return SampleAnswer(
        text="".join(pieces),
        first_text_s=first_text_s,
        total_s=clock.now_s() - sent_at_s,
        num_tokens=num_tokens,
    )


def curl_command(url: str, *, model: str, needs_key: bool) -> str:
    """Return the same request as a shell command."""
    key_lines = "  -H 'Authorization: Bearer YOUR-KEY' \\\n" if needs_key else ""
    return (
        f"curl -N {url}{PATH} \\\n"
        f"{key_lines}"
        "  -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "stream": true,\n'
        f'       "messages": [{{"role": "user", "content": "{PROMPT}"}}]}}\''
    )


def _events(url: str, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for _ in range(_MOST_EVENTS):
        line = response.readline(_LONGEST_LINE_BYTES)
        if not line:
            raise RouterRefused(f"{url}{PATH}: the stream ended before [DONE]")
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = decoded(url, PATH, data)
        if not isinstance(event, dict):
            raise RouterRefused(f"{url}{PATH}: an event is not an object: {event!r}")
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise RouterRefused(f"{url}{PATH}: {message}")
        yield event
    raise RouterRefused(f"{url}{PATH}: more than {_MOST_EVENTS} events in one answer")


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""
