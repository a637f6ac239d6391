"""An HTTP client that reads the API's answers, and insists on the shape of its errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

TIMEOUT_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MOST_THREADS = 32

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error of the API, as a client sees it."""

    status: int
    code: str
    message: str
    kind: str
    param: str | None

    @classmethod
    def read(cls, status: int, body: Any) -> Self:
        """Fails unless `body` is an error in OpenAI's shape."""
        assert isinstance(body, dict), f"{status}: {body!r}"
        assert body.keys() == {"error"}, f"{status}: {body!r}"
        error = body["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return cls(status, error["code"], error["message"], error["type"], error["param"])


class ApiFailure(Exception):
    """The API answered with an error."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(f"{error.status} {error.code}: {error.message}")
        self.error = error


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `tokens` are texts that name each token without doubt; empty unless asked for."""

    text: str
    tokens: tuple[str, ...]
    finish_reason: str | None
    usage: Fields = field(compare=False)

    @property
    def num_cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


class Stream:
    """An answer that is being read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.events: list[Fields] = []
        self.is_done = False

    def read_event(self) -> Fields | None:
        """The next event; None at the end. An error event raises `ApiFailure`."""
        for line in self._lines:
            if not line or line.startswith(":"):  # a comment: the next token is awaited
                continue
            name, _, data = line.partition(": ")
            assert name == "data", line
            assert not self.is_done, f"after the end: {line}"
            if data == "[DONE]":
                self.is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise ApiFailure(ApiError.read(200, event))
            self.events.append(event)
            return dict(event)
        return None

    def read_tokens(self, count: int) -> None:
        """Read until `count` events with text have come."""
        while sum(bool(_event_text(event)) for event in self.events) < count:
            assert self.read_event() is not None, "the stream ended early"

    def read_rest(self) -> Answer:
        """The whole answer, once the stream has ended well. Raises `ApiFailure`."""
        while self.read_event() is not None:
            pass
        assert self.is_done, "the stream ended without [DONE]"
        choices = [c for event in self.events for c in event["choices"]]
        usages = [event["usage"] for event in self.events if event.get("usage")]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        assert len(reasons) == 1, reasons
        tokens = [token for choice in choices for token in tokens_of(choice)]
        text = "".join(_event_text(event) for event in self.events)
        return Answer(text, tuple(tokens), reasons[0], usages[-1] if usages else {})


class Api:
    """One router's API for one model; close it. `headers` go with every request."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str] | None = None) -> None:
        self.model = model
        limits = httpx.Limits(max_connections=_MOST_THREADS, max_keepalive_connections=8)
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def complete(self, prompt: str | list[int], **fields: Any) -> Answer:
        """One completion. Raises `ApiFailure`."""
        return self.ask(COMPLETIONS, {"prompt": prompt, "logprobs": 0, **fields})[0]

    def chat(self, text: str, **fields: Any) -> Answer:
        """The answer to one user message. Raises `ApiFailure`."""
        messages = [{"role": "user", "content": text}]
        return self.ask(CHAT, {"messages": messages, "logprobs": True, **fields})[0]

    def ask(self, path: str, fields: Fields) -> list[Answer]:
        """Every choice of an answer that is not streamed. Raises `ApiFailure`."""
        response = self.http.post(path, json={"model": self.model, **fields})
        body = response.json()
        if response.status_code != 200:
            raise ApiFailure(ApiError.read(response.status_code, body))
        return [_answer(choice, body["usage"]) for choice in body["choices"]]

    def complete_all(self, requests: Iterable[Fields]) -> list[Answer | ApiFailure]:
        """Completions that run at the same time, in the order asked."""

        def complete(fields: Fields) -> Answer | ApiFailure:
            try:
                return self.complete(**fields)
            except ApiFailure as failure:
                return failure

        with ThreadPoolExecutor(_MOST_THREADS) as threads:
            return list(threads.map(complete, requests))

    @contextlib.contextmanager
    def stream(self, path: str = COMPLETIONS, **fields: Any) -> Iterator[Stream]:
        """A streamed answer; leaving early hangs up. Raises `ApiFailure`."""
        body = {"model": self.model, "stream": True, **fields}
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ApiFailure(ApiError.read(response.status_code, response.json()))
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Stream(response)


def _answer(choice: Fields, usage: Fields) -> Answer:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, tuple(tokens_of(choice)), choice["finish_reason"], usage)


def tokens_of(choice: Fields) -> list[str]:
    """The tokens of a choice whose log probabilities were asked for."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    return list(logprobs["tokens"])


def _event_text(event: Fields) -> str:
    shown = [c["text"] if "text" in c else c["delta"].get("content", "") for c in event["choices"]]
    return "".join(shown)
