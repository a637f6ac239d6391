"""The MTP layer's work after a step: its rows, and the drafts that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engine.core.plan import DrawnTokens, ScheduledSequence
from engine.runner.flat_batch import BatchLimits, FlatBatch


class MtpLayer(Protocol):
    """A loaded MTP layer on its part of the KV cache, used with a decoder.

    The `token_ids` of its batches are the tokens after the rows' positions.
    """

    def first_drafts(self, hidden: Any, rows: np.ndarray, batch: FlatBatch) -> np.ndarray:
        """Compute keys and values of `batch`; return one int64 draft after each `sampled_rows`.

        `hidden` is the output of the decoder's last layer; `rows` are the indices of the batch's
        rows in it.
        """

    def next_drafts(self, kept: np.ndarray, batch: FlatBatch) -> np.ndarray:
        """Return the next drafts; `batch` has one row for each of the last drafts that continues.

        `kept` are the indices of those among the drafts of the last call.
        """


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Rows whose next token is known, and the sequences among them that need drafts.

    `rows` are indices in the decoder's batch; `batch.sampled_rows` are each sequence's last ones.
    `entries` are indices in the planned batch, with at most `num_drafts` drafts each.
    """

    rows: np.ndarray
    batch: FlatBatch
    entries: list[int]
    num_drafts: np.ndarray


def plan_drafts(
    planned: Sequence[ScheduledSequence],
    flat: FlatBatch,
    results: Sequence[DrawnTokens | None],
    limits: BatchLimits,
) -> DraftStep | None:
    """Return the draft step after a computed step; None when no next token is known.

    `results` is what the step drew. Rows behind a rejected draft are left out, and so are sequences
    that failed.
    """
    rows: list[int] = []
    next_ids, sequences, row_starts = [], [], [0]
    entries, num_drafts, sampled = [], [], []
    for entry, (sequence, result) in enumerate(zip(planned, results, strict=True)):
        behind = _next_tokens(sequence, result)
        if not behind:
            continue
        first = int(flat.row_starts[entry])
        rows += range(first, first + len(behind))
        next_ids += behind
        sequences.append(entry)
        row_starts.append(len(rows))
        if result is not None and sequence.num_proposals > 0:
            slots = min(len(sequence.block_table) * limits.block_size, limits.max_len)
            free = slots - (sequence.start + len(behind))
            entries.append(entry)
            num_drafts.append(min(sequence.num_proposals, 1 + max(0, free)))
            sampled.append(len(rows) - 1)
    if not rows:
        return None
    chosen = np.array(rows, np.int64)
    batch = FlatBatch(
        token_ids=np.array(next_ids, np.int64),
        positions=flat.positions[chosen],
        slots=flat.slots[chosen],
        row_starts=np.array(row_starts, np.int64),
        block_tables=flat.block_tables[sequences],
        sampled_rows=np.array(sampled, np.int64),
    )
    return DraftStep(chosen, batch, entries, np.array(num_drafts, np.int64))


def _next_tokens(sequence: ScheduledSequence, result: DrawnTokens | None) -> list[int]:
    """Return the tokens after the sequence's rows, from the first row, as far as they are known."""
    known = list(sequence.token_ids[1 : len(sequence.token_ids) - sequence.num_drafts])
    if result is not None:
        return known + [token.token_id for token in result.tokens]
    if sequence.sample is None and sequence.next_token_id is not None:
        known.append(sequence.next_token_id)
    return known


def run_drafts(
    layer: MtpLayer, hidden: Any, step: DraftStep, block_size: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (entry, drafts) for each of the step's entries."""
    drafted = layer.first_drafts(hidden, step.rows, step.batch)
    drafts = [[one] for one in drafted.tolist()]
    most = int(step.num_drafts.max(initial=1))
    if most > 1:
        last = _last_rows(step.batch)
        going = np.arange(len(step.entries))
    for number in range(2, most + 1):
        kept = np.flatnonzero(step.num_drafts[going] >= number)
        going = going[kept]
        last = _following(last, kept, drafted[kept], block_size)
        drafted = layer.next_drafts(kept, last)
        for index, one in zip(going, drafted, strict=True):
            drafts[index].append(int(one))
    return [(entry, tuple(ids)) for entry, ids in zip(step.entries, drafts, strict=True)]


def _last_rows(batch: FlatBatch) -> FlatBatch:
    """Return the sampled rows of a batch as a batch of one-token sequences."""
    rows = batch.sampled_rows
    sequences = np.searchsorted(batch.row_starts, rows, side="right") - 1
    return FlatBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        row_starts=np.arange(len(rows) + 1),
        block_tables=batch.block_tables[sequences],
        sampled_rows=np.arange(len(rows)),
    )


def _following(last: FlatBatch, kept: np.ndarray, drafts: np.ndarray, size: int) -> FlatBatch:
    """Return the batch one position on, with the drafts as tokens, for the `kept` sequences."""
    positions = last.positions[kept] + 1
    tables = last.block_tables[kept]
    blocks = tables[np.arange(len(kept)), positions // size]
    return replace(
        last,
        token_ids=drafts,
        positions=positions,
        slots=blocks * size + positions % size,
        row_starts=np.arange(len(kept) + 1),
        block_tables=tables,
        sampled_rows=np.arange(len(kept)),
    )
