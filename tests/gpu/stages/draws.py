"""Draws under filters: the tokens of a plain draw, and what the draws of a step take."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.core.sequences.seats import SAMPLING_COLUMNS
from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.gpu.drawing.filter_launches import LEFT_TO_HOST
from engine.runner.grammars.allowed_tokens import AllowedTokens
from tests.gpu.drawn_rows import WAY, DrawnRows, plain_draw
from tests.gpu.edited_rows import Pair, logits_for, mixed, rows_behind
from tests.gpu.stages.model import QWEN3_8B, Checks, Findings

_VOCABULARY = QWEN3_8B.vocab_size
_COUNTS = (1, 8, 32, 128)
_MOST_ROWS = _COUNTS[-1]
_COMPARED_ROWS = 250
_REPEATS = 9
_FEW = 1000
"""A row that keeps so few tokens, and whose list they almost fill, is drawn on the card."""
_SCALES = {"peaked": 6.0, "middling": 3.5, "flat": 1.0, "ties": 4.0, "masked": 6.0}
"""Standard deviations of logits; those of `ties` are whole numbers."""
_WITHHELD = np.float32(-1e30)
_FILTERED = (0.8, 20, 0.95, 0.0)
_LONG = (1.0, 1000, 1.0, 0.0)


def draws(card: Any, found: Findings) -> None:
    """Tokens under filters at 152,000 tokens, and the time of a step's draws."""
    rows = DrawnRows(card.device, card.kernel, QWEN3_8B, _MOST_ROWS, card.stream)
    rows.launches(_MOST_ROWS, with_filters=True)
    pair = Pair(card.device, card.kernel, QWEN3_8B, _MOST_ROWS, card.stream)
    pair.card.bind_all()
    if not card.is_real:
        return
    rng = np.random.default_rng(4)
    checks = Checks()
    with checks.check("edited draws"):
        found["edited_draws_compared"] = _compare_edited(pair, rng)
        print("edited draws:", found["edited_draws_compared"], flush=True)
    with checks.check("draws"):
        found["draws_compared"] = _compare(rows, rng)
        print("draws:", found["draws_compared"], flush=True)
    _time(card, rows, rng, found.setdefault("draws", {}))
    rows.close()
    checks.end()


