"""Steps that decode, each queued before the last one's tokens are read, where that is offered.

A step's graph requires nothing that the host learns from the step before: a row's token is read on
the card. The other inputs of a draw (masks of grammars, histories of penalties) are known when the
step before has been read, while the graph runs. So every row can be in the next step:

    host   │ read 1 │ rules of 2, draws of 2, queue 3 │ wait for 2 …
    card   ─┤├───────── graph of 2 ──────────────────┤├─ draws of 2 ─┤├─ graph of 3 …

If no row has more than a temperature, the graph draws, and step 3 is queued at once. A step with
drafts is not offered: the next one depends on which drafts are accepted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.errors import InternalError
from common.request import GREEDY_BELOW
from engine.core.sequences.seats import Seats
from engine.core.step.step_batch import StepBatch
from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.decoder import GpuDecoder, Hidden
from engine.runner.gpu.drawing.filter_launches import has_filters
from engine.runner.gpu.steps.decode_step import DrawWays
from engine.runner.gpu.steps.step_rows import StepRows
from engine.runner.kernels.step_rows import lay_out_draws


class GoingOn:
    """The latest step that decodes and the next one: promised, then queued, then taken."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        self._device, self._decoder = device, decoder
        self._block_size = decoder.launches.pool.block_size
        self._vocab_size = decoder.spec.vocab_size
        self._promised: tuple[StepRows, DrawWays] | None = None
        """The next step: queued after all launches that read the logits of the latest one."""
        self._after: Hidden | None = None
        """The next step, once it is queued."""
        self.is_read = False
        """Whether the latest step's tokens are on their way to the host."""
        self._left: frozenset[int] = frozenset()
        """Seats whose latest token the host had to draw."""

    def begin(self, flat: FlatBatch, batch: StepBatch) -> Hidden:
        """Begin a step that decodes, unless it has begun, and promise the next one if offered."""
        seats, rows, num_known = batch.seats, *_drawn_rows(batch)
        ways = seats.sampling.take(rows)
        indices = num_known - seats.num_prompt.take(rows)
        following, self._after = self._after, None
        self._promised, self.is_read = None, False
        if following is not None and batch.continues is not None:
            self._device.use()
            hidden = _taken(following, flat, batch.continues)
        else:
            hidden = self._decoder.begin(flat, draw_ways(ways, indices))
        if hidden.is_drawn:
            if batch.going_on is not None and self._left.isdisjoint(rows.tolist()):
                self._promise(hidden, flat, batch, draw_ways(ways, indices + 1))
            needs_more = has_filters(ways, self._vocab_size) | has_rules(ways, indices, seats, rows)
            if not needs_more.any():
                self.send()
                self.go_on(hidden)
        return hidden

    def put(self) -> None:
        """Stage the rows of the promised step."""
        if self._promised is not None:
            self._decoder.steps.put(*self._promised)

    def send(self) -> None:
        """Send the staged rows alone, where no rules of draws are sent with them."""
        if self._promised is not None:
            staging = self._decoder.steps.staging
            staging.wait()
            self.put()
            staging.send(self._decoder.stream)

    def go_on(self, hidden: Hidden) -> None:
        """Queue the copy of the step's tokens to the host, and the promised step, if there is one.

        Its rows are on the card. It overwrites the logits of `hidden`.
        """
        self._decoder.steps.read(hidden.rows.count)
        self.is_read = True
        promised, self._promised = self._promised, None
        if promised is not None:
            rows, _ = promised
            self._decoder.steps.launch(rows)
            self._after = Hidden(rows, rows.count, is_drawn=True)

    def tokens(self) -> np.ndarray:
        """Wait for the tokens of the latest step alone, int32 by index on the card."""
        return self._decoder.steps.tokens()

    def note_left(self, seats: np.ndarray, left: np.ndarray) -> None:
        """Note which of a step's rows, by their seats, the host has to draw.

        Such a row is often left to the host again, and its entry in the next step would be dropped
        each time. So no step is queued early after one that has such a row.
        """
        if len(left) or self._left:
            self._left = self._left.difference(seats.tolist()).union(seats[left].tolist())

    def _promise(self, hidden: Hidden, flat: FlatBatch, batch: StepBatch, ways: DrawWays) -> None:
        """Make the step after the one of `hidden`, if it can be a graph."""
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
            sources=hidden.places_of(going),
        )
        self._promised = rows, ways.take(going)
        batch.has_gone_on = True


def _drawn_rows(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's seat, and the number of tokens before the one that is drawn after it."""
    if batch.is_plain:
        return batch.rows, batch.seats.num_known.take(batch.rows)
    seats, num_known = lay_out_draws(
        batch.rows, batch.num_drafts, batch.is_sampled, batch.seats.num_known
    )
    return seats, num_known


def draw_ways(ways: np.ndarray, indices: np.ndarray) -> DrawWays:
    """Return the draws of rows with these `SAMPLING_COLUMNS`, of which none has filters."""
    temperatures = ways["temperature"]
    shown = np.where(temperatures < GREEDY_BELOW, 0.0, temperatures).astype(np.float32)
    return DrawWays(shown, np.ascontiguousarray(ways["seed"]), indices)


def _taken(following: Hidden, flat: FlatBatch, places: np.ndarray) -> Hidden:
    """Return the step that was begun, with the batch's rows at its indices `places`.

    Raises `InternalError` if it does not compute these rows.
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
    """Return which rows need more than a temperature and filters, bool `[rows]`."""
    found: np.ndarray = (
        (ways["has_penalties"] != 0)
        | (ways["num_logprobs"] >= 0)
        | (output_indices < ways["min_tokens"])
        | seats.have_rules_at(histories, output_indices)
        | seats.has_grammar[histories]
    )
    return found
