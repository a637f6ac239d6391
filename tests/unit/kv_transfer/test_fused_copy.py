"""The copy that hashes: the published XXH3, the right bytes, and nothing beside them."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kv_transfer.shm.fused_copy import ALIGNMENT, can_copy, copy_summed

GUARD = 0xA5
Bytes = npt.NDArray[np.uint8]


def aligned(num_bytes: int) -> Bytes:
    memory = np.full(num_bytes + ALIGNMENT, GUARD, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def addresses(memory: Bytes, offsets: list[int]) -> npt.NDArray[np.uint64]:
    return np.array([memory.ctypes.data + offset for offset in offsets], np.uint64)


# Whole blocks of 1024, one stripe more, one less, and what nodes have.
@given(
    stripes=st.sampled_from([64, 65, 79, 80, 81, 95, 96, 192, 1024]),
    source_shift=st.integers(0, 63),
    target_shift=st.integers(0, 7),
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_every_copy_is_exact_and_its_sum_is_xxh3(
    stripes: int, source_shift: int, target_shift: int, seeds: list[int], data: st.DataObject
) -> None:
    size, count = 64 * stripes, len(seeds)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    source = rng.integers(0, 256, count * size + 64, dtype=np.uint8)
    # A gap of a vector between the targets, and one at each end.
    target = aligned((count + 1) * (size + 64) + 128)
    order = data.draw(st.permutations(range(count)))
    here = [source_shift + size * index for index in range(count)]
    there = [64 + ALIGNMENT * target_shift + (size + 64) * place for place in order]
    sums = copy_summed(
        addresses(target, there), addresses(source, here), size, np.array(seeds, np.uint64)
    )
    wanted = np.full_like(target, GUARD)
    for seed, start, end, found in zip(seeds, here, there, sums, strict=True):
        piece = source[start : start + size]
        wanted[end : end + size] = piece
        assert int(found) == xxh3_64_intdigest(piece.data, seed)
    assert np.array_equal(target, wanted)


def test_the_sum_is_of_what_was_copied_though_the_source_changes() -> None:
    size = 1 << 16
    source, target = aligned(size), aligned(size)
    words = source.view(np.uint64)
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            words[:] += np.uint64(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(500):
            (found,) = copy_summed(
                addresses(target, [0]), addresses(source, [0]), size, np.zeros(1, np.uint64)
            )
            assert int(found) == xxh3_64_intdigest(target.data)
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("num_bytes", "is_possible"),
    [(4096, True), (4160, True), (12288, True), (4032, False), (4097, False), (256, False)],
)
def test_sizes_that_it_takes(num_bytes: int, is_possible: bool) -> None:
    assert can_copy(num_bytes) is is_possible


@pytest.mark.parametrize(
    ("num_bytes", "shift", "num_seeds", "words"),
    [
        (256, 0, 1, "256 bytes"),
        (4100, 0, 1, "4100 bytes"),
        (4096, 8, 1, "not a multiple of 16"),
        (4096, 0, 2, "differ in number"),
    ],
)
def test_what_it_cannot_copy_is_refused(
    num_bytes: int, shift: int, num_seeds: int, words: str
) -> None:
    source, target = aligned(8192), aligned(8192)
    with pytest.raises(ValueError, match=words):
        copy_summed(
            addresses(target, [shift]),
            addresses(source, [0]),
            num_bytes,
            np.zeros(num_seeds, np.uint64),
        )
    assert np.all(target == GUARD)
