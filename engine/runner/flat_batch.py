"""A planned step as flat arrays: one row per token, sequences one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import InternalError
from engine.core.step.step_batch import StepBatch
from engine.runner.kernels.step_rows import lay_out_rows


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
    seats = batch.seats
    row_starts = np.empty(len(batch) + 1, np.int64)
    token_ids, positions, slots, block_tables, sampled, is_good = lay_out_rows(
        batch.rows, batch.starts, batch.num_tokens, batch.num_drafts, batch.is_sampled,
        seats.token_ids, seats.block_tables, seats.num_blocks, limits.block_size,
        limits.max_tokens, limits.max_len, limits.num_blocks, limits.vocab_size, row_starts,
    )  # fmt: skip
    if not is_good:
        raise InternalError(_problem(batch, limits))
    return FlatBatch(token_ids, positions, slots, row_starts, block_tables, sampled)


def _problem(batch: StepBatch, limits: BatchLimits) -> str:
    """Return what is outside `limits` in a batch that cannot be laid out."""
    num_rows = int(batch.num_tokens.sum())
    if num_rows > limits.max_tokens:
        return f"a step of {num_rows} tokens: wanted at most {limits.max_tokens}"
    problems = [_problem_with(batch, entry, limits) for entry in range(len(batch))]
    entry = next(entry for entry, problem in enumerate(problems) if problem)
    return f"sequence {batch[entry].sequence_id}: {problems[entry]}"


def _problem_with(batch: StepBatch, entry: int, limits: BatchLimits) -> str:
    """Return what is outside `limits` in an entry of a batch; empty: nothing is."""
    seats, seat = batch.seats, batch.rows[entry]
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
    held = seats.num_blocks[seat]
    if end > held * limits.block_size:
        return f"{held} blocks for {end} tokens: wanted {-(-end // limits.block_size)}"
    problem = _outside("token id", seats.token_ids[seat, start:end], limits.vocab_size)
    problem = problem or _outside("block id", seats.block_tables[seat], limits.num_blocks)
    if problem or batch.is_sampled[entry]:
        return problem
    following = seats.token_ids[seat, end : end + 1].clip(0)  # -1: there is none
    return _outside("next token id", following, limits.vocab_size)


def _outside(name: str, values: np.ndarray, limit: int) -> str:
    wrong = values[(values < 0) | (values >= limit)]
    return f"{name} {wrong[0]}: wanted 0 to {limit - 1}" if len(wrong) else ""
