"""The sequences of one step, as arrays for the runner and one by one for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from engine.core.planner_contract import Chunk
from engine.core.runner_contract import ScheduledSequence
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import Sequence as SeatedSequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Column = TypeVar("Column", Ints, Bools)


class StepBatch(Sequence[ScheduledSequence]):
    """Entry `i` computes `num_tokens[i]` tokens of row `rows[i]` of `seats` from `starts[i]` on.

    The last `num_drafts[i]` of them are drafts, which stand after the row's known tokens. Where
    `is_sampled[i]`, tokens are drawn after the last known token and after each draft.
    Where `is_decode[i]`, a decoding sequence computes its last known token, and drafts.
    `num_proposals[i]` drafts may be proposed for the next step. `view(i)` makes the entry as a
    `ScheduledSequence`, which the runner does not read.

    The runner may begin a step after this one, before anybody knows the tokens of this one: a plain
    step of the entries `going_on` (None: it may not), at their next positions, for which they have
    blocks. It sets `has_gone_on` before `on_queued` if it does. That step's results are asked for
    by a batch with `continues`: its entry i is entry `going_on[continues[i]]` of the batch before.
    The others have ended, or were left behind (`RunnerResult`): what the step has written of them
    is written again by a later one. Any other batch means that the step is forgotten.
    """

    def __init__(
        self,
        seats: Seats,
        rows: npt.ArrayLike,
        starts: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        num_drafts: npt.ArrayLike,
        is_sampled: npt.ArrayLike,
        view: Callable[[int], ScheduledSequence],
    ) -> None:
        self.seats = seats
        self.rows: Ints = np.asarray(rows, np.int64)
        self.starts: Ints = np.asarray(starts, np.int64)
        # Read-only in every batch, as the shared columns of plain decodes are: kernels would be
        # compiled once more for the other kind of array, in the first step that has it.
        self.num_tokens: Ints = _constant(np.asarray(num_tokens, np.int64))
        self.num_drafts: Ints = _constant(np.asarray(num_drafts, np.int64))
        self.is_sampled: Bools = _constant(np.asarray(is_sampled, np.bool_))
        self.is_decode: Bools = np.zeros(len(self.rows), np.bool_)
        self.is_plain_decodes = False
        """Whether its planner says that each entry decodes, one token and no draft."""
        self.has_decodes = True
        """Whether any entry may decode, as far as its planner knows."""
        self.num_proposals: Ints = _all_zero(len(self.rows))
        self.going_on: Ints | None = None
        self.has_gone_on = False
        self.continues: Ints | None = None
        self._view = view
        self._views: list[ScheduledSequence] = []

    @property
    def is_plain(self) -> bool:
        """Whether every entry computes one token, its last known one, and draws the next."""
        if self.is_plain_decodes:
            return True
        return bool(self.is_sampled.all() and (self.num_tokens == 1).all())

    @property
    def has_prompts(self) -> bool:
        """Whether any entry computes a part of a prompt."""
        return not (self.is_plain_decodes or (self.has_decodes and self.is_decode.all()))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScheduledSequence]: ...
    def __getitem__(self, index: int | slice) -> ScheduledSequence | list[ScheduledSequence]:
        if not self._views:
            self._views = [self._made(i) for i in range(len(self.rows))]
        return self._views[index]

    def _made(self, entry: int) -> ScheduledSequence:
        return self._view(entry)

    def drafts(self, entry: int) -> list[int]:
        """Return the drafts of an entry."""
        row, end = self.rows[entry], self.starts[entry] + self.num_tokens[entry]
        drafts: list[int] = self.seats.token_ids[row, end - self.num_drafts[entry] : end].tolist()
        return drafts

    def only(self, entries: Sequence[int]) -> StepBatch:
        """Return the part of the batch with these entries."""
        kept = np.array(entries, np.int64)
        part = StepBatch(
            self.seats,
            self.rows[kept],
            self.starts[kept],
            self.num_tokens[kept],
            self.num_drafts[kept],
            self.is_sampled[kept],
            lambda i: self[entries[i]],
        )
        part.is_decode = self.is_decode[kept]
        part.is_plain_decodes, part.has_decodes = self.is_plain_decodes, self.has_decodes
        part.num_proposals = self.num_proposals[kept]
        return part


def planned_batch(
    seats: Seats,
    rows: Ints,
    sequences: Sequence[SeatedSequence],
    chunks: Mapping[int, Chunk],
    num_decodes: int,
) -> StepBatch:
    """Return the batch that computes a chunk of each of `sequences`, which hold their blocks.

    They stand at `rows` of `seats`. The first `num_decodes` compute their last known token, and
    drafts after it. `chunks` are by entry; an entry without one is a plain decode.
    """
    count, starts = len(rows), seats.num_computed.take(rows)
    if num_decodes == count and not any(chunk.num_drafts for chunk in chunks.values()):
        ones, every = _all_one(count), _all_true(count)
        batch = _PlannedBatch(seats, rows, starts, ones, _all_zero(count), every, _no_view)
        batch.is_decode, batch.is_plain_decodes = every, True
    else:
        num_tokens, num_drafts = np.ones_like(starts), np.zeros(count, np.int64)
        entries = list(chunks)
        num_tokens[entries] = [chunk.num_tokens + chunk.num_drafts for chunk in chunks.values()]
        num_drafts[entries] = [chunk.num_drafts for chunk in chunks.values()]
        is_sampled = starts + num_tokens >= seats.num_known.take(rows)
        batch = _PlannedBatch(seats, rows, starts, num_tokens, num_drafts, is_sampled, _no_view)
        batch.is_decode[:num_decodes], batch.has_decodes = True, num_decodes > 0
    batch.sequences = sequences
    return batch


class _PlannedBatch(StepBatch):
    """A batch that looks its entries up in sequences.

    It holds no function that holds itself: batches are many, and would be left to the collector.
    """

    sequences: Sequence[SeatedSequence]

    def _made(self, entry: int) -> ScheduledSequence:
        return _view(self.sequences[entry], self, entry)


def _no_view(entry: int) -> ScheduledSequence:
    raise AssertionError("the entries of a planned batch are views of its sequences")


# Columns of most batches, which nobody may change: to make one takes as long as to use it.
@lru_cache(maxsize=256)
def _all_one(count: int) -> Ints:
    return _constant(np.ones(count, np.int64))


@lru_cache(maxsize=256)
def _all_zero(count: int) -> Ints:
    return _constant(np.zeros(count, np.int64))


@lru_cache(maxsize=256)
def _all_true(count: int) -> Bools:
    return _constant(np.ones(count, np.bool_))


def _constant(column: Column) -> Column:
    column.flags.writeable = False
    return column


def _view(sequence: SeatedSequence, batch: StepBatch, entry: int) -> ScheduledSequence:
    """Return an entry of `batch` with the sequence's own tokens and blocks."""
    num_drafts = int(batch.num_drafts[entry])
    start = int(batch.starts[entry])
    end = start + int(batch.num_tokens[entry]) - num_drafts
    is_sampled = bool(batch.is_sampled[entry])
    return ScheduledSequence(
        sequence.sequence_id,
        [*sequence.tokens(start, end), *sequence.draft_token_ids[:num_drafts]],
        start,
        sequence.block_table,
        sequence.sample_input() if is_sampled else None,
        num_drafts,
        int(batch.num_proposals[entry]),
        None if is_sampled else sequence.tokens(end, end + 1)[0],
    )


