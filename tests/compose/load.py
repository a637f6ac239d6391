"""Continuous requests: none may fail, and each must be answered as in the first round."""

from __future__ import annotations

import contextlib
import string
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from openai import OpenAI, OpenAIError

LETTERS = string.ascii_lowercase
NUM_LETTERS = 300
MAX_TOKENS = 24
NUM_PROMPTS = 6
NUM_STREAMS = 4
"""Requests that run at a time."""
NUM_MORE = 12
"""Answers that show that requests go on."""
WAIT_S = 90.0
REQUEST_LIMIT_S = 90.0


def prompts() -> list[str]:
    """Return prompts that are long enough to be handed off, without common prefixes."""
    return [
        "".join(LETTERS[(number * 7 + place * (number + 3)) % 26] for place in range(NUM_LETTERS))
        for number in range(NUM_PROMPTS)
    ]


def ask(client: OpenAI, model: str, prompt: str) -> str:
    """Return one streamed answer. Raises `OpenAIError`, or `AssertionError` without an end."""
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    text, finish_reason = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finish_reason = str(choice.finish_reason)
    assert finish_reason in ("stop", "length"), f"the stream ended with {finish_reason!r}"
    return text


@dataclass
class Load:
    """The results of the requests so far, written by several threads."""

    expected: dict[str, str]
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def answered(self, prompt: str, text: str) -> None:
        with self._changed:
            if text == self.expected[prompt]:
                self.num_answered += 1
            else:
                self.failures.append(f"answered {text!r}: wanted {self.expected[prompt]!r}")
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        with self._changed:
            self.failures.append(f"{type(error).__name__}: {error}")
            self._changed.notify_all()

    def goes_on(self) -> None:
        """Wait for a few answers more. Raises `AssertionError` when a request failed."""
        with self._changed:
            goal = self.num_answered + NUM_MORE
            self._changed.wait_for(
                lambda: self.num_answered >= goal or self.failures, timeout=WAIT_S
            )
            assert not self.failures, self.failures
            assert self.num_answered >= goal, f"{self.num_answered} of {goal} within {WAIT_S} s"


@contextlib.contextmanager
def steady_load(client: OpenAI, model: str) -> Iterator[Load]:
    """Keep `NUM_STREAMS` requests running. Raises `AssertionError` at the end if any failed.

    The expected answers are those of a first round without other load.
    """
    asked = prompts()
    load = Load({prompt: ask(client, model, prompt) for prompt in asked})
    has_to_stop = threading.Event()
    threads = [
        threading.Thread(target=_keep_asking, args=(client, model, load, asked, first, has_to_stop))
        for first in range(NUM_STREAMS)
    ]
    for thread in threads:
        thread.start()
    try:
        load.goes_on()
        yield load
        load.goes_on()
    finally:
        has_to_stop.set()
        for thread in threads:
            thread.join()
    assert not load.failures, load.failures


def _keep_asking(
    client: OpenAI,
    model: str,
    load: Load,
    asked: Sequence[str],
    first: int,
    has_to_stop: threading.Event,
) -> None:
    number = first
    while not has_to_stop.is_set():
        prompt = asked[number % len(asked)]
        number += 1
        try:
            load.answered(prompt, ask(client, model, prompt))
        except (OpenAIError, AssertionError) as error:
            load.failed(error)
            return
