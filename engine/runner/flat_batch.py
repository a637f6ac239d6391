"""A planned step as flat arrays: one row per token, sequences one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.blocks import blocks_for
from common.errors import InternalError
from engine.core.plan import ScheduledSequence


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


def flatten(batch: Sequence[ScheduledSequence], limits: BatchLimits) -> FlatBatch:
    """Lay out a non-empty `batch`; `InternalError` when a sequence is outside `limits`.

    The kernels do not check bounds, so every index is checked here.
    """
    counts = [len(sequence.token_ids) for sequence in batch]
    row_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    num_rows = int(row_starts[-1])
    if num_rows > limits.max_tokens:
        raise InternalError(f"a step of {num_rows} tokens: wanted at most {limits.max_tokens}")
    token_ids = np.empty(num_rows, np.int64)
    positions = np.empty(num_rows, np.int64)
    slots = np.empty(num_rows, np.int64)
    width = max(len(sequence.block_table) for sequence in batch)
    block_tables = np.zeros((len(batch), max(1, width)), np.int64)
    for index, sequence in enumerate(batch):
        end = sequence.start + counts[index]
        _check_sequence(sequence, end, limits)
        rows = slice(row_starts[index], row_starts[index + 1])
        table = block_tables[index, : len(sequence.block_table)]
        table[:] = sequence.block_table
        token_ids[rows] = sequence.token_ids
        positions[rows] = np.arange(sequence.start, end)
        slots[rows] = (
            table[positions[rows] // limits.block_size] * limits.block_size
            + positions[rows] % limits.block_size
        )
    for name, values, limit in (
        ("token id", token_ids, limits.vocab_size),
        ("block id", block_tables, limits.num_blocks),
    ):
        if values.min() < 0 or values.max() >= limit:
            wrong = values.min() if values.min() < 0 else values.max()
            raise InternalError(f"{name} {wrong}: wanted 0 to {limit - 1}")
    _check_next_tokens(batch, limits)
    sampled = [
        np.arange(end - 1 - sequence.num_drafts, end)
        for sequence, end in zip(batch, row_starts[1:], strict=True)
        if sequence.sample is not None
    ]
    sampled_rows = np.concatenate(sampled) if sampled else np.zeros(0, np.int64)
    return FlatBatch(token_ids, positions, slots, row_starts, block_tables, sampled_rows)


def _check_next_tokens(batch: Sequence[ScheduledSequence], limits: BatchLimits) -> None:
    for sequence in batch:
        one = sequence.next_token_id
        if one is not None and not 0 <= one < limits.vocab_size:
            raise InternalError(f"next token id {one}: wanted 0 to {limits.vocab_size - 1}")


def _check_sequence(sequence: ScheduledSequence, end: int, limits: BatchLimits) -> None:
    name = f"sequence {sequence.sequence_id}"
    if not 0 <= sequence.start < end <= limits.max_len:
        raise InternalError(
            f"{name}: positions {sequence.start} to {end}: wanted at least one token, "
            f"within 0 to {limits.max_len}"
        )
    if not 0 <= sequence.num_drafts < len(sequence.token_ids):
        raise InternalError(
            f"{name}: {sequence.num_drafts} drafts among {len(sequence.token_ids)} tokens: "
            "wanted at least one known token before them"
        )
    if sequence.num_drafts and sequence.sample is None:
        raise InternalError(f"{name}: drafts without a sample to verify them with")
    needed = blocks_for(end, limits.block_size)
    if len(sequence.block_table) < needed:
        raise InternalError(
            f"{name}: {len(sequence.block_table)} blocks for {end} tokens: wanted {needed}"
        )
