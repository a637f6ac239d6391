"""Cheap streaming clients: raw sockets, and only as much parsing as counting needs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import uvloop

NUM_PROMPTS = 4096
"""The number of different prompts, used in turn.

The router stores where prefixes were placed, up to a bound. With a new prompt each time its memory
would grow up to that bound, which would hide leaks.
"""

_GOOD = b"HTTP/1.1 200 "
_END = b"0\r\n\r\n"
_EVENT = b"data: "
_DONE = b"data: [DONE]"
_EVENTS_WITHOUT_TOKENS = 4
"""Events without text: role, finish reason, usage and [DONE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """`num_streams` clients that each send their next request when the last was answered.

    They stop after `duration_s`, or when `num_requests` were sent in all, whichever is given.
    """

    num_streams: int
    num_tokens: int
    duration_s: float = 0.0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load's result: `seconds` from the first request to the last answer; TTFT by request."""

    num_requests: int
    num_tokens: int
    num_token_events: int
    seconds: float
    ttft_s: Sequence[float]


class LoadClient:
    """All clients, on one core, in a process of their own."""

    def __init__(self, core: int, port: int, model: str) -> None:
        os.sched_setaffinity(0, {core})
        self._port = port
        self._model = model
        self._num_sent = 0

    def pid(self) -> int:
        return os.getpid()

    def run(self, spec: LoadSpec) -> LoadResult:
        """Run a load; `RuntimeError` for any answer that is incomplete."""
        return uvloop.run(self._run(spec))

    def text(self, num_tokens: int) -> str:
        """Return the text of one answer, from its events."""
        answer = uvloop.run(self._one(num_tokens))
        lines = [line for line in answer.decode().splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    def close(self) -> None:
        """Do nothing: a run leaves nothing open."""

    async def _run(self, spec: LoadSpec) -> LoadResult:
        ends_at_s = time.perf_counter() + (spec.duration_s or float("inf"))
        last = self._num_sent + (spec.num_requests or 1 << 60)
        ttft_s: list[float] = []
        num_events: list[int] = []

        async def stream() -> None:
            client = await _Client.connected(self._port)
            try:
                while self._num_sent < last and time.perf_counter() < ends_at_s:
                    answer = await client.ask(self._request(spec.num_tokens))
                    num_events.append(num_token_events(answer, spec.num_tokens))
                    ttft_s.append(client.ttft_s)
            finally:
                client.close()

        began_at_s = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(spec.num_streams)))
        seconds = time.perf_counter() - began_at_s
        num_tokens = len(ttft_s) * spec.num_tokens
        return LoadResult(len(ttft_s), num_tokens, sum(num_events), seconds, ttft_s)

    async def _one(self, num_tokens: int) -> bytes:
        client = await _Client.connected(self._port)
        try:
            return await client.ask(self._request(num_tokens))
        finally:
            client.close()

    def _request(self, num_tokens: int) -> bytes:
        self._num_sent += 1
        content = (
            f"Question {self._num_sent % NUM_PROMPTS}: explain in a few plain sentences why a "
            "cluster may want to compute prompts on one machine and produce the answers on "
            "another, and what has to travel between the two before the first word of the answer "
            "can be shown to anybody."
        )
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": num_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        return (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()


class _Client(asyncio.Protocol):
    """One kept connection, one request at a time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._answer: asyncio.Future[bytes] | None = None
        self._asked_at_s = 0.0
        self.ttft_s = 0.0

    @classmethod
    async def connected(cls, port: int) -> _Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has all methods of asyncio's, but not its type.
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> bytes:
        """Send a request; return the raw answer."""
        self._parts, self.ttft_s = [], 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self._asked_at_s = time.perf_counter()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        if not self.ttft_s and _EVENT in data:
            self.ttft_s = time.perf_counter() - self._asked_at_s
        self._parts.append(data)
        if len(self._parts) == 1 and not data.startswith(_GOOD):
            self._settle(RuntimeError(f"the router answered {data[:500]!r}"))
        if data.endswith(_END) or (len(data) < len(_END) and self._ends()):
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(exc or ConnectionError("the router closed the connection"))

    def close(self) -> None:
        self._transport.close()

    def _ends(self) -> bool:
        return b"".join(self._parts[-len(_END) :]).endswith(_END)

    def _settle(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(b"".join(self._parts))
        else:
            self._answer.set_exception(error)


def num_token_events(answer: bytes, num_tokens: int) -> int:
    """Return the number of events with text; `RuntimeError` unless the answer is complete."""
    if b'"completion_tokens":%d,' % num_tokens not in answer or _DONE not in answer:
        raise RuntimeError(f"not a whole answer of {num_tokens} tokens: {answer[-500:]!r}")
    return answer.count(_EVENT) - _EVENTS_WITHOUT_TOKENS


def figures(load: LoadResult, used_cpu_s: Mapping[str, float]) -> dict[str, object]:
    """Return one load's figures. `used_cpu_s` is by process, the "router" among them."""
    return {
        "tokens_per_s": round(load.num_tokens / load.seconds),
        "requests_per_s": round(load.num_requests / load.seconds, 1),
        "tokens_per_event": round(load.num_tokens / load.num_token_events, 2),
        "ttft_added_ms_p50": round(quantile(load.ttft_s, 0.5) * 1000, 2),
        "ttft_added_ms_p99": round(quantile(load.ttft_s, 0.99) * 1000, 2),
        "cpu_s_per_1k_requests": round(used_cpu_s["router"] / load.num_requests * 1000, 3),
        "cpu_share": {name: round(cpu / load.seconds, 2) for name, cpu in used_cpu_s.items()},
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
