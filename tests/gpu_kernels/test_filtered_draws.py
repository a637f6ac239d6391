"""Draws under top-k, top-p and min-p on the card against the host's sampler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numba
import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput
from engine.runner.drawing.sampler import Sampler
from engine.runner.gpu.drawing.filter_launches import LEFT_TO_HOST
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.kernels.sampling.top_p_weights import write_weights
from tests.gpu.drawn_rows import WAY, DrawnRows, exponentials, plain_draw
from tests.gpu.kernels import exponentials_of
from tests.gpu_kernels.checked_launch import programs_in
from tests.gpu_kernels.tiny_decoder import SPEC
from tests.support.models.draws import draw_all, rows_of

VOCABULARY = 5000
"""Three slices, the last one not a whole one."""
MOST_ROWS = 64
TOP_KS = (0, 1, 2, 20, 1000, VOCABULARY)
TOP_PS = (1.0, 1e-9, 0.1, 0.8, 0.95, 0.999999)
MIN_PS = (0.0, 0.05, 1.0)
TEMPERATURES = (0.01, 0.5, 1.0, 5.0)


def new_card(garbage: int = 0xFF) -> DrawnRows:
    """Memory has this byte where nobody has written."""
    spec = replace(SPEC, vocab_size=VOCABULARY)
    return DrawnRows(InterpretedDevice(garbage=garbage), InterpretedKernel, spec, MOST_ROWS, 0)


@pytest.fixture(scope="module")
def card() -> DrawnRows:
    return new_card()


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


def ways_of(inputs: list[SampleInput]) -> tuple[np.ndarray, np.ndarray]:
    """Return how rows are drawn, and the indices of their draws, as the card takes them."""
    rows = rows_of(inputs, VOCABULARY)
    ways = np.zeros(len(inputs), WAY)
    for name in WAY.names or ():
        ways[name] = rows.ways[name]
    return ways, rows.output_indices.astype(np.int32)


def drawn(card: DrawnRows, logits: np.ndarray, inputs: list[SampleInput]) -> list[int]:
    """Return the tokens of the card."""
    return card.drawn(logits, *ways_of(inputs))


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


@pytest.mark.parametrize("order", ["reversed", 1])
def test_neither_the_order_of_programs_nor_what_memory_held_decides(
    card: DrawnRows, order: str | int
) -> None:
    """A row's slices list their tokens in any order."""
    rng = np.random.default_rng(8)
    params = [
        way(temperature=0.8, **one) for one in ({"top_p": 0.9}, {"top_k": 900}, {}, {"min_p": 0.1})
    ]
    inputs = inputs_of(rng, params)
    logits = logits_of(rng, "peaked", len(inputs))
    expected = drawn(card, logits, inputs)
    with programs_in(order):
        assert drawn(new_card(garbage=0x7F), logits, inputs) == expected


