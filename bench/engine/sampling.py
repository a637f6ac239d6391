"""What sampling costs: `python -m bench.engine.sampling --json`.

    v<V>_r<R>.<way>_ms    milliseconds, at the median, to draw one token from each of R rows of
                          logits over a vocabulary of V tokens: `greedy`, `temperature` (0.8),
                          `top_p` (0.95), `top_k` (50), `min_p` (0.05), `penalties` (top-p and a
                          repetition penalty over 202 tokens)

The logits are random, normal with a standard deviation of 3: flatter than a model's, so more tokens
are kept by the filters than usual. The ways take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.drawing.sampler import SampledRows, Sampler, sampled_rows

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
}
_NUM_PROMPT, _OUTPUT = 200, [4, 5]


@dataclass(frozen=True, slots=True)
class Case:
    """The size of a step's logits."""

    vocab_size: int
    num_rows: int

    @property
    def name(self) -> str:
        """The figures' prefix."""
        return f"v{self.vocab_size}_r{self.num_rows}"


CASES = (Case(152_064, 256), Case(49_152, 32))


def rows_of(case: Case, way: str) -> SampledRows:
    """Return rows that are drawn in this way, each with a seed of its own."""
    prompt = list(range(_NUM_PROMPT))
    known = [*prompt, *_OUTPUT]
    entries = [
        ScheduledSequence(
            row,
            known,
            0,
            [0],
            SampleInput(SamplingParams(max_tokens=9, seed=row, **WAYS[way]), 2, prompt, _OUTPUT),
        )
        for row in range(case.num_rows)
    ]
    return sampled_rows(batch_of(entries), case.vocab_size, frozenset())


def measure(case: Case, num_rounds: int) -> dict[str, float]:
    """Return the milliseconds of every way."""
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 3.0, (case.num_rows, case.vocab_size)).astype(np.float32)
    sampler = Sampler(case.vocab_size)
    rows = {way: rows_of(case, way) for way in WAYS}
    spans_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        for way in WAYS:
            began_s = time.perf_counter()
            sampler.draw(logits, rows[way])
            if number:  # the first round loads compiled code
                spans_s[way].append(time.perf_counter() - began_s)
    return {f"{case.name}.{way}_ms": round(1e3 * median(each), 2) for way, each in spans_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What sampling a step's rows costs.")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of every way")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        sys.exit(f"rounds is {arguments.rounds}: wanted at least 1")
    figures: dict[str, float] = {}
    for case in CASES:
        figures |= measure(case, arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, milliseconds in figures.items():
        print(f"{name:28} {milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