def _logits(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    values = rng.standard_normal((count, _VOCABULARY), np.float32) * np.float32(_SCALES[kind])
    return np.round(values) if kind == "ties" else values


def _half(rng: np.random.Generator, count: int) -> AllowedTokens:
    """Return a mask of half of the tokens for each row."""
    num_words = -(-_VOCABULARY // 32)
    masks = rng.integers(-(2**31), 2**31, (count, num_words)).astype(np.int32)
    return AllowedTokens(np.arange(count), masks)


def _compare_edited(pair: Pair, rng: np.random.Generator) -> int:
    """Return how many rows under penalties and biases, or with log probabilities, are the host's;
    raise for one that is not, or that is another one alone.
    """
    compared = 0
    for digits in (1, 5):
        entries = mixed(rng, _VOCABULARY)
        sampled = rows_behind(entries, _VOCABULARY)
        logits = logits_for(rng, sampled, digits=digits, vocab_size=_VOCABULARY)
        together = pair.require_equal(logits, sampled)
        one = int(rng.integers(len(entries)))
        alone = pair.on_card(
            logits[one : one + 1], rows_behind(entries[one : one + 1], _VOCABULARY)
        )
        assert alone.token_ids == together.token_ids[one : one + 1], one
        assert alone.logprobs.get(0) == together.logprobs.get(one), one
        compared += len(entries)
    return compared


def _ways(rng: np.random.Generator, count: int) -> np.ndarray:
    ways = np.zeros(count, WAY)
    ways["temperature"] = rng.choice([0.01, 0.3, 0.8, 1.0, 1.5, 5.0], count)
    ways["top_k"] = rng.choice([0, 1, 2, 20, 1000], count)
    ways["top_p"] = rng.choice([1e-9, 0.1, 0.8, 0.95, 0.999999, 1.0], count)
    ways["min_p"] = rng.choice([0.0, 0.0, 0.05, 1.0], count)
    ways["seed"] = rng.integers(0, 2**64, count, np.uint64)
    return ways


def _compare(rows: DrawnRows, rng: np.random.Generator) -> dict[str, dict[str, int]]:
    """Return how many rows of each kind were drawn on the card and left; raise for a wrong one."""
    outcomes: dict[str, Counter[str]] = {}
    for kind in _SCALES:
        count = _COMPARED_ROWS // len(_SCALES)
        logits, ways = _logits(rng, count, kind), _ways(rng, count)
        indices = rng.integers(0, 100_000, count).astype(np.int32)
        allowed = _half(rng, count) if kind == "masked" else None
        found = rows.drawn(logits, ways, indices, allowed)
        if allowed is not None:
            bits = np.unpackbits(allowed.masks.view(np.uint8), axis=1, bitorder="little")
            logits[bits[:, :_VOCABULARY] == 0] = _WITHHELD
        outcomes[kind] = Counter()
        for row, token in enumerate(found):
            plain = plain_draw(logits[row], ways[row], int(indices[row]))
            is_left = token == LEFT_TO_HOST
            assert is_left or token == plain.token, (kind, row, ways[row], token, plain.token)
            is_few = kind in ("peaked", "masked") and plain.num_listed <= _FEW
            assert not (is_left and is_few), (kind, row, ways[row], plain.num_listed)
            outcomes[kind]["left to the host" if is_left else "drawn on the card"] += 1
        one = int(rng.integers(count))
        alone = rows.drawn(logits[one : one + 1], ways[one : one + 1], indices[one : one + 1])
        assert alone == found[one : one + 1], (kind, one, alone)
    return {kind: dict(counted) for kind, counted in outcomes.items()}


def _time(card: Any, rows: DrawnRows, rng: np.random.Generator, results: dict[str, Any]) -> None:
    logits = _logits(rng, _MOST_ROWS, "middling")
    card.device.upload_array(rows.memory["logits"], logits)
    for count in _COUNTS:
        timed: dict[str, float] = {}
        for name, way in (
            ("greedy", (0.0, 0, 1.0, 0.0)), ("temperature", (0.8, 0, 1.0, 0.0)),
            ("filtered", _FILTERED), ("1,000 kept", _LONG),
        ):  # fmt: skip
            ways = np.zeros(count, WAY)
            for column, value in zip(WAY.names or (), way, strict=False):
                ways[column] = value
            ways["seed"] = np.arange(count)
            indices = np.arange(count, dtype=np.int32)
            has_filters = name in ("filtered", "1,000 kept")
            launches = rows.launches(count, with_filters=has_filters)
            rows.put(ways, indices)
            timed[f"{name}, kernels"] = card.graph_milliseconds(launches, 10)

            def step(ways: np.ndarray = ways, indices: np.ndarray = indices,
                     launches: Any = launches) -> None:  # fmt: skip
                rows.put(ways, indices)
                for launch in launches:
                    launch(card.stream)
                card.device.synchronize(card.stream)

            timed[f"{name}, whole"] = _median_ms(step)
        timed |= _host_ms(card, rows, count)
        results[f"{count}"] = {name: round(ms, 4) for name, ms in timed.items()}
        print(f"draws of {count}: {results[f'{count}']}", flush=True)


def _host_ms(card: Any, rows: DrawnRows, count: int) -> dict[str, float]:
    """Return what rows take that are drawn on the host: their way there, and the draw."""
    size = 4 * _VOCABULARY
    pinned = card.device.allocate_pinned(count * size)
    begin = rows.memory["logits"]

    def one_by_one() -> None:
        for row in range(count):
            card.device.download(begin + row * size, size)

    def together() -> None:
        card.device.copy(pinned.address, begin, count * size, card.stream)
        card.device.synchronize(card.stream)

    found = {
        "downloads, one by one": _median_ms(one_by_one), "download, pinned": _median_ms(together)
    }  # fmt: skip
    logits = pinned.host_bytes().view(np.float32).reshape(count, _VOCABULARY)
    found["host's sampler"] = _median_ms(_sampler(logits))
    pinned.close()
    return found


def _sampler(logits: np.ndarray) -> Callable[[], object]:
    count, none = len(logits), np.zeros(len(logits) + 1, np.int64)
    ways = np.zeros(count, SAMPLING_COLUMNS)
    for column, value in zip(WAY.names or (), _FILTERED, strict=False):
        ways[column] = value
    ways["repetition_penalty"], ways["num_logprobs"] = 1.0, -1
    ways["seed"] = np.arange(count)
    sampled = SampledRows(
        ways, np.arange(count), np.zeros((count, 1), np.int32), np.arange(count), none[1:],
        none[1:], none, none[:0],
    )  # fmt: skip
    sampler = Sampler(_VOCABULARY)
    return lambda: sampler.draw(logits, sampled)


def _median_ms(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)
