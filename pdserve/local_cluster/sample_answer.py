"""One request through the router, streamed to the terminal, to show that a cluster works."""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from common.observing.clock import Clock
from pdserve.commands.answer_stream import CHAT, COMPLETION, answer_events, pieces, served_model
from pdserve.commands.http_client import RouterRefused, RouterUnreachable

# Long enough to be handed off: the sample exercises a prefill node and a KV transfer.
PROMPT = (
    "We are writing a small quiz about the countries of Europe, their rivers, their food and "
    "their capital cities. The first question is an easy one: what is the capital of France? "
    "Answer in one short sentence."
)
_MAX_TOKENS = 48
_READ_TIMEOUT_S = 120.0

Write = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """The answer and its times. `path` is the endpoint that gave it.

    `first_text_s` is from the request to the first text or reasoning; None without any.
    """

    path: str
    text: str
    reasoning: str
    first_text_s: float | None
    total_s: float
    num_tokens: int


def show_sample_answer(
    url: str, *, api_key: str, clock: Clock, started_at_s: float, write: Write
) -> bool:
    """Request an answer, `write` it as it streams, and the command for another one.

    Return whether an answer came. What goes wrong is written too: the cluster runs without it.
    `started_at_s` is when the cluster's start began.
    """
    try:
        model = served_model(url, api_key=api_key)
        write(f"\n{model}: ")
        sample = stream_sample_answer(url, model=model, api_key=api_key, clock=clock, write=write)
    except (RouterUnreachable, RouterRefused) as error:
        write(f"\n\npdserve: the sample has no answer: {error}\n")
        return False
    write(f"\n\n{_described(sample, clock.now_s() - started_at_s)}\n\n")
    command = curl_command(url, model=model, needs_key=bool(api_key), path=sample.path)
    write(f"{command}\n")
    return True


def _described(sample: SampleAnswer, since_start_s: float) -> str:
    counted = f"{sample.num_tokens} tokens in {sample.total_s:.2f} s."
    if sample.first_text_s is None:
        return f"The answer has no text: {counted}"
    first_s = since_start_s - sample.total_s + sample.first_text_s
    told = (
        f"First token {1000 * sample.first_text_s:.0f} ms after the request, "
        f"{first_s:.1f} s after the start; {counted}"
    )
    if sample.text:
        return told
    return f"{told}\nAll of them are reasoning: this model answers where max_tokens is larger."


def stream_sample_answer(
    url: str, *, model: str, api_key: str, clock: Clock, write: Write
) -> SampleAnswer:
    """Request an answer and `write` each piece of it as it arrives, reasoning marked as such.

    A model that cannot chat, such as one without a chat template, is asked for a completion.
    Raises `RouterUnreachable`, or `RouterRefused` when that is refused too or the stream carries an
    error.
    """

    def ask(path: str) -> SampleAnswer:
        return _stream(url, path, model=model, api_key=api_key, clock=clock, write=write)

    try:
        return ask(CHAT)
    except RouterRefused as refused:
        if refused.status != http.client.BAD_REQUEST:
            raise
        write(f"[a chat is refused: {refused}]\n[completion] ")
    return ask(COMPLETION)


def curl_command(url: str, *, model: str, needs_key: bool, path: str = CHAT) -> str:
    """Return the same request as a shell command."""
    key_lines = "  -H 'Authorization: Bearer YOUR-KEY' \\\n" if needs_key else ""
    shown = ("model", "stream", "messages") if path == CHAT else ("model", "stream", "prompt")
    body = _body(path, model)
    lines = ",\n       ".join(f"{json.dumps(key)}: {json.dumps(body[key])}" for key in shown)
    return (
        f"curl -N {url}{path} \\\n"
        f"{key_lines}"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(f'{{{lines}}}')}"
    )


def _body(path: str, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "model": model,
        "stream": True,
        **({"messages": messages} if path == CHAT else {"prompt": PROMPT}),
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }


def _stream(
    url: str, path: str, *, model: str, api_key: str, clock: Clock, write: Write
) -> SampleAnswer:
    sent_at_s = clock.now_s()
    first_text_s: float | None = None
    texts: dict[bool, str] = {False: "", True: ""}
    num_tokens = 0
    body = _body(path, model)
    stream = answer_events(url, path, body, api_key=api_key, timeout_s=_READ_TIMEOUT_S)
    with closing(stream) as events:
        for event in events:
            for is_reasoning, text in pieces(event):
                if first_text_s is None:
                    first_text_s = clock.now_s() - sent_at_s
                if not texts[is_reasoning] and (is_reasoning or texts[True]):
                    write("[reasoning] " if is_reasoning else "\n[answer] ")
                texts[is_reasoning] += text
                write(text)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return SampleAnswer(
        path=path,
        text=texts[False],
        reasoning=texts[True],
        first_text_s=first_text_s,
        total_s=clock.now_s() - sent_at_s,
        num_tokens=num_tokens,
    )
