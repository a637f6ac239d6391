"""Draws on the card, in the order of `runner/drawing/sampler`.

All rows of a step are drawn in two launches, four bytes a row are read, and what only some rows ask
for is left out where no row does:

    masks               a launch; tokens that are not allowed
    log probabilities   three launches, from the logits as they are then
    edits               a launch each for biases, penalties and withheld tokens
    the draw            two launches, six where a row is under filters
    log probabilities   a launch, for the drawn token's logit; before it the head once more where
                        a row that is asked for them has edits

Rows under a grammar that is asked afterwards, and those that have no allowed token or that the
filters leave, are drawn on the host from their own logits. A row's way depends on its own request
and logits alone, and it draws the same token either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from common.errors import InternalError
from common.request import GREEDY_BELOW
from engine.core.sequences.seats import NOT_ASKED, Seats
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.draws import Draws, add_draws
from engine.runner.drawing.sampler import SampledRows, Sampler, check_histories
from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.decoder import GpuDecoder, Hidden
from engine.runner.gpu.drawing.card_logprobs import CardLogprobs
from engine.runner.gpu.drawing.edit_launches import LogitEdits, has_edits
from engine.runner.gpu.drawing.filter_launches import (
    LEFT_TO_HOST,
    FilteredDraw,
    bind_filters,
    buffer_sizes,
    has_filters,
    put_filters,
    staged_shapes,
)
from engine.runner.gpu.drawing.mask_launches import bind_masks, masks_of, put_masks, staged_masks
from engine.runner.gpu.launches import Bound
from engine.runner.gpu.steps.decode_step import DrawWays
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.gpu.steps.step_rows import StepRows
from engine.runner.grammars.allowed_tokens import AllowedTokens

_DOWNLOADED_ROWS = 16
"""Rows of logits that come to the host at a time: 10 MB of pinned memory at 152,000 tokens."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What rows ask for that the card does, beside a temperature: none of it where the host draws.

    `num_tops` is `NOT_ASKED` where nobody asks for log probabilities. `allowed` None: no row has a
    mask.
    """

    is_filtered: np.ndarray
    is_edited: np.ndarray
    num_tops: np.ndarray
    allowed: AllowedTokens | None

    @property
    def is_plain(self) -> bool:
        """Whether a temperature is all."""
        return self.allowed is None and not (
            self.is_filtered.any() or self.is_edited.any() or self.has_logprobs.any()
        )

    @property
    def has_logprobs(self) -> np.ndarray:
        """Which rows have log probabilities, bool `[rows]`."""
        found: np.ndarray = self.num_tops != NOT_ASKED
        return found


class CardDraw:
    """A `draws.RowDraw`, and `draws.PlainSteps` of the same decoder."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        """Allocate for groups of as many rows as the decoder has logits at a time."""
        self._device, self._decoder = device, decoder
        self._most_rows = most_rows = decoder.most_logits_rows
        self._block_size = decoder.launches.pool.block_size
        self._vocab_size = decoder.spec.vocab_size
        self._sampler = Sampler(self._vocab_size)
        self._row_bytes = 4 * self._vocab_size
        self._downloaded = device.allocate_pinned(_DOWNLOADED_ROWS * self._row_bytes)
        self._memory = StepMemory(device, buffer_sizes(most_rows, decoder.launches.num_slices))
        self._staging = Staging(
            device,
            {
                "temperatures": (most_rows,), "seeds": (most_rows, 2), "indices": (most_rows,),
                **staged_shapes(most_rows), **staged_masks(most_rows, self._vocab_size),
            },
        )  # fmt: skip
        memory = decoder.memory
        best = (memory["best_scores"], memory["best_tokens"])
        self._edits = LogitEdits(
            device, decoder.stream, memory["logits"], most_rows, decoder.max_len
        )
        self._logprobs = CardLogprobs(
            device, decoder.stream, memory["logits"], best, memory["drawn"], self._memory, most_rows
        )
        self._launches: dict[tuple[int, bool], tuple[Bound, ...]] = {}
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
        needs_more = has_filters(ways, self._vocab_size) | has_rules(ways, indices, seats, rows)
        if may_go_on and not needs_more.any():
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
        """Draw from the logits after rows `sampled` of the batch.

        Raises `InternalError` when a token of a penalised history is not of the vocabulary.
        """
        check_histories(rows, self._vocab_size)
        draws = Draws()
        for first in range(0, len(sampled), self._most_rows):
            group = np.arange(first, min(first + self._most_rows, len(sampled)))
            some = rows if len(group) == len(rows) else rows.take(group)
            self._draw_group(hidden, sampled[group], some, draws)
        return draws

    def _draw_group(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, draws: Draws
    ) -> None:
        """Draw from rows whose logits lie in memory at a time, and append what was drawn."""
        on_host = needs_host(rows)
        wanted = self._wanted(rows, on_host)
        places, first, is_changed = np.arange(len(rows)), len(draws.token_ids), False
        if hidden.drawing is not None and wanted.is_plain:
            if hidden.rows.places is not None:
                places = hidden.rows.places[places]
            tokens = self._decoder.steps.tokens(hidden.drawing)[places]
        else:
            if hidden.drawing is None:
                self._decoder.queue_logits(hidden, sampled)
            is_changed = self._queue(hidden, sampled, rows, wanted)
            tokens = self._read_tokens(rows, wanted)
        draws.token_ids += np.maximum(tokens, 0).tolist()
        draws.is_drawn += (tokens >= 0).tolist()
        for row in np.flatnonzero(wanted.has_logprobs & (tokens >= 0)).tolist():
            num_top = min(int(wanted.num_tops[row]), self._vocab_size)
            draws.logprobs[first + row] = self._logprobs.of_row(row, num_top)
        left = (on_host | (tokens == LEFT_TO_HOST)).nonzero()[0]
        if len(left):
            if is_changed and wanted.is_edited[left].any():
                self._decoder.queue_logits(hidden, sampled)
            self._draw_on_host(rows, left, places[left], draws, first)

    def _wanted(self, rows: SampledRows, on_host: np.ndarray) -> _Wanted:
        return _Wanted(
            has_filters(rows.ways, self._vocab_size) & ~on_host,
            has_edits(rows) & ~on_host,
            np.where(on_host, NOT_ASKED, rows.ways["num_logprobs"]),
            masks_of(rows, on_host),
        )

    def _queue(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, wanted: _Wanted
    ) -> bool:
        """Queue a group's draw and the way of its tokens to the host.

        Return whether edited logits are left in memory.
        """
        decoder, make, stream = self._decoder, self._decoder.launches, self._decoder.stream
        count, is_filtered = len(rows), bool(wanted.is_filtered.any())
        self._send(rows, wanted)
        if wanted.allowed is not None:
            bind_masks(make, decoder.memory["logits"], self._staging, count)(stream)
        if wanted.has_logprobs.any():
            self._logprobs.find(make, wanted.num_tops)
        is_edited = bool(wanted.is_edited.any())
        if is_edited:
            self._edits.apply(make, rows)
        key = (count, is_filtered)
        if key not in self._launches:
            self._launches[key] = self._bind(*key)
        for launch in self._launches[key]:
            launch(stream)
        if wanted.has_logprobs.any():
            if (wanted.has_logprobs & wanted.is_edited).any():
                decoder.queue_logits(hidden, sampled)
                is_edited = False
            self._logprobs.take_drawn(make, count)
        self._device.copy(self._read.address, decoder.memory["drawn"], 4 * count, stream)
        return is_edited

    def _send(self, rows: SampledRows, wanted: _Wanted) -> None:
        staging, ways = self._staging, _draw_ways(rows.ways, rows.output_indices)
        staging.wait()
        shown = np.where(wanted.is_filtered, np.float32(0.0), ways.temperatures)
        staging.put("temperatures", shown.view(np.int32))
        staging.put("seeds", ways.seeds.view(np.int32).reshape(-1, 2))
        staging.put("indices", ways.indices)
        if wanted.is_filtered.any():
            put_filters(staging, rows.ways, wanted.is_filtered, self._vocab_size)
        if wanted.allowed is not None:
            put_masks(staging, wanted.allowed)
        staging.send(self._decoder.stream)

    def _read_tokens(self, rows: SampledRows, wanted: _Wanted) -> np.ndarray:
        """Wait for the token of each row of a group; -1 where logits are not finite."""
        self._device.synchronize(self._decoder.stream)
        tokens = self._tokens[: len(rows)].copy()
        # Where no token is left that the row may draw, another one was drawn.
        is_refused = np.zeros(len(rows), np.bool_)
        if wanted.allowed is not None:
            is_refused |= ~wanted.allowed.allows(np.maximum(tokens, 0))
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.withheld_starts))
        is_refused[owners[rows.withheld_ids == tokens[owners]]] = True
        tokens[is_refused & (tokens >= 0)] = LEFT_TO_HOST
        return tokens

    def _bind(self, num_rows: int, with_filters: bool) -> tuple[Bound, ...]:
        staging, memory, make = self._staging, self._decoder.memory, self._decoder.launches
        logits, best = memory["logits"], (memory["best_scores"], memory["best_tokens"])
        ways = (staging["temperatures"], staging["seeds"], staging["indices"])
        find, choose = make.draw_rows(logits, ways, best, memory["drawn"], num_rows)
        if not with_filters:
            return find, choose
        filtered = FilteredDraw(
            logits, staging["filter_temperatures"], staging["seeds"], staging["indices"],
            staging["top_ks"], staging["top_ps"], staging["deepests"], *best,
        )  # fmt: skip
        return find, *bind_filters(make, filtered, self._memory, num_rows), choose

    def bind_all(self) -> None:
        """Ask for every kernel of the draws."""
        make = self._decoder.launches
        self._bind(1, with_filters=True)
        bind_masks(make, self._decoder.memory["logits"], self._staging, 1)
        self._edits.bind_all(make)
        self._logprobs.bind_all(make)

    def _draw_on_host(
        self, rows: SampledRows, left: np.ndarray, places: np.ndarray, draws: Draws, first: int
    ) -> None:
        """Draw for the rows `left`, from their logits, which lie at `places`.

        Row 0 is the one that has the place `first` in `draws`.
        """
        for start in range(0, len(left), _DOWNLOADED_ROWS):
            some = slice(start, start + _DOWNLOADED_ROWS)
            found = Draws()
            add_draws(found, self._sampler, self._logits(places[some]), rows.take(left[some]))
            for number, row in enumerate((first + left[some]).tolist()):
                draws.token_ids[row] = found.token_ids[number]
                draws.is_drawn[row] = found.is_drawn[number]
                if number in found.logprobs:
                    draws.logprobs[row] = found.logprobs[number]

    def _logits(self, places: np.ndarray) -> np.ndarray:
        """Return the logits of a few rows, which the next call overwrites."""
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


def has_rules(
    ways: np.ndarray, output_indices: np.ndarray, seats: Seats, histories: np.ndarray
) -> np.ndarray:
    """Return which rows need more than a temperature and filters, bool `[rows]`.

    A row that does not need more needs no more later in its output.
    """
    found: np.ndarray = (
        (ways["has_penalties"] != 0)
        | (ways["num_logprobs"] >= 0)
        | (output_indices < ways["min_tokens"])
        | seats.has_rules[histories]
        | seats.has_grammar[histories]
    )
    return found


def needs_host(rows: SampledRows) -> np.ndarray:
    """Return which rows are drawn on the host: those of a grammar that is asked afterwards."""
    found = np.zeros(len(rows), np.bool_)
    if rows.unmasked is not None:
        found[rows.unmasked.rows] = True
    return found