def batch_of(entries: Sequence[ScheduledSequence]) -> StepBatch:
    """Return entries that no scheduler made as a batch over seats of their own.

    Without a known next token, it is -1. Raises `ValueError` for penalties with a `sample` whose
    tokens do not end where the entry's known tokens do.
    """
    longest = max((max(0, e.start) + len(e.token_ids) for e in entries), default=0)
    histories = [_history(entry) for entry in entries]
    widest = max((len(entry.block_table) for entry in entries), default=0)
    seats = Seats(len(entries), max([longest, *map(len, histories)]), max(widest, 1))
    for row, (entry, history) in enumerate(zip(entries, histories, strict=True)):
        first, end = max(0, entry.start), max(0, entry.start) + len(entry.token_ids)
        tokens = seats.token_ids[row]
        tokens[: len(history)] = history
        tokens[first:end] = entry.token_ids
        if entry.sample is None:
            tokens[end] = -1 if entry.next_token_id is None else entry.next_token_id
        else:
            seats.num_known[row] = end - entry.num_drafts
            if entry.sample.params.has_penalties and len(history) != seats.num_known[row]:
                raise ValueError(
                    f"{len(history)} tokens before the draw: wanted {seats.num_known[row]}"
                )
            seats.num_prompt[row] = seats.num_known[row] - entry.sample.output_index
            seats.set_params(row, entry.sample.params)
        seats.block_tables[row, : len(entry.block_table)] = entry.block_table
        seats.num_blocks[row] = len(entry.block_table)
    batch = StepBatch(
        seats,
        range(len(entries)),
        [entry.start for entry in entries],
        [len(entry.token_ids) for entry in entries],
        [entry.num_drafts for entry in entries],
        [entry.sample is not None for entry in entries],
        lambda i: entries[i],
    )
    batch.num_proposals = np.array([entry.num_proposals for entry in entries], np.int64)
    return batch


def _history(entry: ScheduledSequence) -> list[int]:
    sample = entry.sample
    return [] if sample is None else [*sample.prompt_token_ids, *sample.output_token_ids]


EMPTY_BATCH = batch_of(())
"""A batch without entries."""
