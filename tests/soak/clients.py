"""Clients of a soak: they ask, leave early, read slowly, and compare every answer.

What is right was answered before the first fault, by the same cluster, one request at a time.
A request whose router cannot be reached, refuses it or breaks off before the first byte of an
answer is sent to the other router, as a balancer would do it. Anything else that ends a request
is a failure.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import httpx

from tests.soak.conversations import Turn
from tests.soak.questions import Question, Shape, questions
from tests.support.cluster.api import Api, ApiFailure, Fields, Stream, tokens_of

CLIENT_TIMEOUT_S = 150.0
"""Longer than any fault lasts."""
RETRY_PAUSE_S = 0.25
RETRY_FOR_S = 100.0
MAX_TOKENS = (20, 60, 120, 240)
SLOW_READ_S = 0.25
SLOW_READS = 20

GOES_ON = 0.7
"""How often a conversation goes on, where one was asked."""

Right = Mapping[Question | Turn, tuple[str, ...]]
"""All tokens of the longest answer to each question."""


@dataclass(frozen=True, slots=True)
class Try:
    """A request at one router; routers are numbered from 1. Seconds of the monotonic clock."""

    router: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How one request ended. `stalls` are (from, to) in seconds of the monotonic clock.

    `first_at_s` is when the first token came, over all tries; 0 where none came one by one. All
    tries but the last one were refused; stalls are those of the last one.
    """

    kind: str
    began_s: float
    ended_s: float
    num_tokens: int
    stalls: list[tuple[float, float]]
    first_at_s: float = 0.0
    failure: str = ""
    tries: tuple[Try, ...] = ()
    shape: str = ""

    @property
    def refused(self) -> tuple[Try, ...]:
        return self.tries[:-1]


@dataclass(slots=True)
class _Reading:
    """What came of one stream."""

    tokens: list[str] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    first_at_s: float = 0.0


def right_answers(api: Api, *shapes: Shape) -> Right:
    """Ask every question once, for its longest answer. The cluster is quiet."""
    return {
        question: tuple(_whole(api, question.path, question.fields(max(MAX_TOKENS), "right"))[0])
        for question in questions(*shapes)
    }


Way = Callable[[Api, str, Fields, _Reading], None]
"""How a request is asked: at a path, with a body."""


class Client(threading.Thread):
    """Asks one thing after another until `stop` is set."""

    def __init__(
        self,
        number: int,
        seed: int,
        urls: list[str],
        right: Right,
        stop: threading.Event,
        following: Mapping[Turn, Turn] | None = None,
    ) -> None:
        """`following`: what is asked after a turn, mostly."""
        super().__init__(name=f"client {number}", daemon=True)
        self._rng = random.Random(seed * 1000 + number)
        self._right = right
        self._questions: dict[Enum, list[Question | Turn]] = {}
        for question in right:
            self._questions.setdefault(question.shape, []).append(question)
        self._following = following or {}
        self._latest: Question | Turn | None = None
        self._stop_asking = stop
        self._apis = [Api(url, "tiny") for url in urls]
        for api in self._apis:
            api.http.timeout = httpx.Timeout(CLIENT_TIMEOUT_S, connect=3.0)
        self.ended: list[Ended] = []

    def run(self) -> None:
        ways: list[tuple[str, Way]] = [
            ("stream", self._stream),
            ("stream", self._stream),
            ("whole", self._whole),
            ("abort", self._abort),
            ("slow_reader", self._read_slowly),
        ]
        while not self._stop_asking.is_set():
            question = self.choose()
            max_tokens = self._rng.choice(MAX_TOKENS)
            kind, way = self._rng.choice(ways)
            fields = question.fields(max_tokens, f"{self.name} {len(self.ended)}")
            wanted = self._right[question][:max_tokens]
            one = self._ask(kind, way, question.path, fields, wanted)
            self.ended.append(replace(one, shape=question.shape.value))
        for api in self._apis:
            api.http.close()

    def choose(self) -> Question | Turn:
        """Go on with the latest conversation, or begin anything else."""
        latest = self._latest
        if isinstance(latest, Turn) and latest in self._following and self._rng.random() < GOES_ON:
            self._latest = self._following[latest]
        else:
            self._latest = self._rng.choice(
                self._questions[self._rng.choice(list(self._questions))]
            )
        return self._latest

    def _ask(
        self,
        kind: str,
        way: Way,
        path: str,
        fields: Fields,
        wanted: tuple[str, ...],
    ) -> Ended:
        began_s, tries = time.monotonic(), list[Try]()
        place = self._rng.randrange(len(self._apis))
        while True:
            reading, try_began_s = _Reading(), time.monotonic()
            may_retry = False
            try:
                way(self._apis[place], path, fields, reading)
                failure = _difference(kind, reading.tokens, wanted)
            except (ApiFailure, httpx.TransportError, AssertionError) as error:
                failure = f"{type(error).__name__}: {error}"
                may_retry = not reading.tokens and _is_for_another_router(error)
            ended_s = time.monotonic()
            tries.append(Try(place + 1, try_began_s, ended_s))
            if may_retry and ended_s - began_s < RETRY_FOR_S:
                place = (place + 1) % len(self._apis)
                time.sleep(RETRY_PAUSE_S)
                continue
            return Ended(
                kind,
                began_s,
                ended_s,
                len(reading.tokens),
                reading.stalls,
                reading.first_at_s,
                failure,
                tuple(tries),
            )

    def _stream(self, api: Api, path: str, fields: Fields, reading: _Reading) -> None:
        with api.stream(path, **fields) as stream:
            _read(stream, reading)
            assert stream.is_done, "the stream ended without [DONE]"

    def _whole(self, api: Api, path: str, fields: Fields, reading: _Reading) -> None:
        tokens, num_told = _whole(api, path, fields)
        reading.tokens += tokens
        # A token that ends an answer is counted, and not shown.
        assert 0 <= num_told - len(tokens) <= 1, f"{num_told} tokens in the usage"

    def _abort(self, api: Api, path: str, fields: Fields, reading: _Reading) -> None:
        most = self._rng.randrange(1, 40)
        with api.stream(path, **fields) as stream:
            _read(stream, reading, most=most)

    def _read_slowly(self, api: Api, path: str, fields: Fields, reading: _Reading) -> None:
        with api.stream(path, **fields) as stream:
            for _ in range(SLOW_READS):
                _read(stream, reading, most=len(reading.tokens) + 1)
                time.sleep(SLOW_READ_S)
            _read(stream, reading)
        reading.stalls.clear()


