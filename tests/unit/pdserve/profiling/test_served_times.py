"""Times of answers as clients see them, from answers that are played."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import count

import pytest

from pdserve.profiling import served_times
from pdserve.profiling.served_times import (
    NUM_LONG_OUTPUT,
    NUM_OUTPUT,
    NUM_PROMPT,
    NUM_REPEATS,
    NUM_ROWS,
    NUM_SHORT_PROMPT,
    NUM_SMALL_PROMPT,
    ServedTimer,
    ServedTimes,
    computed_s,
)

TIMEOUT_S = 20.0


class Played:
    """A router whose answers come at times that were written down: a token every 10 ms, 20 ms where
    others decode, 12 ms while a prompt is computed, in 0.5 s alone and 0.6 s beside an answer. A
    small prompt takes a quarter of it. Mixed nodes have a token every 15 ms while both decode, and
    compute a prompt in 0.4 s alone and 0.7 s beside another: of three prompts the first is alone.

    Each answer takes 1 ms longer than the one before it, so the median is that of the third.
    """

    def __init__(self, *, is_quick: bool = False) -> None:
        self._is_quick = is_quick
        self._numbers, self.long, self.prompts = count(), threading.Event(), count()
        self.has_asked_all = threading.Event()
        self.asked: list[int] = []
        """The lengths of prompts, in order."""
        self.computed_s = 0.0
        self.is_mixed = False
        self.mixed_prompts = count()
        self._lock = threading.Lock()

    def mix(self) -> None:
        self.is_mixed = True

    def _compute(self, seconds: float) -> None:
        with self._lock:
            self.computed_s += seconds

    def __call__(
        self, num_prompt: int, num_output: int, at_s: list[float], on_token: Callable[[], object]
    ) -> float:
        late_s = next(self._numbers) * 1e-3
        self.asked.append(num_prompt)
        if num_output == NUM_LONG_OUTPUT:
            at_s += [100.0 + 0.012 * index for index in range(NUM_LONG_OUTPUT)]
            on_token()
            if not self._is_quick:
                assert self.has_asked_all.wait(TIMEOUT_S)
            return 99.0
        if num_output == 1 and self.is_mixed:
            is_alone = next(self.mixed_prompts) % 3 == 0
            self._compute(0.4 if is_alone else 0.7)
            at_s += [200.5 if is_alone else 200.8]
            return 200.0
        if num_output == 1:
            number = next(self.prompts)
            if number + 1 == NUM_REPEATS:
                self.has_asked_all.set()
            at_s += [100.6 + number + late_s]
            self._compute(0.59)
            return 100.0 + number
        is_several = num_output == 2 * NUM_OUTPUT
        gap_s = 0.02 if is_several else 0.01 + late_s
        if self.is_mixed:
            gap_s = 0.015
        first_s = 50.0 + (late_s if is_several else 0.0)
        at_s += [first_s, *(first_s + 0.1 + gap_s * index for index in range(num_output - 1))]
        compute_s = 0.5 * num_prompt / NUM_PROMPT
        self._compute(compute_s)
        return first_s - compute_s - late_s


def measured(played: Played, lines: list[str]) -> ServedTimes:
    return ServedTimer(played, lines.append, lambda: played.computed_s, played.mix).measure()


def test_medians_are_kept_alone_among_others_and_beside_prompts() -> None:
    lines: list[str] = []
    played = Played()
    streamed, first, second = measured(played, lines)
    short, small, alone, several, beside, both_decode = streamed
    assert {(one.rows, one.beside) for one in (short, small, alone)} == {(1, "")}
    assert (several.rows, several.beside) == (NUM_ROWS, "")
    assert (beside.rows, beside.beside) == (1, "prompts")
    assert (both_decode.rows, both_decode.beside) == (1, "answers")
    assert alone.context - small.context == NUM_PROMPT - NUM_SMALL_PROMPT
    assert short.step_s == pytest.approx(0.017)
    assert small.step_s == pytest.approx(0.018), "without the second token, which waits for KV"
    assert alone.step_s == pytest.approx(0.019)
    assert several.step_s == pytest.approx(0.02)
    assert beside.step_s == pytest.approx(0.012)
    assert both_decode.step_s == pytest.approx(0.015)
    both = NUM_SMALL_PROMPT, NUM_PROMPT
    assert [(one.tokens, one.beside, one.nodes) for one in first] == [
        (NUM_SHORT_PROMPT, "", 1), *((tokens, "", 2) for tokens in both),
        (NUM_PROMPT, "answers", 2), (NUM_PROMPT, "", 1), (NUM_PROMPT, "prompts", 1),
    ]  # fmt: skip
    assert [one.seconds for one in first[:3]] == pytest.approx([0.0695, 0.133, 0.509])
    assert first[3].seconds > 0.6
    assert [one.seconds for one in first[4:]] == pytest.approx([0.5, 0.8])
    assert [one.compute_s for one in first] == pytest.approx([0.0625, 0.125, 0.5, 0.59, 0.4, 0.7])
    assert [one.tokens for one in second] == [*both]
    assert [one.seconds for one in second] == pytest.approx([0.1, 0.1])
    in_turns = [NUM_SHORT_PROMPT, *both] * NUM_REPEATS
    assert played.asked[1 : 1 + len(in_turns)] == in_turns
    assert len(lines) == len(streamed) + len(first) + len(second)


def test_an_answer_that_ends_before_any_prompt_was_computed_beside_it_says_nothing() -> None:
    streamed, first, _ = measured(Played(is_quick=True), [])
    assert {one.beside for one in streamed} == {"", "answers"}
    assert {one.beside for one in first} == {"", "prompts"}


def test_seconds_of_computing_are_those_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pdserve_ttft_stage_seconds"
    text = (
        f'{name}_count{{stage="prefill_compute"}} 7\n{name}_sum{{stage="prefill_queue"}} 1.5\n'
        f'{name}_sum{{stage="prefill_compute"}} 2.25\n'
    )

    @contextmanager
    def opened(url: str, method: str, path: str, *, timeout_s: float) -> Iterator[BytesIO]:
        assert (url, method, path) == ("http://there", "GET", "/metrics")
        yield BytesIO(text.encode())

    monkeypatch.setattr(served_times, "opened", opened)
    assert computed_s("http://there") == 2.25
