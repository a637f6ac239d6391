"""The device's sampler draws the host's tokens on the same logits, bit for bit, with one read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput
from engine.runner.drawing.device_noise import DeviceNoise
from engine.runner.drawing.device_sampler import DeviceSampler
from engine.runner.drawing.sampler import Sampler
from engine.runner.kernels.sampling.philox import philox_blocks
from engine.runner.paddle_import import paddle
from tests.unit.sampler.draws import draw_all

EOS = frozenset({3})
VOCAB_SIZES = [5, 40, 900, 6000]
SHAPES = ["normal", "peaked", "ties", "flat"]


def logits_of(shape: str, num_rows: int, vocab_size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((num_rows, vocab_size))
    if shape == "peaked":
        values = np.cumsum(np.sort(values, axis=1), axis=1) / vocab_size**0.5
        values = random.permuted(values, axis=1)
    elif shape == "ties":
        values = np.round(values * 4) / 2
    elif shape == "flat":
        values = values * 1e-3
    return values.astype(np.float32)


def inputs_of(num_rows: int, vocab_size: int, seed: int) -> list[SampleInput]:
    random = np.random.default_rng(seed)

    def one() -> SampleInput:
        has_penalties = random.random() < 0.4
        params = SamplingParams(
            max_tokens=50,
            temperature=float(random.choice([0.0, 0.3, 0.8, 1.0, 2.0])),
            top_k=int(random.choice([0, 0, 1, 5, 40, 700])),
            top_p=float(random.choice([1.0, 1.0, 0.95, 0.5, 0.05])),
            min_p=float(random.choice([0.0, 0.0, 0.02, 0.4, 1.0])),
            repetition_penalty=float(random.choice([0.8, 1.0, 1.3])) if has_penalties else 1.0,
            frequency_penalty=float(random.choice([0.0, 0.4])) if has_penalties else 0.0,
            presence_penalty=float(random.choice([0.0, -0.7])) if has_penalties else 0.0,
            seed=int(random.integers(0, 2**63)),
            stop_token_ids=(1, 4),
            min_tokens=int(random.choice([0, 30])),
        )
        prompt = random.integers(0, vocab_size, 30).tolist()
        output = random.integers(0, vocab_size, int(random.integers(0, 20))).tolist()
        return SampleInput(params, len(output), prompt, output)

    return [one() for _ in range(num_rows)]


def host_tokens(logits: np.ndarray, inputs: Sequence[SampleInput]) -> list[int | None]:
    return draw_all(Sampler(logits.shape[1]), logits, inputs, EOS)


def device_tokens(logits: np.ndarray, inputs: Sequence[SampleInput]) -> list[int | None]:
    sampler = DeviceSampler(logits.shape[1], EOS)
    width = sampler.width(inputs)
    found = sampler.find(paddle.to_tensor(logits), inputs, width).numpy()
    return [sampler.draw(row, width, one) for row, one in zip(found, inputs, strict=True)]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_every_drawn_token_is_the_hosts(vocab_size: int, shape: str, seed: int) -> None:
    logits = logits_of(shape, 120, vocab_size, seed)
    inputs = inputs_of(120, vocab_size, seed)
    wanted, found = host_tokens(logits, inputs), device_tokens(logits, inputs)
    left = [row for row, token in enumerate(found) if token is None]
    assert [w for w, f in zip(wanted, found, strict=True) if f is not None] == [
        f for f in found if f is not None
    ]
    if vocab_size <= 40:
        # The head is the whole row: nothing is left but what nobody can draw from.
        assert all(wanted[row] is None for row in left)
    elif shape == "peaked":
        assert [inputs[row].params.top_k for row in left].count(700) >= len(left) - 1


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_common_requests_need_no_whole_row(shape: str) -> None:
    """Greedy, with a temperature alone, and with usual filters over a steep distribution."""
    params = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=1.0, seed=5),
        SamplingParams(max_tokens=9, temperature=0.7, seed=6, repetition_penalty=1.1),
        SamplingParams(max_tokens=9, temperature=0.8, top_k=50, top_p=0.95, seed=7),
    ]
    inputs = [SampleInput(params[i % 4], i, [1, 2], [5] * (i % 3)) for i in range(200)]
    logits = logits_of(shape, 200, 6000, 1)
    if shape == "ties":  # of bfloat16, not of everything
        logits = paddle.to_tensor(logits_of("peaked", 200, 6000, 1)).astype("bfloat16")
        logits = logits.astype("float32").numpy()
    found = device_tokens(logits, inputs)
    assert found == host_tokens(logits, inputs) or found.count(None) <= 4
    assert [t for t in found if t is not None] == [
        w for w, f in zip(host_tokens(logits, inputs), found, strict=True) if f is not None
    ]


def test_a_row_is_drawn_alike_with_other_rows_beside_it() -> None:
    logits, inputs = logits_of("peaked", 20, 900, 4), inputs_of(20, 900, 4)
    together = device_tokens(logits, inputs)
    for row in range(20):
        [alone] = device_tokens(logits[row : row + 1], inputs[row : row + 1])
        assert alone is None or together[row] is None or alone == together[row]


def test_rows_that_hold_no_numbers_are_left_to_the_host() -> None:
    logits = logits_of("normal", 4, 900, 1)
    logits[1, 5], logits[2, 7] = np.nan, np.inf
    inputs = [SampleInput(SamplingParams(max_tokens=3, temperature=t), 0, [], []) for t in (0, 1)]
    found = device_tokens(logits, [*inputs, *inputs])
    assert found[1] is found[2] is None
    assert found[0] is not None
    assert found[3] is not None


def test_rows_with_log_probabilities_are_left_to_the_host() -> None:
    logits = logits_of("peaked", 2, 900, 1)
    one = SampleInput(SamplingParams(max_tokens=3, temperature=1.0, logprobs=2), 0, [], [])
    plain = replace(one, params=replace(one.params, logprobs=None))
    assert device_tokens(logits, [one, plain])[0] is None
    assert device_tokens(logits, [one, plain])[1] is not None


def test_noise_is_that_of_the_host() -> None:
    noise = DeviceNoise()
    seeds, indices = [0, 2**63 + 17, 2**64 - 1], [0, 5, 2**20]
    words = noise.words(seeds, indices, 50).numpy()
    values = noise.rows(seeds, indices, 199).numpy()
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        blocks = np.empty((4, 50), np.uint32)
        philox_blocks(blocks, 0, index, np.uint64(seed))
        np.testing.assert_array_equal(words[row], blocks.T.reshape(-1))
        wanted = -np.log(-np.log((words[row][:199] + 0.5) * 2.0**-32))
        np.testing.assert_allclose(values[row], wanted, rtol=1e-12)
