"""A step is laid out row by row, and what the kernels do not check is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from common.errors import InternalError
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.drawing.sampler import sampled_rows
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from tests.support.engine.build import BLOCK_SIZE, Engine, make_request

LIMITS = BatchLimits(
    max_tokens=64, max_len=64, num_blocks=64, block_size=BLOCK_SIZE, vocab_size=2000
)


def decodes() -> StepBatch:
    """Five decodes: three longer ones and, in seats that others left, two shorter ones."""
    engine = Engine(num_blocks=64, seats=5)
    for length, most in ((5, 40), (9, 2), (13, 40), (6, 2), (7, 40)):
        engine.add(make_request(length, seed=length, max_tokens=most, ignore_eos=True))
    engine.step()
    engine.step()
    for length in (3, 4):
        engine.add(make_request(length, seed=length, max_tokens=40, ignore_eos=True))
    engine.step()
    batch = engine.plan().batch
    assert len(batch) == 5
    assert batch.rows.tolist() != sorted(batch.rows.tolist())
    return batch


def columns(flat: FlatBatch) -> list[list[int]]:
    found = [getattr(flat, field.name) for field in fields(flat)]
    assert all(column.dtype == np.int64 for column in found)
    return [column.tolist() for column in found]


def mixed() -> StepBatch:
    """A draft behind a known token, the middle and the end of a prompt, and a plain decode."""
    params = SamplingParams(max_tokens=9)
    sample = SampleInput(params, 1, [1, 2, 3, 4, 5], [6])
    return batch_of(
        [
            ScheduledSequence(1, [6, 30, 31], 5, [4, 2], sample, num_drafts=2),
            ScheduledSequence(2, [8, 9, 10], 3, [7, 9, 8], None, next_token_id=11),
            ScheduledSequence(3, [2, 3, 4, 5, 6], 1, [5, 1], sample),
            ScheduledSequence(4, [6], 5, [6, 3], sample),
            ScheduledSequence(5, [8], 0, [10], None),
        ]
    )


@pytest.mark.parametrize("make", [decodes, mixed])
def test_a_step_is_laid_out_entry_by_entry(make: Callable[[], StepBatch]) -> None:
    batch = make()
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    sampled: list[int] = []
    for one in batch:
        places = range(one.start, one.start + len(one.token_ids))
        tokens += one.token_ids
        positions += places
        slots += [one.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
        starts.append(len(tokens))
        if one.sample is not None:
            sampled += range(len(tokens) - one.num_drafts - 1, len(tokens))
    width = max(len(one.block_table) for one in batch)
    tables = [[*one.block_table, *[0] * (width - len(one.block_table))] for one in batch]
    assert columns(flatten(batch, LIMITS)) == [tokens, positions, slots, starts, tables, sampled]


@pytest.mark.parametrize("make", [decodes, mixed])
def test_a_draw_sees_all_tokens_before_it(make: Callable[[], StepBatch]) -> None:
    batch = make()
    seats: list[int] = []
    num_before: list[int] = []
    for row, one in zip(batch.rows.tolist(), batch, strict=True):
        if one.sample is not None:
            known = one.start + len(one.token_ids) - one.num_drafts
            num_before += range(known, known + one.num_drafts + 1)
            seats += [row] * (one.num_drafts + 1)
    rows = sampled_rows(batch, LIMITS.vocab_size, frozenset())
    assert (rows.histories.tolist(), rows.num_tokens.tolist()) == (seats, num_before)


def test_a_layout_does_not_follow_the_seats() -> None:
    batch = decodes()
    flat = flatten(batch, LIMITS)
    before = columns(flat)
    for array in (batch.starts, batch.rows, batch.seats.token_ids, batch.seats.block_tables):
        array += 1
    assert columns(flat) == before


def change(batch: StepBatch, field: str, entry: int, value: int) -> None:
    """Set an entry of a column, which other batches may share."""
    was = getattr(batch, field)
    column = was.copy()
    column[entry] = value
    column.flags.writeable = was.flags.writeable  # or the kernels are compiled once more
    setattr(batch, field, column)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("starts", -1, "positions -1 to 0: wanted at least one token"),
        ("starts", 60, "blocks for 61 tokens: wanted 16"),
        ("num_tokens", 0, "wanted at least one token"),
        ("num_drafts", -1, "-1 drafts among 1 tokens"),
        ("num_drafts", 1, "1 drafts among 1 tokens"),
        ("max_len", 5, "within 0 to 5"),
        ("max_tokens", 4, "a step of 5 tokens: wanted at most 4"),
        ("token", 2000, "token id 2000: wanted 0 to 1999"),
        ("token", -5, "token id -5: wanted 0 to 1999"),
        ("block", 64, "block id 64: wanted 0 to 63"),
        ("block", -1, "block id -1: wanted 0 to 63"),
        ("num_blocks", 1, "1 blocks for"),
    ],
)
def test_what_the_kernels_do_not_check_is_refused(field: str, value: int, problem: str) -> None:
    batch, limits = decodes(), LIMITS
    seats, row = batch.seats, batch.rows[3]
    if field == "token":
        seats.token_ids[row, batch.starts[3]] = value
    elif field == "block":
        seats.block_tables[row, 0] = value
    elif field == "num_blocks":
        seats.num_blocks[batch.rows] = value
    elif hasattr(batch, field):
        change(batch, field, 3, value)
    else:
        limits = replace(LIMITS, **{field: value})
    with pytest.raises(InternalError, match=problem):
        flatten(batch, limits)


@pytest.mark.parametrize(("token", "is_right"), [(2000, False), (1999, True), (-1, True)])
def test_the_token_after_a_chunk_is_checked(token: int, is_right: bool) -> None:
    batch = mixed()
    batch.seats.token_ids[batch.rows[1], 6] = token
    if is_right:
        flatten(batch, LIMITS)
        return
    with pytest.raises(InternalError, match="sequence 2: next token id 2000: wanted 0 to 1999"):
        flatten(batch, LIMITS)


def test_drafts_are_refused_where_nothing_is_drawn() -> None:
    batch = mixed()
    change(batch, "num_drafts", 1, 1)
    with pytest.raises(InternalError, match="sequence 2: drafts without a sample"):
        flatten(batch, LIMITS)
