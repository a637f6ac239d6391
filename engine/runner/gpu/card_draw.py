"""Draws on the card, for the rows whose token needs no more than a temperature.

All rows of a step are drawn in two launches, and their tokens are read at once: four bytes a row.
Rows under filters, penalties, grammars or other rules, and those with log probabilities, are drawn
on the host from their own logits. A row's way depends on its own request alone.
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
from engine.runner.gpu.launches import Bound
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory


class CardDraw:
    """A `verification.RowDraw`."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        """Allocate for groups of as many rows as the decoder has logits at a time."""
        self._device, self._decoder = device, decoder
        self._most_rows = most_rows = decoder.most_logits_rows
        vocab_size = decoder.spec.vocab_size
        self._sampler = Sampler(vocab_size)
        self._row_bytes = 4 * vocab_size
        slices = decoder.launches.num_slices
        self._memory = StepMemory(
            device,
            {
                "best_scores": 8 * most_rows * slices, "best_tokens": 4 * most_rows * slices,
                "tokens": 4 * most_rows,
            },
        )  # fmt: skip
        self._staging = Staging(
            device,
            {"temperatures": (most_rows,), "seeds": (most_rows, 2), "indices": (most_rows,)},
        )
        self._launches: dict[int, tuple[Bound, Bound]] = {}
        self._read = device.allocate_pinned(4 * most_rows)
        self._tokens = self._read.host_bytes().view(np.int32)

    def draw(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, batch: StepBatch
    ) -> Draws:
        """Draw from the logits after rows `sampled` of the batch."""
        draws = Draws()
        on_host = needs_host(rows, batch, self._decoder.spec.vocab_size)
        for first in range(0, len(sampled), self._most_rows):
            group = np.arange(first, min(first + self._most_rows, len(sampled)))
            self._decoder.queue_logits(hidden, sampled[group])
            tokens = self._drawn(rows, group)
            draws.token_ids += np.maximum(tokens, 0).tolist()
            draws.is_drawn += (tokens >= 0).tolist()
            left = group[on_host[group]]
            if len(left):
                self._draw_on_host(rows, left, first, draws)
        return draws

    def _drawn(self, rows: SampledRows, group: np.ndarray) -> np.ndarray:
        """Return the token of each row of the group; -1 where logits are not finite."""
        ways, staging, stream = rows.ways[group], self._staging, self._decoder.stream
        temperatures = ways["temperature"]
        is_greedy = temperatures < GREEDY_BELOW
        staging.wait()
        shown = np.where(is_greedy, 0.0, temperatures).astype(np.float32)
        staging.put("temperatures", shown.view(np.int32))
        staging.put("seeds", np.ascontiguousarray(ways["seed"]).view(np.int32).reshape(-1, 2))
        staging.put("indices", rows.output_indices[group])
        staging.send(stream)
        for launch in self._bound(len(group)):
            launch(stream)
        self._device.copy(self._read.address, self._memory["tokens"], 4 * len(group), stream)
        self._device.synchronize(stream)
        return self._tokens[: len(group)].copy()

    def _bound(self, num_rows: int) -> tuple[Bound, Bound]:
        if num_rows not in self._launches:
            self._launches[num_rows] = self._bind(num_rows)
        return self._launches[num_rows]

    def _bind(self, num_rows: int) -> tuple[Bound, Bound]:
        staging, memory = self._staging, self._memory
        return self._decoder.launches.draw_rows(
            self._decoder.memory["logits"],
            (staging["temperatures"], staging["seeds"], staging["indices"]),
            (memory["best_scores"], memory["best_tokens"]),
            memory["tokens"],
            num_rows,
        )

    def bind_all(self) -> None:
        """Ask for every kernel of the draws."""
        self._bind(1)

    def _draw_on_host(self, rows: SampledRows, left: np.ndarray, first: int, draws: Draws) -> None:
        """Draw for rows of a group that begins at row `first`, from their logits."""
        logits = np.stack([self._logits(row - first) for row in left.tolist()])
        found = Draws()
        add_draws(found, self._sampler, logits, rows.take(left))
        for number, row in enumerate(left.tolist()):
            draws.token_ids[row] = found.token_ids[number]
            draws.is_drawn[row] = found.is_drawn[number]
            if number in found.logprobs:
                draws.logprobs[row] = found.logprobs[number]

    def _logits(self, place: int) -> np.ndarray:
        address = self._decoder.memory["logits"] + place * self._row_bytes
        return np.frombuffer(self._device.download(address, self._row_bytes), np.float32)


def needs_host(rows: SampledRows, batch: StepBatch, vocab_size: int) -> np.ndarray:
    """Return which rows need more than a temperature to be drawn, bool `[rows]`."""
    ways, seats = rows.ways, batch.seats
    is_filtered = (
        ((ways["top_k"] > 0) & (ways["top_k"] < vocab_size))
        | (ways["top_p"] < 1.0)
        | (ways["min_p"] > 0.0)
    )
    found: np.ndarray = (
        (is_filtered & (ways["temperature"] >= GREEDY_BELOW))
        | (ways["has_penalties"] != 0)
        | (ways["num_logprobs"] >= 0)
        | (np.diff(rows.withheld_starts) > 0)
        | seats.has_rules[rows.histories]
        | seats.has_grammar[rows.histories]
    )
    return found