@pytest.mark.parametrize("kind", ["peaked", "ties", "flat", "withheld"])
def test_the_drawn_token_is_that_of_the_host(card: DrawnRows, sampler: Sampler, kind: str) -> None:
    """Every top-k with every top-p; min-p and temperatures at random."""
    rng = np.random.default_rng(len(kind))
    params = [
        way(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
        for top_k, top_p in product(TOP_KS, TOP_PS)
        for min_p, temperature in [(MIN_PS[rng.integers(3)], TEMPERATURES[rng.integers(4)])]
    ]
    inputs = inputs_of(rng, params)
    logits = logits_of(rng, kind, len(inputs))
    for row in require_hosts(card, sampler, logits, inputs):
        one = inputs[row].params
        assert kind in ("flat", "ties"), one
        assert one.top_k in (0, 1000, VOCABULARY) or one.top_p < 1.0, one


def test_rows_of_all_kinds_are_drawn_beside_each_other(card: DrawnRows, sampler: Sampler) -> None:
    """A row's token is the one that it has alone; filters leave other rows' tokens as they are."""
    rng = np.random.default_rng(3)
    params = [
        way(temperature=0.0, top_k=5), way(top_k=5), way(), way(top_p=0.9), way(temperature=0.0),
        way(min_p=0.2, temperature=2.0),
    ]  # fmt: skip
    inputs = inputs_of(rng, params)
    logits = logits_of(rng, "peaked", len(inputs))
    assert require_hosts(card, sampler, logits, inputs) == []
    together = drawn(card, logits, inputs)
    for row in range(len(inputs)):
        assert drawn(card, logits[row:][:1], inputs[row:][:1]) == [together[row]]


def test_rows_without_a_finite_logit_are_not_drawn(card: DrawnRows) -> None:
    rng = np.random.default_rng(4)
    logits = logits_of(rng, "peaked", 5)
    logits[0, 3], logits[1, VOCABULARY - 1], logits[2, 2500] = np.nan, np.nan, np.inf
    logits[3] = -np.inf
    found = drawn(card, logits, inputs_of(rng, [way(top_k=5)] * 5))
    assert found[:4] == [-1, -1, -1, LEFT_TO_HOST]
    assert 0 <= found[4] < VOCABULARY


def test_what_the_card_cannot_decide_is_left_to_the_host(card: DrawnRows) -> None:
    """Too many kept tokens; a cut at which the order of sums decides, by ties or next to 1."""
    rng = np.random.default_rng(5)
    logits = np.full((4, VOCABULARY), -40.0, np.float32)
    logits[0] = logits_of(rng, "flat", 1)
    logits[1:, 7:11] = 3.0
    params = [way(top_p=0.95), way(top_p=0.5), way(top_p=1 - 1e-13), way(top_p=0.6)]
    found = drawn(card, logits, inputs_of(rng, params))
    assert found[:3] == [LEFT_TO_HOST] * 3
    assert found[3] in (7, 8, 9)


def test_tokens_at_the_cut_of_equal_logits(card: DrawnRows, sampler: Sampler) -> None:
    """The lowest ids are kept, in and across slices."""
    rng = np.random.default_rng(6)
    count = 24
    logits = np.full((count, VOCABULARY), -30.0, np.float32)
    for row in range(count):
        logits[row, rng.permutation(VOCABULARY)[:9]] = 1.0
    params = [way(top_k=row % 8 + 1, temperature=5.0) for row in range(count)]
    inputs = inputs_of(rng, params)
    assert require_hosts(card, sampler, logits, inputs) == []
    for row, token in enumerate(drawn(card, logits, inputs)):
        assert token in np.flatnonzero(logits[row] == 1.0)[: row % 8 + 1]


def test_weights_are_those_of_the_host_to_the_bit() -> None:
    rng = np.random.default_rng(7)
    depths = np.concatenate(
        [
            rng.uniform(0, 20, 3000), rng.uniform(80, 110, 800), 10.0 ** rng.uniform(-9, 2, 290),
            [0.0, 103.97208404541015625, 104.0, 1e30, np.inf, 86.0],
        ]
    ).astype(np.float32)  # fmt: skip
    expected, found = np.empty_like(depths), np.empty_like(depths)
    _compiled_write(depths, expected)
    x = -depths
    types = {"x": "*fp32", "out": "*fp32"}
    kernel = InterpretedKernel(KernelSpec(exponentials_of, types, {"SIZE": len(depths)}))
    kernel.bind((1,), x.ctypes.data, found.ctypes.data)(0)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert np.array_equal(exponentials(x).view(np.int32), expected.view(np.int32))


def _write_weights(depths: np.ndarray, weights: np.ndarray) -> None:
    write_weights(depths.ctypes.data, weights.ctypes.data, len(depths) // 16)


_compiled_write: Any = numba.njit(_write_weights)


def test_the_plain_draw_of_measurements_is_that_of_the_host(sampler: Sampler) -> None:
    rng = np.random.default_rng(8)
    params = [
        way(top_k=top_k, top_p=top_p, min_p=float(rng.choice(MIN_PS)),
            temperature=float(rng.choice([0.0, *TEMPERATURES])))
        for top_k in TOP_KS for top_p in TOP_PS
    ]  # fmt: skip
    inputs = inputs_of(rng, params)
    ways, indices = ways_of(inputs)
    for kind in ("peaked", "flat"):
        logits = logits_of(rng, kind, len(inputs))
        tokens = [
            plain_draw(logits[row], ways[row], indices[row]).token for row in range(len(inputs))
        ]
        assert tokens == draw_all(sampler, logits, inputs)