def _whole(api: Api, path: str, fields: Fields) -> tuple[list[str], int]:
    """The tokens of an answer that is not streamed, and how many its usage says."""
    (answer,) = api.ask(path, fields)
    return list(answer.tokens), answer.usage["completion_tokens"]


def _read(stream: Stream, reading: _Reading, *, most: int | None = None) -> None:
    """Read to the end, or until `most` tokens are there."""
    latest_s = time.monotonic()
    while most is None or len(reading.tokens) < most:
        event = stream.read_event()
        if event is None:
            return
        now_s = time.monotonic()
        count = 0
        for choice in event["choices"]:
            tokens = tokens_of(choice)
            count += len(tokens)
            reading.tokens += tokens
        if count:
            if len(reading.tokens) > count:  # the wait for the first token is no stall
                reading.stalls.append((latest_s, now_s))
            else:
                reading.first_at_s = now_s
            latest_s = now_s


def _difference(kind: str, tokens: list[str], wanted: tuple[str, ...]) -> str:
    is_part = kind == "abort"
    if is_part:
        wanted = wanted[: len(tokens)]
    if tuple(tokens) == wanted:
        return ""
    same = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
    at = f"another token {same}" if same is not None else "another number of tokens"
    return f"WRONG: {at}: {len(tokens)} came, {len(wanted)} are right"


def _is_for_another_router(error: Exception) -> bool:
    """Whether a balancer would try the other router: this one is not there, or drains."""
    if isinstance(error, ApiFailure):
        return error.error.status == 503
    # A request may be on its way when the router closes the connection: reset, or closed in order.
    closed = httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError
    return isinstance(error, closed | httpx.ConnectError | httpx.ConnectTimeout)


def last_answers(clients: Sequence[Client], limit_s: float) -> list[Ended]:
    """Wait for the clients' last requests; return all requests by their beginning.

    Raises `AssertionError` for a client that is not done within `limit_s` of all.
    """
    ends_s = time.monotonic() + limit_s
    for client in clients:
        client.join(max(0.0, ends_s - time.monotonic()))
        if client.is_alive():
            raise AssertionError(f"{client.name} has no answer after {limit_s:.0f} s more")
    return sorted((one for client in clients for one in client.ended), key=lambda one: one.began_s)


def outcomes(ended: Sequence[Ended]) -> dict[str, Any]:
    """Return how many requests there were, of each kind, and how they ended."""
    failures = [one.failure for one in ended if one.failure]
    return {
        "requests": len(ended),
        "by_kind": dict(Counter(one.kind for one in ended)),
        "by_shape": dict(Counter(one.shape for one in ended)),
        "tokens": sum(one.num_tokens for one in ended),
        "wrong": sum(failure.startswith("WRONG") for failure in failures),
        "failed": sum(not failure.startswith("WRONG") for failure in failures),
        "retried": sum(bool(one.refused) for one in ended),
    }
