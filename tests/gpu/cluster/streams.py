"""Streamed answers over plain sockets, with the time at which each token arrived.

A general HTTP client takes a tenth of a millisecond for each event, which at 32 streams is a share
of what is measured. Bytes are only stamped while they come, and read when the answer has ended.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_EVENT = re.compile(rb"data: (\{.*\})\r?\n")
_READ_BYTES = 1 << 16
_MARK = b"data: {"


class AnswerFailed(Exception):
    """The router refused a request, or its stream broke off; the text has what came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One completion. `fields` are further ones of its body."""

    prompt: Sequence[int]
    max_tokens: int
    fields: dict[str, Any]

    def body(self, model: str) -> bytes:
        """The JSON of a request that runs to its full length."""
        fields = {"model": model, "prompt": list(self.prompt), "max_tokens": self.max_tokens,
                  "stream": True, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        return json.dumps(fields | self.fields).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Its tokens, and when it was asked for and each token came, in seconds of one clock.

    `logprobs` are the tokens' log probabilities where they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    asked_at_s: float
    at_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.at_s[0] - self.asked_at_s


async def ask(
    url: str, model: str, asked: Asked, on_bytes: Callable[[int], None] | None = None
) -> Answer:
    """Return a whole answer. `on_bytes` is told of each event or two as they come.

    Raises `AnswerFailed`.
    """
    place = urlsplit(url)
    body = asked.body(model)
    asked_at_s = time.monotonic()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n"
            % (place.netloc.encode(), len(body)) + body
        )  # fmt: skip
        pieces: list[tuple[float, bytes]] = []
        while data := await reader.read(_READ_BYTES):
            pieces.append((time.monotonic(), data))
            if on_bytes is not None:
                on_bytes(data.count(_MARK))
    finally:
        writer.close()
    return read_answer(asked, asked_at_s, pieces)


def read_answer(asked: Asked, asked_at_s: float, pieces: list[tuple[float, bytes]]) -> Answer:
    """Return what came, each piece with its time; `AnswerFailed` unless it is a whole answer."""
    whole = b"".join(data for _, data in pieces)
    if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole:
        raise AnswerFailed(f"{whole[:200]!r} … {whole[-300:]!r}")
    ends: list[tuple[int, float]] = []
    length = 0
    for at_s, data in pieces:
        length += len(data)
        ends.append((length, at_s))
    tokens: list[int] = []
    logprobs: list[float] = []
    times: list[float] = []
    piece = 0
    for found in _EVENT.finditer(whole):
        while ends[piece][0] < found.end(1):
            piece += 1
        event = json.loads(found[1])
        if "error" in event:
            raise AnswerFailed(str(event["error"]))
        for choice in event["choices"]:
            came = choice.get("token_ids") or []
            tokens += came
            times += [ends[piece][1]] * len(came)
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(tokens) != asked.max_tokens:
        raise AnswerFailed(f"{len(tokens)} tokens: wanted {asked.max_tokens}")
    return Answer(
        tokens=tuple(tokens), logprobs=tuple(logprobs), asked_at_s=asked_at_s, at_s=tuple(times)
    )


async def ask_all(
    url: str, model: str, all_asked: Sequence[Asked], on_bytes: Callable[[int], None] | None = None
) -> list[Answer]:
    """Return the answers of requests that are sent at the same time. Raises `AnswerFailed`."""
    return await asyncio.gather(*(ask(url, model, one, on_bytes) for one in all_asked))
