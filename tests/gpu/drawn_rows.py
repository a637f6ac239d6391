"""Draws of given logits through the launches of a step, and what they must be, in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from common.request import GREEDY_BELOW
from engine.runner.gpu.drawing.filter_launches import (
    bind_filters,
    buffer_sizes,
    filtered_draw,
    has_filters,
    put_filters,
    staged_filters,
)
from engine.runner.gpu.drawing.mask_launches import bind_masks, put_masks, staged_masks
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape, Launches
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.weights.spec.model_spec import DecoderSpec

WAY = np.dtype(
    [
        ("temperature", np.float64), ("top_k", np.int64), ("top_p", np.float64),
        ("min_p", np.float64), ("seed", np.uint64),
    ]
)  # fmt: skip
"""The columns of `seats.SAMPLING_COLUMNS` that a draw on the card looks at."""


class DrawnRows:
    """Memory for the draws of up to `most_rows` rows, and their launches."""

    def __init__(
        self, device: Any, make_kernel: Callable[[KernelSpec], Any], spec: DecoderSpec,
        most_rows: int, stream: int,
    ) -> None:  # fmt: skip
        nothing: Any = None
        self.make = Launches(
            make_kernel, device.properties, spec, nothing, nothing, AttentionShape()
        )
        self._device, self.stream, self.vocab_size = device, stream, spec.vocab_size
        slices = self.make.num_slices
        self.memory = StepMemory(
            device,
            {
                "logits": 4 * most_rows * spec.vocab_size, "best_scores": 8 * most_rows * slices,
                "best_tokens": 4 * most_rows * slices, "tokens": 4 * most_rows,
                **buffer_sizes(most_rows, slices),
            },
        )  # fmt: skip
        shapes = {"temperatures": (most_rows,), "seeds": (most_rows, 2), "indices": (most_rows,)}
        shapes |= staged_filters(most_rows) | staged_masks(most_rows, spec.vocab_size)
        self.staging = Staging(device, shapes)

    def put(
        self, ways: np.ndarray, indices: np.ndarray, allowed: AllowedTokens | None = None
    ) -> None:
        """Send how rows are drawn: an array of `WAY`, the indices of the draws, and masks."""
        is_greedy = ways["temperature"] < GREEDY_BELOW
        is_filtered = has_filters(ways, self.vocab_size) & ~is_greedy
        shown = np.where(is_greedy | is_filtered, 0.0, ways["temperature"]).astype(np.float32)
        self.staging.wait()
        self.staging.put("temperatures", shown.view(np.int32))
        seeds = np.ascontiguousarray(ways["seed"])
        self.staging.put("seeds", seeds.view(np.int32).reshape(-1, 2))
        self.staging.put("indices", indices)
        put_filters(self.staging, ways, is_filtered, self.vocab_size)
        if allowed is None:
            self.staging.put("mask_rows", np.full(len(ways), -1))
        else:
            put_masks(self.staging, allowed)
        self.staging.send(self.stream)

    def launches(self, num_rows: int, *, with_filters: bool) -> list[Callable[[int], None]]:
        """Return the launches of a step's draws."""
        memory, staging = self.memory, self.staging
        best = (memory["best_scores"], memory["best_tokens"])
        ways = (staging["temperatures"], staging["seeds"], staging["indices"])
        find, choose = self.make.draw_rows(memory["logits"], ways, best, memory["tokens"], num_rows)
        if not with_filters:
            return [find, choose]
        draw = filtered_draw(staging, memory["logits"], seeds=ways[1], indices=ways[2], best=best)
        masks = bind_masks(self.make, memory["logits"], staging, num_rows)
        return [masks, find, *bind_filters(self.make, draw, memory, num_rows), choose]

    def drawn(
        self, logits: np.ndarray, ways: np.ndarray, indices: np.ndarray,
        allowed: AllowedTokens | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the tokens of rows, -1 and -2 where there is none."""
        self._device.upload_array(self.memory["logits"], np.ascontiguousarray(logits, np.float32))
        self.put(ways, indices, allowed)
        for launch in self.launches(len(logits), with_filters=True):
            launch(self.stream)
        self._device.synchronize(self.stream)
        raw = self._device.download(self.memory["tokens"], 4 * len(logits))
        return [int(token) for token in np.frombuffer(raw, np.int32)]

    def close(self) -> None:
        """Free memory and staging."""
        self.staging.close()
        self.memory.close()


class Plain(NamedTuple):
    """What was drawn, and of how many tokens the filters have to look at the ranks."""

    token: int
    num_listed: int


def plain_draw(logits: np.ndarray, way: np.void, index: int) -> Plain:
    """Return what the host draws from a row, by sorting and adding all of its tokens."""
    if way["temperature"] < GREEDY_BELOW:
        return Plain(int(logits.argmax()), 1)
    depths = (logits.max() - logits) / np.float32(way["temperature"])
    kept = np.argsort(depths, kind="stable")
    num_listed = len(kept)
    has_top_k = 0 < way["top_k"] < len(kept)
    if has_top_k:
        kept = kept[: int(way["top_k"])]
        num_listed = len(kept)
    if way["top_p"] < 1.0:
        reached = np.cumsum(exponentials(-depths[kept]), dtype=np.float64)
        before = np.concatenate(([-1.0], reached[:-1]))
        kept = kept[before < way["top_p"] * reached[-1]]
        num_listed = num_listed if has_top_k else len(kept)
    if way["min_p"] > 0.0:
        kept = kept[depths[kept].astype(np.float64) <= -math.log(way["min_p"])]
        num_listed = num_listed if has_top_k and way["top_p"] < 1.0 else len(kept)
    kept = np.sort(kept)
    uniform = (philox_words(kept, int(way["seed"]), index).astype(np.float64) + 0.5) / 2**32
    scores = -np.log(-np.log(uniform)) - depths[kept].astype(np.float64)
    return Plain(int(kept[scores.argmax()]), num_listed)


def philox_words(tokens: np.ndarray, seed: int, index: int) -> np.ndarray:
    """Return Philox4x32-10's words of tokens (Salmon et al., 2011), uint64 `[tokens]`."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a = tokens.astype(np.uint64) // np.uint64(4)
    b, c, d = np.full_like(a, index), np.zeros_like(a), np.zeros_like(a)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> shift) ^ b ^ np.uint64(low), second & mask
        c, d = (first >> shift) ^ d ^ np.uint64(high), first & mask
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    words: np.ndarray = np.choose(tokens % 4, [a, b, c, d])
    return words


