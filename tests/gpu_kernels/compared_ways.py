"""The rows of a prompt in whatever way a runner computes them, beside a reference.

It is imported behind `interpreted_runner`, which puts Triton into its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.runner.model_runner import ModelRunner
from tests.support.models.reference_decoder import reference_logits
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import prompt_of

PROMPT = prompt_of(60)
TABLE, OTHERS = [5, 3, 1, 9], [6, 7, 8, 12]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def computed(runner: ModelRunner, *cuts: int) -> list[np.ndarray]:
    """Return the logits after the prompt's beginnings that end at `cuts`, and after all of it."""
    found = []
    for start, end in pairwise([0, *cuts, len(PROMPT)]):
        found += list(logits_of(runner, scheduled(PROMPT[start:end], start, TABLE)))
    return found


def drafted(tokens: Sequence[int], start: int, table: Sequence[int]) -> ScheduledSequence:
    """A sequence's last token, and drafts behind it."""
    sample = SampleInput(GREEDY, 0, PROMPT[: start + 1], [])
    return ScheduledSequence(0, tokens, start, table, sample, num_drafts=len(tokens) - 1)


def compare_ways(
    runner: ModelRunner, config: dict[str, Any], values: dict[str, np.ndarray]
) -> float:
    """Compare rows in chunks cut anywhere, single ones, some beside others, and drafts.

    The runner verifies 3 drafts. Returns the median of the rows' errors beside float64.
    """
    [whole] = computed(runner)
    *_, alone = singles = computed(runner, 17, 56, 57, 58, 59)
    assert np.array_equal(alone, whole)
    mine, other = scheduled(PROMPT[53:], 53, TABLE), scheduled(prompt_of(20, 4), 0, OTHERS)
    assert np.array_equal(logits_of(runner, other, mine)[1], whole)
    drafts = [drafted(PROMPT[56:], 56, TABLE), drafted([7, 8], 20, OTHERS)]
    assert np.array_equal(logits_of(runner, *drafts)[:4], singles[-4:])
    exact = reference_logits(config, values, PROMPT)[[16, *range(55, 60)]]
    errors = np.linalg.norm(singles - exact, axis=1) / np.linalg.norm(exact, axis=1)
    return float(np.median(errors))
