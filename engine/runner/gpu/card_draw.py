"""Draws on the card, for the rows whose token needs no more than a temperature.

All rows of a step are drawn in two launches, and their tokens are read at once: four bytes a row.
Rows under filters, penalties, grammars or other rules, and those with log probabilities, are drawn
on the host from their own logits. A row's way depends on its own request alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.errors import InternalError
from common.request import GREEDY_BELOW
from engine.core.sequences.seats import Seats
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.host_draw import add_draws
from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.drawing.verification import Draws
from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.decoder import GpuDecoder, Hidden
from engine.runner.gpu.launches import Bound
from engine.runner.gpu.steps.decode_step import DrawWays
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_rows import StepRows


class CardDraw:
    """A `verification.RowDraw`, and `verification.PlainSteps` of the same decoder."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        """Allocate for groups of as many rows as the decoder has logits at a time."""
        self._device, self._decoder = device, decoder
        self._most_rows = most_rows = decoder.most_logits_rows
        self._block_size = decoder.launches.pool.block_size
        self._vocab_size = decoder.spec.vocab_size
        self._sampler = Sampler(self._vocab_size)
        self._staging = Staging(
            device,
            {"temperatures": (most_rows,), "seeds": (most_rows, 2), "indices": (most_rows,)},
        )
        self._launches: dict[int, tuple[Bound, Bound]] = {}
        self._read = device.allocate_pinned(4 * most_rows)
        self._tokens = self._read.host_bytes().view(np.int32)
        self._after: Hidden | None = None
        """The step that was begun after the latest one."""

    def begin(self, flat: FlatBatch, batch: StepBatch) -> Hidden:
        """Begin a plain step, unless that was done, and go on after it where that is offered."""
        seats, rows = batch.seats, batch.rows
        ways = seats.sampling.take(rows)
        indices = seats.num_known.take(rows) - seats.num_prompt.take(rows)
        following, self._after = self._after, None
        if following is not None and batch.continues is not None:
            self._device.use()
            hidden = _taken(following, flat, batch.continues)
        else:
            hidden = self._decoder.begin(flat, _draw_ways(ways, indices))
        may_go_on = batch.going_on is not None and hidden.drawing is not None
        if may_go_on and not needs_host(ways, indices, seats, rows, self._vocab_size).any():
            self._go_on(hidden, flat, batch, _draw_ways(ways, indices + 1))
        return hidden

    def _go_on(self, hidden: Hidden, flat: FlatBatch, batch: StepBatch, ways: DrawWays) -> None:
        """Begin the step after the one of `hidden`, whose logits are lost by that."""
        going, size = batch.going_on, self._block_size
        assert going is not None
        positions, tables = flat.positions[going] + 1, flat.block_tables[going]
        held = batch.seats.num_blocks.take(batch.rows[going])
        if (positions >= held * size).any():
            raise InternalError("a step was offered without a block for every row")
        if not self._decoder.has_pieces_for(positions):
            return
        blocks = tables[np.arange(len(going)), positions // size]
        rows = StepRows(
            tokens=np.zeros(len(going), np.int64),
            positions=positions,
            slots=blocks * size + positions % size,
            num_singles=len(going),
            single_tables=tables,
            sources=going if hidden.rows.places is None else hidden.rows.places[going],
        )
        self._after = self._decoder.begin_rows(rows, ways.take(going))
        batch.has_gone_on = True

    def draw(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, batch: StepBatch
    ) -> Draws:
        """Draw from the logits after rows `sampled` of the batch."""
        draws = Draws()
        on_host = needs_host(
            rows.ways, rows.output_indices, batch.seats, rows.histories, self._vocab_size
        )
        for first in range(0, len(sampled), self._most_rows):
            group = np.arange(first, min(first + self._most_rows, len(sampled)))
            places = group - first
            if hidden.drawing is None:
                self._decoder.queue_logits(hidden, sampled[group])
                tokens = self._drawn(rows, group)
            else:
                if hidden.rows.places is not None:
                    places = hidden.rows.places[group]
                tokens = self._decoder.steps.tokens(hidden.drawing)[places]
            draws.token_ids += np.maximum(tokens, 0).tolist()
            draws.is_drawn += (tokens >= 0).tolist()
            left = on_host[group].nonzero()[0]
            if len(left):
                self._draw_on_host(rows, group[left], places[left], draws)
        return draws

    def _drawn(self, rows: SampledRows, group: np.ndarray) -> np.ndarray:
        """Return the token of each row of the group; -1 where logits are not finite."""
        staging, stream = self._staging, self._decoder.stream
        ways = _draw_ways(rows.ways[group], rows.output_indices[group])
        staging.wait()
        staging.put("temperatures", ways.temperatures.view(np.int32))
        staging.put("seeds", ways.seeds.view(np.int32).reshape(-1, 2))
        staging.put("indices", ways.indices)
        staging.send(stream)
        for launch in self._bound(len(group)):
            launch(stream)
        drawn = self._decoder.memory["drawn"]
        self._device.copy(self._read.address, drawn, 4 * len(group), stream)
        self._device.synchronize(stream)
        return self._tokens[: len(group)].copy()

    def _bound(self, num_rows: int) -> tuple[Bound, Bound]:
        if num_rows not in self._launches:
            self._launches[num_rows] = self._bind(num_rows)
        return self._launches[num_rows]

    def _bind(self, num_rows: int) -> tuple[Bound, Bound]:
        staging, memory = self._staging, self._decoder.memory
        return self._decoder.launches.draw_rows(
            memory["logits"],
            (staging["temperatures"], staging["seeds"], staging["indices"]),
            (memory["best_scores"], memory["best_tokens"]),
            memory["drawn"],
            num_rows,
        )

    def bind_all(self) -> None:
        """Ask for every kernel of the draws."""
        self._bind(1)

    def _draw_on_host(
        self, rows: SampledRows, left: np.ndarray, places: np.ndarray, draws: Draws
    ) -> None:
        """Draw for the rows `left`, from their logits, which lie at `places`."""
        logits = np.stack([self._logits(place) for place in places.tolist()])
        found = Draws()
        add_draws(found, self._sampler, logits, rows.take(left))
        for number, row in enumerate(left.tolist()):
            draws.token_ids[row] = found.token_ids[number]
            draws.is_drawn[row] = found.is_drawn[number]
            if number in found.logprobs:
                draws.logprobs[row] = found.logprobs[number]

    def _logits(self, place: int) -> np.ndarray:
        size = 4 * self._vocab_size
        address = self._decoder.memory["logits"] + place * size
        return np.frombuffer(self._device.download(address, size), np.float32)


def _draw_ways(ways: np.ndarray, indices: np.ndarray) -> DrawWays:
    """Return how rows with these `SAMPLING_COLUMNS` are drawn where a temperature is all."""
    temperatures = ways["temperature"]
    shown = np.where(temperatures < GREEDY_BELOW, 0.0, temperatures).astype(np.float32)
    return DrawWays(shown, np.ascontiguousarray(ways["seed"]), indices)


def _taken(following: Hidden, flat: FlatBatch, places: np.ndarray) -> Hidden:
    """Return the step that was begun, as the step of the rows that lie at `places` of it.

    Raises `InternalError` if it computes another thing than these rows.
    """
    rows = following.rows
    if not np.array_equal(rows.slots[places], flat.slots):
        raise InternalError(
            f"the step that was begun writes slots {rows.slots[places]}: wanted {flat.slots}"
        )
    return replace(following, rows=replace(rows, places=places))


def needs_host(
    ways: np.ndarray, output_indices: np.ndarray, seats: Seats, histories: np.ndarray,
    vocab_size: int,
) -> np.ndarray:  # fmt: skip
    """Return which rows need more than a temperature to be drawn, bool `[rows]`.

    A row that does not need more needs no more later in its output.
    """
    is_filtered = (
        ((ways["top_k"] > 0) & (ways["top_k"] < vocab_size))
        | (ways["top_p"] < 1.0)
        | (ways["min_p"] > 0.0)
    )
    found: np.ndarray = (
        (is_filtered & (ways["temperature"] >= GREEDY_BELOW))
        | (ways["has_penalties"] != 0)
        | (ways["num_logprobs"] >= 0)
        | (output_indices < ways["min_tokens"])
        | seats.has_rules[histories]
        | seats.has_grammar[histories]
    )
    return found
