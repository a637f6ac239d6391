"""A planned step as flat arrays: one row per token, sequences one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import InternalError
from engine.core.step.step_batch import StepBatch
from engine.runner.kernels.plain_rows import lay_out_plain


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A step as int64 arrays.

    Per token: `token_ids`, `positions` and `slots`. Per sequence: `block_tables` (padded with 0)
    and its rows, `row_starts[s]` to `row_starts[s + 1]`. `sampled_rows` are the rows after which
    tokens may be drawn, in order: for each sequence that samples, those of its last known token and
    of its drafts.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    row_starts: np.ndarray
    block_tables: np.ndarray
    sampled_rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits that buffers, tables and cache were allocated for."""

    max_tokens: int
    max_len: int
    num_blocks: int
    block_size: int
    vocab_size: int


def flatten(batch: StepBatch, limits: BatchLimits) -> FlatBatch:
    """Lay out a non-empty `batch`; `InternalError` when a sequence is outside `limits`.

    The kernels do not check bounds, so every index is checked here. The arrays are copies, so the
    batch's seats may change while the step runs.
    """
    plain = _flatten_plain(batch, limits) if batch.is_plain else None
    if plain is not None:
        return plain
    row_starts = np.zeros(len(batch) + 1, np.int64)
    batch.num_tokens.cumsum(out=row_starts[1:])
    num_rows = int(row_starts[-1])
    if num_rows > limits.max_tokens:
        raise InternalError(f"a step of {num_rows} tokens: wanted at most {limits.max_tokens}")
    _check_entries(batch, limits)
    seats, size = batch.seats, limits.block_size
    rows = np.repeat(batch.rows, batch.num_tokens)
    positions = np.repeat(batch.starts - row_starts[:-1], batch.num_tokens)
    positions += np.arange(num_rows)
    token_ids = seats.token_ids[rows, positions].astype(np.int64)
    width = max(1, int(seats.num_blocks[batch.rows].max()))
    block_tables = seats.block_tables[batch.rows, :width].astype(np.int64)
    slots = seats.block_tables[rows, positions // size] * np.int64(size) + positions % size
    _check_range("token id", token_ids, limits.vocab_size)
    _check_range("block id", block_tables, limits.num_blocks)
    _check_next_tokens(batch, limits)
    return FlatBatch(
        token_ids, positions, slots, row_starts, block_tables, _sampled_rows(batch, row_starts)
    )


def _flatten_plain(batch: StepBatch, limits: BatchLimits) -> FlatBatch | None:
    """Do what `flatten` does for a plain batch, as nearly all steps are; None: outside `limits`."""
    seats, count = batch.seats, len(batch)
    *laid_out, is_good = lay_out_plain(
        batch.rows, batch.starts, seats.token_ids, seats.block_tables, seats.num_blocks,
        limits.block_size, limits.max_len, limits.num_blocks, limits.vocab_size,
    )  # fmt: skip
    if not is_good or count > limits.max_tokens:
        return None
    token_ids, positions, slots, block_tables = laid_out
    row_starts = np.arange(count + 1)
    return FlatBatch(token_ids, positions, slots, row_starts, block_tables, row_starts[:-1])


def _check_next_tokens(batch: StepBatch, limits: BatchLimits) -> None:
    """Check the known tokens after chunks, which a drafting layer reads; -1: there is none."""
    chunks = np.flatnonzero(~batch.is_sampled)
    if not len(chunks):
        return
    ends = batch.starts[chunks] + batch.num_tokens[chunks]
    next_ids = batch.seats.token_ids[batch.rows[chunks], ends]
    if next_ids.max() >= limits.vocab_size:
        raise InternalError(f"next token id {next_ids.max()}: wanted 0 to {limits.vocab_size - 1}")


def _sampled_rows(batch: StepBatch, row_starts: np.ndarray) -> np.ndarray:
    entries = np.flatnonzero(batch.is_sampled)
    if row_starts[-1] == len(batch):
        return entries
    counts = batch.num_drafts[entries] + 1
    ends = row_starts[entries + 1]
    behind = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(ends - behind, counts)


def _check_range(name: str, values: np.ndarray, limit: int) -> None:
    if values.view(np.uint64).max() >= limit:  # a negative number is a huge one there
        wrong = values.min() if values.min() < 0 else values.max()
        raise InternalError(f"{name} {wrong}: wanted 0 to {limit - 1}")


def _check_entries(batch: StepBatch, limits: BatchLimits) -> None:
    """Raise `InternalError` for the first entry whose positions, drafts or blocks do not fit."""
    ends = batch.starts + batch.num_tokens
    num_slots = batch.seats.num_blocks[batch.rows] * limits.block_size
    num_behind = batch.num_tokens - batch.num_drafts - 1
    # Joined bit by bit, numbers are negative if one of them is.
    joined = batch.starts | batch.num_drafts | num_behind | (limits.max_len - ends)
    joined |= num_slots - ends
    wrong = np.flatnonzero((joined < 0) | (batch.num_drafts > 0) & ~batch.is_sampled)
    if len(wrong):
        entry = int(wrong[0])
        problem = _problem_with(batch, entry, limits)
        raise InternalError(f"sequence {batch[entry].sequence_id}: {problem}")


def _problem_with(batch: StepBatch, entry: int, limits: BatchLimits) -> str:
    start, count = int(batch.starts[entry]), int(batch.num_tokens[entry])
    end, drafts = start + count, int(batch.num_drafts[entry])
    if start < 0 or count < 1 or end > limits.max_len:
        return (
            f"positions {start} to {end}: wanted at least one token, within 0 to {limits.max_len}"
        )
    if not 0 <= drafts < count:
        return f"{drafts} drafts among {count} tokens: wanted at least one known token before them"
    if drafts and not batch.is_sampled[entry]:
        return "drafts without a sample to verify them with"
    held = batch.seats.num_blocks[batch.rows[entry]]
    return f"{held} blocks for {end} tokens: wanted {-(-end // limits.block_size)}"
