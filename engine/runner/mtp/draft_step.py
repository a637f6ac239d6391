"""The MTP layer's work after a step: its rows, and the drafts that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from common.errors import InternalError
from engine.core.runner_contract import DrawnTokens
from engine.core.step.step_batch import StepBatch
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
    planned: StepBatch,
    flat: FlatBatch,
    results: Sequence[DrawnTokens | None],
    limits: BatchLimits,
) -> DraftStep | None:
    """Return the draft step after a computed step; None when no next token is known.

    `results` is what the step drew. Rows after a rejected draft are left out, and so is the last
    row of a sequence that failed. Raises `InternalError` for a next token outside the vocabulary.
    """
    num_rows = planned.num_tokens - planned.num_drafts - 1
    last_drawn: list[int] = []
    drawing: list[int] = []
    for entry, result in enumerate(results):
        if result is not None:
            num_rows[entry] += len(result.token_ids)
            drawing.append(entry)
            last_drawn.append(result.token_ids[-1])
    num_rows[~planned.is_sampled] += 1
    kept = np.flatnonzero(num_rows)
    if not len(kept):
        return None
    row_starts = np.concatenate(([0], np.cumsum(num_rows)))
    rows = np.arange(row_starts[-1]) + np.repeat(flat.row_starts[:-1] - row_starts[:-1], num_rows)
    positions = flat.positions[rows]
    next_ids = planned.seats.token_ids[np.repeat(planned.rows, num_rows), positions + 1]
    next_ids = next_ids.astype(np.int64)
    next_ids[row_starts[1:][drawing] - 1] = last_drawn
    _check_known(next_ids, limits.vocab_size)
    entries = [entry for entry in drawing if planned.num_proposals[entry] > 0]
    held = planned.seats.num_blocks[planned.rows] * limits.block_size
    free = np.minimum(held, limits.max_len) - (planned.starts + num_rows)
    num_drafts = np.minimum(planned.num_proposals, 1 + np.maximum(free, 0))
    batch = FlatBatch(
        token_ids=next_ids,
        positions=positions,
        slots=flat.slots[rows],
        row_starts=np.append(row_starts[kept], row_starts[-1]),
        block_tables=flat.block_tables[kept],
        sampled_rows=row_starts[1:][entries] - 1,
    )
    return DraftStep(rows, batch, entries, num_drafts[entries])


def _check_known(next_ids: np.ndarray, vocab_size: int) -> None:
    if next_ids.min() < 0 or next_ids.max() >= vocab_size:
        wrong = next_ids.min() if next_ids.min() < 0 else next_ids.max()
        raise InternalError(f"next token id {wrong}: wanted 0 to {vocab_size - 1}")


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