def exponentials(x: np.ndarray) -> np.ndarray:
    """Return e^x of float32 values up to 0 as the host's filters compute it, in float32."""
    wide, one = np.float64, np.float32

    def fused(a: np.ndarray, b: Any, c: Any) -> np.ndarray:
        found: np.ndarray = (a.astype(wide) * np.asarray(b, wide) + np.asarray(c, wide)).astype(one)
        return found

    inside = np.maximum(x, one(-103.97208404541015625))
    n = (inside * one(1.4426950408889634) + one(12582912.0)) - one(12582912.0)
    r = fused(n, one(-6.93145752e-1), inside)
    r = fused(n, one(-1.42860677e-6), r)
    above = np.full_like(x, 5.082762527590693718096e-04)
    below = np.full_like(x, 2.159509375685829852307e-02)
    for number in (
        6.757896990527504603057e-03, 5.114512081637298353406e-02, 2.473615434895520810817e-01,
        7.257664613233124478488e-01, 9.999999999980870924916e-01,
    ):  # fmt: skip
        above = fused(above, r, one(number))
    for number in (-2.742335390411667452936e-01, 1.0):
        below = fused(below, r, one(number))
    first = np.maximum(n, -126)
    value = (above / below) * np.exp2(n - first).astype(one) * np.exp2(first).astype(one)
    return np.where(x < one(-103.97208404541015625), one(0), value)
