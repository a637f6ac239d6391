"""A step of plain decodes is laid out as any other step is, with fewer array operations."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from common.errors import InternalError
from engine.core.step.step_batch import StepBatch
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
    assert batch.is_plain
    assert len(batch) == 5
    assert batch.rows.tolist() != sorted(batch.rows.tolist())
    return batch


def columns(flat: FlatBatch) -> list[list[int]]:
    found = [getattr(flat, field.name) for field in fields(flat)]
    assert all(column.dtype == np.int64 for column in found)
    return [column.tolist() for column in found]


def test_plain_decodes_are_laid_out_as_any_other_step() -> None:
    batch = decodes()
    plain = columns(flatten(batch, LIMITS))
    batch.is_plain = False
    assert plain == columns(flatten(batch, LIMITS))


def test_a_layout_does_not_follow_the_seats() -> None:
    batch = decodes()
    flat = flatten(batch, LIMITS)
    before = columns(flat)
    for array in (batch.starts, batch.rows, batch.seats.token_ids, batch.seats.block_tables):
        array += 1
    assert columns(flat) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("starts", -1),
        ("starts", 60),
        ("max_len", 10),
        ("max_tokens", 4),
        ("token", 2000),
        ("token", -5),
        ("block", 64),
        ("block", -1),
        ("num_blocks", 1),
    ],
)
def test_what_the_kernels_do_not_check_is_refused_alike(field: str, value: int) -> None:
    batch, limits = decodes(), LIMITS
    seats, row = batch.seats, batch.rows[3]
    if field == "starts":
        batch.starts[3] = value
    elif field == "token":
        seats.token_ids[row, batch.starts[3]] = value
    elif field == "block":
        seats.block_tables[row, 0] = value
    elif field == "num_blocks":
        seats.num_blocks[batch.rows] = value
    else:
        given = {one.name: getattr(LIMITS, one.name) for one in fields(LIMITS)}
        limits = BatchLimits(**{**given, field: value})
    with pytest.raises(InternalError) as plain:
        flatten(batch, limits)
    batch.is_plain = False
    with pytest.raises(InternalError) as general:
        flatten(batch, limits)
    assert str(plain.value) == str(general.value)
