"""Philox4x32-10 against the published vectors, by way of a plain Python version of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.runner.kernels.sampling.philox import largest_word, philox_blocks

UINT32 = st.integers(0, 2**32 - 1)


def reference_block(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c0, 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_reference_agrees_with_random123_known_answers(counter: str, key: str, wanted: str) -> None:
    def words(text: str) -> tuple[int, ...]:
        return tuple(int(word, 16) for word in text.split())

    k0, k1 = words(key)
    assert reference_block(words(counter), (k0, k1)) == words(wanted)


@given(first=UINT32, second=UINT32, key=st.integers(0, 2**64 - 1), num=st.integers(1, 70))
def test_blocks_are_those_of_successive_counters(
    first: int, second: int, key: int, num: int
) -> None:
    words = np.empty((4, num), np.uint32)
    philox_blocks(words, np.uint32(first), np.uint32(second), np.uint64(key))
    for column in (0, num // 2, num - 1):
        counter = ((first + column) % 2**32, second, 0, 0)
        wanted = reference_block(counter, (key % 2**32, key >> 32))
        assert tuple(words[:, column].tolist()) == wanted


@njit  # type: ignore[untyped-decorator]
def largest_of(first: int, num_blocks: int, second: int, key: int) -> Any:
    return largest_word(first, num_blocks, second, key)


@given(first=UINT32, second=UINT32, key=st.integers(0, 2**64 - 1), num=st.sampled_from([8, 16, 64]))
def test_the_largest_word_is_that_of_all_blocks(
    first: int, second: int, key: int, num: int
) -> None:
    words = np.empty((4, num), np.uint32)
    philox_blocks(words, np.uint32(first), np.uint32(second), np.uint64(key))
    largest = largest_of(np.uint32(first), num, np.uint32(second), np.uint64(key))
    assert largest == words.max()
