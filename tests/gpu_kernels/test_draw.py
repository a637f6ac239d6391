"""The draw on the card against a plain one in float64."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.kernels.draw import draw_slices
from engine.runner.gpu.launcher import KernelSpec

VOCABULARY = 1000
SLICE = 256
NUM_SLICES = -(-VOCABULARY // SLICE)
TYPES = {
    "logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "indices": "*i32",
    "best_scores": "*fp64", "best_tokens": "*i32", "slices": "i32",
}  # fmt: skip
LOW = np.uint64(0xFFFFFFFF)


def words(seed: int, index: int) -> np.ndarray:
    """Return Philox4x32-10's words for all tokens (Salmon et al., 2011)."""
    counter = np.arange(-(-VOCABULARY // 4), dtype=np.uint64)
    zero = np.zeros_like(counter)
    a, b, c, d = counter, zero + np.uint64(index), zero, zero
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    shift = np.uint64(32)
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> shift) ^ b ^ np.uint64(low), second & LOW
        c, d = (first >> shift) ^ d ^ np.uint64(high), first & LOW
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([a, b, c, d], axis=1).reshape(-1)[:VOCABULARY]


def plain_draw(logits: np.ndarray, temperature: np.float32, seed: int, index: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    uniform = (words(seed, index).astype(np.float64) + 0.5) / 2**32
    scores = logits.astype(np.float64) / np.float64(temperature) - np.log(-np.log(uniform))
    return int(scores.argmax())


def drawn(
    logits: np.ndarray, temperatures: np.ndarray, seeds: np.ndarray, indices: np.ndarray
) -> list[int]:
    device, rows = InterpretedDevice(), len(logits)

    def upload(values: np.ndarray) -> int:
        memory = device.allocate(values.nbytes)
        device.upload(memory.address, values.tobytes())
        return memory.address

    scores, tokens = device.allocate(8 * rows * NUM_SLICES), device.allocate(4 * rows * NUM_SLICES)
    constants = {"VOCABULARY": VOCABULARY, "SLICE": SLICE, "IS_PROGRAMMATIC": False}
    InterpretedKernel(KernelSpec(draw_slices, TYPES, constants)).bind(
        (rows, NUM_SLICES), upload(logits), upload(temperatures), upload(seeds), upload(indices),
        scores.address, tokens.address, NUM_SLICES,
    )(0)  # fmt: skip
    found = np.frombuffer(device.download(scores.address, scores.num_bytes))
    best = found.reshape(rows, NUM_SLICES).argmax(axis=1)
    chosen = np.frombuffer(device.download(tokens.address, tokens.num_bytes), np.int32)
    return [int(token) for token in chosen.reshape(rows, NUM_SLICES)[np.arange(rows), best]]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.3, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("scale", [0.0, 4.0, 120.0])
def test_the_drawn_token_is_that_of_float64(temperature: float, scale: float) -> None:
    rng = np.random.default_rng(int(temperature * 100) + int(scale))
    rows = 5
    logits = (rng.standard_normal((rows, VOCABULARY)) * scale).astype(np.float32)
    logits[1, ::2] = -np.inf  # tokens that a grammar excludes
    logits[2, 3:] = -np.inf
    temperatures = np.full(rows, temperature, np.float32)
    seeds, indices = rng.integers(0, 2**62, rows), rng.integers(0, 1000, rows).astype(np.int32)
    expected = [
        plain_draw(logits[row], temperatures[row], int(seeds[row]), int(indices[row]))
        for row in range(rows)
    ]
    assert drawn(logits, temperatures, seeds, indices) == expected


def test_equal_logits_are_drawn_evenly() -> None:
    """Sixty draws of one row: each half of the vocabulary is drawn about as often."""
    rows = 60
    logits = np.zeros((rows, VOCABULARY), np.float32)
    indices = np.arange(rows, dtype=np.int32)
    found = drawn(logits, np.ones(rows, np.float32), np.full(rows, 11), indices)
    assert 15 <= sum(token < VOCABULARY // 2 for token in found) <= 45
    assert len(set(found)) > rows * 0.8


def test_tokens_that_float32_cannot_tell_apart() -> None:
    """Each row has six tokens whose scores are equal but for the rounding of their logits."""
    rng = np.random.default_rng(9)
    rows = 40
    logits = np.full((rows, VOCABULARY), -40.0, np.float32)
    temperatures, seeds = np.ones(rows, np.float32), rng.integers(0, 2**62, rows)
    indices = rng.integers(0, 1000, rows).astype(np.int32)
    for row in range(rows):
        uniform = (words(int(seeds[row]), int(indices[row])).astype(np.float64) + 0.5) / 2**32
        tied = rng.choice(SLICE, 6, replace=False)
        logits[row, tied] = 9.0 + np.log(-np.log(uniform[tied]))
    expected = [
        plain_draw(logits[row], temperatures[row], int(seeds[row]), int(indices[row]))
        for row in range(rows)
    ]
    assert drawn(logits, temperatures, seeds, indices) == expected
