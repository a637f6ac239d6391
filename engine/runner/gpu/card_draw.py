"""Draws on the card, for the rows whose token needs a temperature and filters alone.

All rows of a step are drawn in two launches, and four more where one is under filters; their tokens
are read at once, four bytes a row. Rows under penalties, grammars or other rules, those with log
probabilities, and those that the filters leave are drawn on the host from their own logits. A row's
way depends on its own request and logits alone, and it draws the same token either way.
"""

from __future__ import annotations

import numpy as np

from common.request import GREEDY_BELOW
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.host_draw import add_draws
from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.drawing.verification import Draws
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.decoder import GpuDecoder, Hidden
from engine.runner.gpu.filter_launches import (
    LEFT_TO_HOST,
    FilteredDraw,
    bind_filters,
    buffer_sizes,
    has_filters,
    put_filters,
    staged_shapes,
)
from engine.runner.gpu.launches import Bound
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory

_DOWNLOADED_ROWS = 16
"""Rows of logits that come to the host at a time: 10 MB of pinned memory at 152,000 tokens."""


class CardDraw:
    """A `verification.RowDraw`."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        """Allocate for groups of as many rows as the decoder has logits at a time."""
        self._device, self._decoder = device, decoder
        self._most_rows = most_rows = decoder.most_logits_rows
        vocab_size = decoder.spec.vocab_size
        self._sampler = Sampler(vocab_size)
        self._row_bytes = 4 * vocab_size
        self._downloaded = device.allocate_pinned(_DOWNLOADED_ROWS * self._row_bytes)
        slices = decoder.launches.num_slices
        self._memory = StepMemory(
            device,
            {
                "best_scores": 8 * most_rows * slices, "best_tokens": 4 * most_rows * slices,
                "tokens": 4 * most_rows, **buffer_sizes(most_rows, slices),
            },
        )  # fmt: skip
        self._staging = Staging(
            device,
            {
                "temperatures": (most_rows,), "seeds": (most_rows, 2), "indices": (most_rows,),
                **staged_shapes(most_rows),
            },
        )  # fmt: skip
        self._launches: dict[tuple[int, bool], tuple[Bound, ...]] = {}
        self._read = device.allocate_pinned(4 * most_rows)
        self._tokens = self._read.host_bytes().view(np.int32)

    def draw(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, batch: StepBatch
    ) -> Draws:
        """Draw from the logits after rows `sampled` of the batch."""
        draws = Draws()
        on_host = needs_host(rows, batch)
        for first in range(0, len(sampled), self._most_rows):
            group = np.arange(first, min(first + self._most_rows, len(sampled)))
            self._decoder.queue_logits(hidden, sampled[group])
            tokens = self._drawn(rows, group, on_host[group])
            draws.token_ids += np.maximum(tokens, 0).tolist()
            draws.is_drawn += (tokens >= 0).tolist()
            left = group[on_host[group] | (tokens == LEFT_TO_HOST)]
            if len(left):
                self._draw_on_host(rows, left, first, draws)
        return draws

    def _drawn(self, rows: SampledRows, group: np.ndarray, on_host: np.ndarray) -> np.ndarray:
        """Return the token of each row of the group; -1 where logits are not finite."""
        ways, staging, stream = rows.ways[group], self._staging, self._decoder.stream
        vocab_size = self._decoder.spec.vocab_size
        temperatures = ways["temperature"]
        is_greedy = temperatures < GREEDY_BELOW
        is_filtered = has_filters(ways, vocab_size) & ~is_greedy & ~on_host
        staging.wait()
        shown = np.where(is_greedy | is_filtered, 0.0, temperatures).astype(np.float32)
        staging.put("temperatures", shown.view(np.int32))
        staging.put("seeds", np.ascontiguousarray(ways["seed"]).view(np.int32).reshape(-1, 2))
        staging.put("indices", rows.output_indices[group])
        if is_filtered.any():
            put_filters(staging, ways, is_filtered, vocab_size)
        staging.send(stream)
        for launch in self._bound(len(group), with_filters=bool(is_filtered.any())):
            launch(stream)
        self._device.copy(self._read.address, self._memory["tokens"], 4 * len(group), stream)
        self._device.synchronize(stream)
        return self._tokens[: len(group)].copy()

    def _bound(self, num_rows: int, *, with_filters: bool) -> tuple[Bound, ...]:
        key = (num_rows, with_filters)
        if key not in self._launches:
            self._launches[key] = self._bind(num_rows, with_filters=with_filters)
        return self._launches[key]

    def _bind(self, num_rows: int, *, with_filters: bool) -> tuple[Bound, ...]:
        staging, memory, make = self._staging, self._memory, self._decoder.launches
        logits, best = (
            self._decoder.memory["logits"],
            (memory["best_scores"], memory["best_tokens"]),
        )
        ways = (staging["temperatures"], staging["seeds"], staging["indices"])
        find, choose = make.draw_rows(logits, ways, best, memory["tokens"], num_rows)
        if not with_filters:
            return find, choose
        filtered = FilteredDraw(
            logits, staging["filter_temperatures"], staging["seeds"], staging["indices"],
            staging["top_ks"], staging["top_ps"], staging["deepests"], *best,
        )  # fmt: skip
        return find, *bind_filters(make, filtered, memory, num_rows), choose

    def bind_all(self) -> None:
        """Ask for every kernel of the draws."""
        self._bind(1, with_filters=True)

    def _draw_on_host(self, rows: SampledRows, left: np.ndarray, first: int, draws: Draws) -> None:
        """Draw for rows of a group that begins at row `first`, from their logits."""
        for start in range(0, len(left), _DOWNLOADED_ROWS):
            some = left[start : start + _DOWNLOADED_ROWS]
            found = Draws()
            add_draws(found, self._sampler, self._logits(some - first), rows.take(some))
            for number, row in enumerate(some.tolist()):
                draws.token_ids[row] = found.token_ids[number]
                draws.is_drawn[row] = found.is_drawn[number]
                if number in found.logprobs:
                    draws.logprobs[row] = found.logprobs[number]

    def _logits(self, places: np.ndarray) -> np.ndarray:
        """Return the logits of a few rows of the group, which the next call overwrites."""
        ends = [*(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        start = 0
        for end in ends:  # rows that lie together are one copy
            self._device.copy(
                self._downloaded.address + start * self._row_bytes,
                self._decoder.memory["logits"] + int(places[start]) * self._row_bytes,
                (end - start) * self._row_bytes,
                self._decoder.stream,
            )
            start = end
        self._device.synchronize(self._decoder.stream)
        raw = self._downloaded.host_bytes()[: len(places) * self._row_bytes]
        return raw.view(np.float32).reshape(len(places), -1)


def needs_host(rows: SampledRows, batch: StepBatch) -> np.ndarray:
    """Return which rows need more than a temperature and filters, bool `[rows]`."""
    seats = batch.seats
    found: np.ndarray = (
        (rows.ways["has_penalties"] != 0)
        | (rows.ways["num_logprobs"] >= 0)
        | (np.diff(rows.withheld_starts) > 0)
        | seats.has_rules[rows.histories]
        | seats.has_grammar[rows.histories]
    )
    return found
