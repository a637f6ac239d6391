"""The copy that hashes: the published XXH3, the right bytes, and nothing beside them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from xxhash import xxh3_64_intdigest

from kv_transfer.lanes import fused_copy
from kv_transfer.lanes.fused_copy import (
    ALIGNMENT,
    BLOCK_BYTES,
    STRIPE_BYTES,
    can_copy,
    copy_rows,
    sum_rows,
)

GUARD = 0xA5
Bytes = npt.NDArray[np.uint8]


def aligned(num_bytes: int) -> Bytes:
    memory = np.full(num_bytes + ALIGNMENT, GUARD, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def numbers(values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


# The shortest rows, whole blocks of 1024, one stripe more, one less, and what nodes have.
@given(
    stripes=st.sampled_from([4, 5, 15, 16, 17, 64, 65, 79, 80, 81, 95, 96, 192, 1024]),
    source_shift=st.integers(0, 63),
    target_shift=st.integers(0, 7),
    seeds=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=90)
def test_every_copy_is_exact_and_its_sum_is_xxh3(
    stripes: int, source_shift: int, target_shift: int, seeds: list[int], seed: int
) -> None:
    size, num_rows, count = 64 * stripes, 7, len(seeds)
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, num_rows * size + 64, dtype=np.uint8)[source_shift:]
    target = aligned(num_rows * size + 256)
    at = ALIGNMENT * target_shift
    here, there = rng.permutation(num_rows)[:count], rng.permutation(num_rows)[:count]
    sources = address(source) + size * numbers(here)
    targets = address(target) + at + size * numbers(there)
    sums = copy_rows(targets, sources, size, numbers(seeds))
    wanted = np.full_like(target, GUARD)
    for row, of, one, found in zip(there, here, seeds, sums, strict=True):
        piece = source[of * size : (of + 1) * size]
        wanted[at + row * size : at + (row + 1) * size] = piece
        assert int(found) == xxh3_64_intdigest(piece.data, one)
    assert np.array_equal(target, wanted)
    assert np.array_equal(sum_rows(sources, size, numbers(seeds)), sums)
    assert np.array_equal(target, wanted)


@pytest.mark.parametrize(
    ("kernel", "stripes"),
    [
        (fused_copy.take_blocks, BLOCK_BYTES // STRIPE_BYTES),
        (fused_copy.take_blocks_of_two, 2 * BLOCK_BYTES // STRIPE_BYTES),
        (fused_copy.take_rest, 1),
    ],
)
def test_the_compiled_copy_loads_each_stripe_once(kernel: Any, stripes: int) -> None:
    """So the sum is of what was copied though the source changes: a volatile load is not repeated.

    Two threads that race show a second load in some runs only, so the optimized code is read. The
    kernel is compiled again for that: numba keeps no code of what it takes out of its cache.
    """
    (signature,) = kernel.signatures
    compiled = njit(signature, nogil=True, error_model="numpy")(kernel.py_func)
    code = compiled.inspect_llvm(signature)
    once = re.findall(r"(%\S+) = load volatile <8 x i64>, .*(%\S+), align", code)
    copied = re.findall(r"store <8 x i64> (%\S+), .*!nontemporal", code)
    assert len(copied) == stripes
    assert len(once) == 2 * stripes, "as many again where rows are only summed"
    loaded = {value for value, _ in once}
    assert set(copied) <= loaded, "what is stored is what was loaded once"
    addresses = [address for _, address in once]
    others = re.findall(r"= load <.*(%\S+), align", code)
    assert len(set(addresses)) == len(once)
    assert not set(addresses) & set(others)


@pytest.mark.parametrize(
    ("target", "row_bytes", "is_possible"),
    [
        (0, 4096, True),
        (16, 4160, True),
        (4096, 12288, True),
        (0, 4032, True),
        (0, 256, True),
        (0, 192, False),
        (0, 320, True),
        (0, 4097, False),
        (8, 4096, False),
    ],
)
def test_what_it_takes(target: int, row_bytes: int, is_possible: bool) -> None:
    assert can_copy(row_bytes, numbers([target])) is is_possible
    assert can_copy(row_bytes, numbers([64, target])) is is_possible


@pytest.mark.parametrize(
    ("row_bytes", "shift", "num_seeds", "words"),
    [
        (192, 0, 1, "192 bytes"),
        (4100, 0, 1, "4100 bytes"),
        (4096, 8, 1, "multiples of 16"),
        (4096, 0, 2, "differ in number"),
    ],
)
def test_what_it_cannot_copy_is_refused(
    row_bytes: int, shift: int, num_seeds: int, words: str
) -> None:
    source, target = aligned(8192), aligned(8192)
    sources, targets = numbers([address(source)]), numbers([address(target) + shift])
    with pytest.raises(ValueError, match=words):
        copy_rows(targets, sources, row_bytes, np.zeros(num_seeds, np.uint64))
    assert np.all(target == GUARD)


@pytest.mark.parametrize(
    ("row_bytes", "num_seeds", "words"), [(4100, 1, "4100 bytes"), (4096, 2, "differ in number")]
)
def test_what_it_cannot_sum_is_refused(row_bytes: int, num_seeds: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sum_rows(numbers([address(aligned(8192))]), row_bytes, np.zeros(num_seeds, np.uint64))
