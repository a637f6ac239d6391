"""Times of answers as clients of a router see them, with what nodes take beside the model's steps.

The cluster has a prefill node and a decode node on this machine, and no other load. Answers of one
client, of several, and of one while the prefill node computes the prompts of others. Then both
nodes become mixed ones, and each of them has an answer, or a prompt, at the same time.

Of some times the median is kept, as that is what a request sees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from statistics import median
from typing import NamedTuple

from common.measured_profile import Beside, FirstTokenTime, SecondTokenTime, StreamedTime
from common.settings.handoff_config import HandoffConfig
from pdserve.commands.answer_stream import COMPLETION, answer_events, served_model
from pdserve.commands.http_client import opened

NUM_PROMPT, NUM_OUTPUT = 512, 48
NUM_SMALL_PROMPT = 128
"""A prompt for the prefill node, much shorter than the other: both together show what a request
takes, and what each of its tokens does."""
NUM_SHORT_PROMPT = HandoffConfig().local_prefill_threshold
"""A prompt that the decode node computes itself."""
NUM_ROWS = 8
NUM_LONG_OUTPUT = 400
NUM_REPEATS = 5
NUM_PAIRS = 3
"""So often both nodes do the same at once."""
_LEAST_TOKENS = 5
"""A mean of less gaps says little."""
_READ_TIMEOUT_S = 60.0

_COMPUTE = "pdserve_ttft_stage_seconds_sum"
_METRICS_BYTES = 16 << 20

Ask = Callable[[int, int, list[float], Callable[[], object]], float]
"""Asks for an answer: tokens of its prompt and of the answer, the times at which these came, added
as they come, and what is called then. Returns when it was asked."""


class ServedTimes(NamedTuple):
    """The times that clients see; empty where no cluster served."""

    streamed: tuple[StreamedTime, ...] = ()
    first_tokens: tuple[FirstTokenTime, ...] = ()
    second_tokens: tuple[SecondTokenTime, ...] = ()


class _Timed(NamedTuple):
    """When a request was sent and each of its tokens came, and how long its prompt was computed."""

    at_s: list[float]
    compute_s: float


class ServedTimer:
    """Asks a router by `ask`, and keeps the median of some times. `tell` gets a line for each.

    `computed_s` says for how long prompts of all requests so far were computed. `mix` makes both
    nodes mixed ones, the less busy of which gets a request.
    """

    def __init__(
        self,
        ask: Ask,
        tell: Callable[[str], None],
        computed_s: Callable[[], float],
        mix: Callable[[], object],
    ) -> None:
        self._asked = ask
        self._computed_s = computed_s
        self._tell = tell
        self._mix = mix
        self._streamed: list[StreamedTime] = []
        self._first: list[FirstTokenTime] = []
        self._second: list[SecondTokenTime] = []

    def measure(self) -> ServedTimes:
        """Return the times between tokens, those until the first one, and those to the second."""
        self._ask(NUM_PROMPT, 2)  # the first request opens connections
        self._alone()
        self._several()
        self._beside_prompts()
        self._mix()
        self._beside_alike()
        return ServedTimes(tuple(self._streamed), tuple(self._first), tuple(self._second))

    def _alone(self) -> None:
        """Measure answers to prompts of all lengths, in turns: the machine's speed may change."""
        sizes = (NUM_SHORT_PROMPT, NUM_SMALL_PROMPT, NUM_PROMPT)
        rounds = [[self._timed(size, NUM_OUTPUT) for size in sizes] for _ in range(NUM_REPEATS)]
        for num_prompt, times in zip(sizes, zip(*rounds, strict=True), strict=True):
            context, answers = num_prompt + NUM_OUTPUT // 2, [one.at_s for one in times]
            self._on_gaps(1, context, "", [_gap_s(one[2:]) for one in answers])
            self._on_first(num_prompt, "", times, 1 if num_prompt == NUM_SHORT_PROMPT else 2)
            if num_prompt == NUM_SHORT_PROMPT:
                continue  # its KV is there
            second_s = median(second_s - first_s for _, first_s, second_s, *_ in answers)
            self._second.append(SecondTokenTime(tokens=num_prompt, seconds=second_s))
            said = f"the second token, which waits for the KV of {num_prompt}"
            self._tell(f"{said}: {1e3 * second_s:.2f} ms")

    def _several(self) -> None:
        """Measure the gaps of some answers while all of them decode."""
        gaps_s = [gap_s for _ in range(NUM_REPEATS // 2) for gap_s in self._gaps_at_once(NUM_ROWS)]
        self._on_gaps(NUM_ROWS, NUM_SHORT_PROMPT + NUM_OUTPUT, "", gaps_s)

    def _beside_prompts(self) -> None:
        """Measure the gaps of an answer while prompts are computed, and the times of these."""
        at_s: list[float] = []
        begun = threading.Event()

        def on_token() -> None:
            if len(at_s) > 2:
                begun.set()

        spans: list[_Timed] = []
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(self._asked, NUM_PROMPT, NUM_LONG_OUTPUT, at_s, on_token)
            begun.wait(_READ_TIMEOUT_S)
            while not asked.done() and len(spans) < NUM_REPEATS:
                timed = self._timed(NUM_PROMPT, 1)
                if not asked.done():
                    spans.append(timed)
            asked.result()
        gaps_s = _gaps_s([_between(at_s, *one.at_s) for one in spans])
        self._on_gaps(1, NUM_PROMPT + NUM_LONG_OUTPUT // 4, "prompts", gaps_s)
        self._on_first(NUM_PROMPT, "answers", spans, 2)

    def _beside_alike(self) -> None:
        """Measure an answer on each of two mixed nodes at once, and a prompt on each of them.

        A prompt that has both nodes for itself is measured in turns with these.
        """
        gaps_s: list[float] = []
        alone, pairs = list[_Timed](), list[_Timed]()
        for _ in range(NUM_PAIRS):
            gaps_s += self._gaps_at_once(2)
            alone.append(self._timed(NUM_PROMPT, 1))
            before_s = self._computed_s()
            answers = self._at_once(2, NUM_PROMPT, 1)
            compute_s = (self._computed_s() - before_s) / len(answers)
            pairs += (_Timed(at_s, compute_s) for at_s in answers)
        self._on_gaps(1, NUM_SHORT_PROMPT + NUM_OUTPUT, "answers", gaps_s)
        self._on_first(NUM_PROMPT, "", alone, 1)
        self._on_first(NUM_PROMPT, "prompts", pairs, 1)

    def _on_gaps(self, rows: int, context: int, beside: Beside, gaps_s: list[float]) -> None:
        """Keep and tell the median of the times between two tokens; nothing without one."""
        if gaps_s:
            time = StreamedTime(rows=rows, context=context, beside=beside, step_s=median(gaps_s))
            self._streamed.append(time)
            said = f"a token of each of {rows} answers{_shown(beside)}"
            self._tell(f"{said}: {1e3 * time.step_s:.2f} ms")

    def _on_first(
        self, num_prompt: int, beside: Beside, times: Sequence[_Timed], nodes: int
    ) -> None:
        """Keep and tell the median of the times until a first token; nothing without one."""
        if times:
            time = FirstTokenTime(
                tokens=num_prompt,
                beside=beside,
                nodes=nodes,
                seconds=median(one.at_s[1] - one.at_s[0] for one in times),
                compute_s=median(one.compute_s for one in times),
            )
            self._first.append(time)
            said = f"the first token after {time.tokens} of a prompt{_shown(beside)}"
            self._tell(f"{said}: {1e3 * time.seconds:.2f} ms")

    def _timed(self, num_prompt: int, num_output: int) -> _Timed:
        """Ask, while no other prompt is computed."""
        before_s = self._computed_s()
        at_s = self._ask(num_prompt, num_output)
        return _Timed(at_s, self._computed_s() - before_s)

    def _gaps_at_once(self, number: int) -> list[float]:
        """Return the mean gap of each of these answers while all of them decode."""
        answers = [one[2:] for one in self._at_once(number, NUM_SHORT_PROMPT, 2 * NUM_OUTPUT)]
        begin_s, end_s = max(one[0] for one in answers), min(one[-1] for one in answers)
        return _gaps_s([_between(one, begin_s, end_s) for one in answers])

    def _at_once(self, number: int, num_prompt: int, num_output: int) -> list[list[float]]:
        """Return `_ask` of so many requests that are sent at once."""
        with ThreadPoolExecutor(number) as threads:
            asked = [threads.submit(self._ask, num_prompt, num_output) for _ in range(number)]
            return [one.result() for one in asked]

    def _ask(self, num_prompt: int, num_output: int) -> list[float]:
        """Return when a request was sent and when each token of its answer came."""
        at_s: list[float] = []
        sent_at_s = self._asked(num_prompt, num_output, at_s, lambda: None)
        return [sent_at_s, *at_s]


class StreamAsker:
    """Asks the router at `url` for completions, no two of whose prompts begin alike.

    Raises `RouterUnreachable` or `RouterRefused` where it does not answer, such as for a prompt
    that the model has no room for.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = served_model(url, api_key="")
        self._numbers = count()

    def __call__(
        self, num_prompt: int, num_output: int, at_s: list[float], on_token: Callable[[], object]
    ) -> float:
        number = next(self._numbers)
        body = {
            "model": self._model,
            "prompt": [3 + (number + 31 * place) % 90 for place in range(num_prompt)],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        sent_at_s = time.perf_counter()
        stream = answer_events(self._url, COMPLETION, body, api_key="", timeout_s=_READ_TIMEOUT_S)
        with closing(stream) as events:
            for event in events:
                now_s = time.perf_counter()
                for choice in event.get("choices") or []:
                    at_s += [now_s] * len(choice.get("token_ids") or [])
                on_token()
        return sent_at_s


def computed_s(url: str) -> float:
    """Return for how long prompts were computed of which a first token left the router at `url`.

    Raises `RouterUnreachable` or `RouterRefused` where it does not answer.
    """
    with opened(url, "GET", "/metrics", timeout_s=_READ_TIMEOUT_S) as response:
        lines = response.read(_METRICS_BYTES).decode().splitlines()
    name = f'{_COMPUTE}{{stage="prefill_compute"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def _gap_s(at_s: Sequence[float]) -> float:
    """Return the mean time from one to the next; there are at least two."""
    return (at_s[-1] - at_s[0]) / (len(at_s) - 1)


def _gaps_s(answers: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean gap of each that has some."""
    return [_gap_s(at_s) for at_s in answers if len(at_s) >= _LEAST_TOKENS]


def _shown(beside: Beside) -> str:
    return f" beside {beside} of another node" if beside else ""


def _between(at_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    return [one for one in at_s if begin_s <= one <= end_s]
