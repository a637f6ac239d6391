"""Draws on the card, in the order of `runner/drawing/sampler`.

All rows of a step are drawn in two launches, and four bytes a row are read. Launches for settings
that no row of the step has are left out:

    masks               a launch; tokens that are not allowed
    log probabilities   three launches, from the logits as they are then
    edits               a launch each for biases, penalties and withheld tokens
    the draw            two launches, six where a row is under filters
    log probabilities   a launch, for the drawn token's logit; before it the head once more if a
                        row with log probabilities has edits

Rows without an allowed token, and rows that the filters leave to the host, are drawn on the host
from their own logits. Which ones is known when the tokens are read. If the next step has begun by
then, it has taken another token for such a row, whose entry is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.core.sequences.seats import NOT_ASKED
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
    bind_filters,
    buffer_sizes,
    filtered_draw,
    has_filters,
    put_filters,
)
from engine.runner.gpu.drawing.going_on import GoingOn, draw_ways
from engine.runner.gpu.drawing.left_rows import MOST_LEFT, LeftRows
from engine.runner.gpu.drawing.mask_launches import bind_masks, masks_of, put_masks
from engine.runner.gpu.launches import Bound
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.gpu.steps.step_rows import rows_at
from engine.runner.grammars.allowed_tokens import AllowedTokens


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The settings of rows beside a temperature.

    `num_tops` is `NOT_ASKED` for rows without log probabilities. `allowed` None: no row has a mask.
    `may_be_left`: the host may have to draw a row, under filters or with tokens withheld.
    """

    is_filtered: np.ndarray
    is_edited: np.ndarray
    num_tops: np.ndarray
    allowed: AllowedTokens | None
    may_be_left: bool

    @staticmethod
    def by(rows: SampledRows, vocab_size: int) -> _Wanted:
        """Return the settings of these rows."""
        is_filtered, allowed = has_filters(rows.ways, vocab_size), masks_of(rows)
        may_be_left = bool(is_filtered.any() or allowed is not None or len(rows.withheld_ids))
        return _Wanted(
            is_filtered, has_edits(rows), rows.ways["num_logprobs"], allowed, may_be_left
        )

    @property
    def is_plain(self) -> bool:
        """Whether no row has more than a temperature."""
        return not (self.may_be_left or self.is_edited.any() or self.has_logprobs.any())

    @property
    def has_logprobs(self) -> np.ndarray:
        """Which rows have log probabilities, bool `[rows]`."""
        found: np.ndarray = self.num_tops != NOT_ASKED
        return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose logits are in memory, one after the other, and the results that the host reads.

    Row r of the batch's part is row `order[r]` of `rows`. The head reads row i at index `places[i]`
    of the step. `first`: the index of the part's first row in the batch. `goes_on`: another step is
    queued after the draws, and the head's inputs are kept.
    """

    rows: SampledRows
    wanted: _Wanted
    order: np.ndarray
    places: np.ndarray
    first: int = 0
    goes_on: bool = False


class CardDraw:
    """A `draws.RowDraw`, and `draws.DecodingSteps` of the same decoder."""

    asks_afterwards = False

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        """Allocate for groups of as many rows as the decoder has logits at a time."""
        self._device, self._decoder = device, decoder
        self._most_rows = most_rows = decoder.most_logits_rows
        self._vocab_size = decoder.spec.vocab_size
        self._sampler = Sampler(self._vocab_size)
        self._left_rows = LeftRows(device, decoder)
        self._going_on = GoingOn(device, decoder)
        self._memory = StepMemory(device, buffer_sizes(most_rows, decoder.launches.num_slices))
        self._staging = decoder.steps.staging
        memory = decoder.memory
        best = (memory["best_scores"], memory["best_tokens"])
        self._edits = LogitEdits(
            device, decoder.stream, memory["logits"], most_rows, decoder.max_len
        )
        self._logprobs = CardLogprobs(
            device, decoder.stream, memory["logits"], best, memory["drawn"], self._memory,
            self._staging, most_rows,
        )  # fmt: skip
        self._launches: dict[tuple[int, bool], tuple[Bound, ...]] = {}
        self._read = device.allocate_pinned(4 * most_rows)
        self._tokens = self._read.host_bytes().view(np.int32)

    def begin(self, flat: FlatBatch, batch: StepBatch) -> Hidden:
        """Begin a step that decodes, unless it has begun, and the next one if that is offered."""
        return self._going_on.begin(flat, batch)

    def draw(
        self, hidden: Hidden, sampled: np.ndarray, rows: SampledRows, batch: StepBatch
    ) -> Draws:
        """Draw from the logits after rows `sampled` of the batch.

        Raises `InternalError` when a token of a penalised history is not of the vocabulary.
        """
        check_histories(rows, self._vocab_size)
        draws = Draws()
        if hidden.is_drawn:
            self._draw_step(hidden, rows, batch, draws)
            return draws
        for first in range(0, len(sampled), self._most_rows):
            part = np.arange(first, min(first + self._most_rows, len(sampled)))
            some = rows if len(part) == len(rows) else rows.take(part)
            wanted = _Wanted.by(some, self._vocab_size)
            places = hidden.places_of(sampled[part])
            group = _Group(some, wanted, np.arange(len(part)), places, first)
            self._decoder.queue_logits(places)
            self._queue(group)
            self._add(draws, group, self._read_tokens(len(part)))
        return draws

    def _draw_step(self, hidden: Hidden, rows: SampledRows, batch: StepBatch, draws: Draws) -> None:
        """Draw what a step's graph has not drawn, go on, and wait for the tokens."""
        going_on, seats = self._going_on, rows.histories
        order = hidden.places_of(np.arange(len(rows)))
        if going_on.is_read:  # no row has more than a temperature
            drawn = going_on.tokens()[order]
            draws.token_ids += np.maximum(drawn, 0).tolist()
            draws.is_drawn += (drawn >= 0).tolist()
            going_on.note_left(seats, order[:0])
            return
        count = hidden.rows.count
        if not np.array_equal(order, np.arange(count)):  # some have left, or drafts have padding
            rows = rows.take(rows_at(order, count))
        wanted = _Wanted.by(rows, self._vocab_size)
        group = _Group(rows, wanted, order, np.arange(count), goes_on=batch.has_gone_on)
        if wanted.is_plain:
            going_on.send()
        else:
            self._queue(group)
        if batch.has_gone_on and wanted.may_be_left:
            self._left_rows.keep(count)
        going_on.go_on(hidden)
        left = self._add(draws, group, going_on.tokens())
        going_on.note_left(seats, left)
        if batch.has_gone_on:
            draws.left_behind += left.tolist()

    def _queue(self, group: _Group) -> None:
        """Queue the draws of a group whose logits are queued, and send their inputs.

        If another step is queued after them, its rows are part of that copy.
        """
        decoder, make, stream = self._decoder, self._decoder.launches, self._decoder.stream
        rows, wanted, count = group.rows, group.wanted, len(group.rows)
        self._staging.wait()
        self._put(rows, wanted)
        if group.goes_on:
            self._going_on.put()
        self._staging.send(stream)
        if wanted.allowed is not None:
            bind_masks(make, decoder.memory["logits"], self._staging, count)(stream)
        if wanted.has_logprobs.any():
            self._logprobs.find(make, count)
        if wanted.is_edited.any():
            self._edits.apply(make, rows)
        key = (count, bool(wanted.is_filtered.any()))
        if key not in self._launches:
            self._launches[key] = self._bind(*key)
        for launch in self._launches[key]:
            launch(stream)
        if wanted.has_logprobs.any():
            if (wanted.has_logprobs & wanted.is_edited).any():
                decoder.queue_logits(group.places)
            self._logprobs.take_drawn(make, count)

    def _put(self, rows: SampledRows, wanted: _Wanted) -> None:
        staging, ways = self._staging, draw_ways(rows.ways, rows.output_indices)
        shown = np.where(wanted.is_filtered, np.float32(0.0), ways.temperatures)
        staging.put("draw_temperatures", shown.view(np.int32))
        staging.put("draw_seeds", ways.seeds.view(np.int32).reshape(-1, 2))
        staging.put("draw_indices", ways.indices)
        if wanted.is_filtered.any():
            put_filters(staging, rows.ways, wanted.is_filtered, self._vocab_size)
        if wanted.allowed is not None:
            put_masks(staging, wanted.allowed)
        if wanted.has_logprobs.any():
            self._logprobs.put(wanted.num_tops, self._vocab_size)

    def _read_tokens(self, count: int) -> np.ndarray:
        """Wait for the tokens of a group."""
        decoder = self._decoder
        self._device.copy(self._read.address, decoder.memory["drawn"], 4 * count, decoder.stream)
        self._device.synchronize(decoder.stream)
        return self._tokens[:count].copy()

    def _add(self, draws: Draws, group: _Group, tokens: np.ndarray) -> np.ndarray:
        """Append the tokens of a group, int32 `[rows]`; -1 where logits are not finite.

        Rows that are left to the host are drawn there; return them, by index in the batch's part.
        """
        rows, wanted = group.rows, group.wanted
        tokens[_is_refused(tokens, rows, wanted)] = LEFT_TO_HOST
        drawn = tokens[group.order]
        draws.token_ids += np.maximum(drawn, 0).tolist()
        draws.is_drawn += (drawn >= 0).tolist()
        asked = wanted.has_logprobs[group.order] & (drawn >= 0)
        for row in np.flatnonzero(asked).tolist():
            place = int(group.order[row])
            num_top = min(int(wanted.num_tops[place]), self._vocab_size)
            draws.logprobs[group.first + row] = self._logprobs.of_row(place, num_top)
        left = np.flatnonzero(drawn == LEFT_TO_HOST)
        for start in range(0, len(left), MOST_LEFT):
            self._draw_on_host(draws, group, left[start : start + MOST_LEFT])
        return left

    def _draw_on_host(self, draws: Draws, group: _Group, left: np.ndarray) -> None:
        """Draw for a few rows of a group from their logits."""
        found, some = Draws(), group.order[left]
        logits = self._left_rows.logits(group.places[some], are_kept=group.goes_on)
        add_draws(found, self._sampler, logits, group.rows.take(some))
        for number, row in enumerate((group.first + left).tolist()):
            draws.token_ids[row] = found.token_ids[number]
            draws.is_drawn[row] = found.is_drawn[number]
            if number in found.logprobs:
                draws.logprobs[row] = found.logprobs[number]

    def _bind(self, num_rows: int, with_filters: bool) -> tuple[Bound, ...]:
        staging, memory, make = self._staging, self._decoder.memory, self._decoder.launches
        logits, best = memory["logits"], (memory["best_scores"], memory["best_tokens"])
        ways = (staging["draw_temperatures"], staging["draw_seeds"], staging["draw_indices"])
        find, choose = make.draw_rows(logits, ways, best, memory["drawn"], num_rows)
        if not with_filters:
            return find, choose
        filtered = filtered_draw(staging, logits, seeds=ways[1], indices=ways[2], best=best)
        return find, *bind_filters(make, filtered, self._memory, num_rows), choose

    def bind_all(self) -> None:
        """Ask for every kernel of the draws."""
        make = self._decoder.launches
        self._bind(1, with_filters=True)
        bind_masks(make, self._decoder.memory["logits"], self._staging, 1)
        self._edits.bind_all(make)
        self._logprobs.bind_all(make)


def _is_refused(tokens: np.ndarray, rows: SampledRows, wanted: _Wanted) -> np.ndarray:
    """Return the rows whose token is withheld, which were drawn as no other token is allowed."""
    found = np.zeros(len(tokens), np.bool_)
    if wanted.allowed is not None:
        found |= ~wanted.allowed.allows(np.maximum(tokens, 0))
    owners = np.repeat(np.arange(len(rows)), np.diff(rows.withheld_starts))
    found[owners[rows.withheld_ids == tokens[owners]]] = True
    return found & (tokens >= 0)
