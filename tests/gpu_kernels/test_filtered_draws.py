"""Draws under top-k, top-p and min-p on the card against the host's sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput
from engine.runner.drawing.sampler import Sampler
from engine.runner.gpu.filter_launches import LEFT_TO_HOST
from tests.gpu.drawn_rows import WAY, DrawnRows
from tests.gpu_kernels.tiny_decoder import SPEC
from tests.support.models.draws import draw_all, rows_of

VOCABULARY = 5000
"""Three slices, the last one not a whole one."""
MOST_ROWS = 64
TOP_KS = (0, 1, 2, 20, 1000, VOCABULARY)
TOP_PS = (1.0, 1e-9, 0.1, 0.8, 0.95, 0.999999)
MIN_PS = (0.0, 0.05, 1.0)
TEMPERATURES = (0.01, 0.5, 1.0, 5.0)


@pytest.fixture(scope="module")
def card() -> DrawnRows:
    spec = replace(SPEC, vocab_size=VOCABULARY)
    return DrawnRows(InterpretedDevice(), InterpretedKernel, spec, MOST_ROWS, 0)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(VOCABULARY)


def inputs_of(rng: np.random.Generator, params: list[SamplingParams]) -> list[SampleInput]:
    """Rows with random seeds and indices."""
    seeds = rng.integers(0, 2**64, len(params), np.uint64)
    return [
        SampleInput(replace(one, seed=int(seed)), int(rng.integers(0, 100_000)), [], [])
        for one, seed in zip(params, seeds, strict=True)
    ]


def way(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **given)


def drawn(card: DrawnRows, logits: np.ndarray, inputs: list[SampleInput]) -> list[int]:
    """Return the tokens of the card."""
    rows = rows_of(inputs, VOCABULARY)
    ways = np.zeros(len(inputs), WAY)
    for name in WAY.names or ():
        ways[name] = rows.ways[name]
    return card.drawn(logits, ways, rows.output_indices.astype(np.int32))


def logits_of(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    values = rng.standard_normal((count, VOCABULARY))
    if kind == "withheld":
        values[:, rng.permutation(VOCABULARY)[: VOCABULARY // 2]] = -np.inf
    scale = {"peaked": 8.0, "ties": 3.0, "flat": 0.3, "withheld": 5.0}[kind]
    return np.asarray(np.round(values * scale) if kind == "ties" else values * scale, np.float32)


def require_hosts(
    card: DrawnRows, sampler: Sampler, logits: np.ndarray, inputs: list[SampleInput]
) -> list[int]:
    """Check the card's tokens against the host's; return the rows that were left to the host."""
    found = drawn(card, logits, inputs)
    # The host takes infinity for a bug, and gets what stands for a withheld token there.
    expected = draw_all(sampler, np.maximum(logits, np.float32(-1e30)), inputs)
    left = [row for row, token in enumerate(found) if token == LEFT_TO_HOST]
    for row, token in enumerate(found):
        assert token in (expected[row], LEFT_TO_HOST), (row, inputs[row].params, token)
    return left


@pytest.mark.parametrize("kind", ["peaked", "ties", "flat", "withheld"])
def test_the_drawn_token_is_that_of_the_host(card: DrawnRows, sampler: Sampler, kind: str) -> None:
    """Every top-k with half of the values of top-p; min-p and temperatures at random."""
    rng = np.random.default_rng(len(kind))
    params = [
        way(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
        for number, top_k in enumerate(TOP_KS)
        for top_p in TOP_PS[number % 2 :: 2]
        for min_p, temperature in [(MIN_PS[rng.integers(3)], TEMPERATURES[rng.integers(4)])]
    ]
    inputs = inputs_of(rng, params)
    left = require_hosts(card, sampler, logits_of(rng, kind, len(inputs)), inputs)
    print(kind, len(inputs), [params[i] for i in left])
