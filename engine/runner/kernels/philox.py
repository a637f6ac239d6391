"""Philox4x32-10, the counter-based generator of the noise of every token draw.

From Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11): a block of
four 32-bit words is a pure function of a 128-bit counter and a 64-bit key. There is no state to
store or move, so a request that continues on another node continues with the same noise.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import uint32, uint64

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_NUM_ROUNDS = 10


# Inlined, because as a function of its own it takes twice the time.
@numba.njit(inline="always")
def _rounds(words, key):  # type: ignore[no-untyped-def]
    """Turn counters into blocks, each round for all of them, so that vectors can be used."""
    k0, k1 = uint32(key), uint32(key >> uint64(32))
    for _ in range(_NUM_ROUNDS):
        for j in range(words.shape[1]):
            product_0 = uint64(_MULTIPLIER_0) * uint64(words[0, j])
            product_1 = uint64(_MULTIPLIER_1) * uint64(words[2, j])
            words[0, j] = uint32(product_1 >> uint64(32)) ^ words[1, j] ^ k0
            words[1, j] = uint32(product_1)
            words[2, j] = uint32(product_0 >> uint64(32)) ^ words[3, j] ^ k1
            words[3, j] = uint32(product_0)
        k0 = uint32(k0 + uint32(_WEYL_0))
        k1 = uint32(k1 + uint32(_WEYL_1))


@numba.njit("void(uint32[:, ::1], uint32, uint32, uint64)", nogil=True, cache=True)
def philox_blocks(words: np.ndarray, first: int, second: int, key: int) -> None:
    """Fill `words` ([4, n] uint32) with the blocks of n successive counters.

    Column j is the block of key `key` (low word first) and counter (first + j, second, 0, 0).
    """
    for j in range(words.shape[1]):
        words[0, j] = uint32(first + uint32(j))
        words[1, j] = second
        words[2, j] = uint32(0)
        words[3, j] = uint32(0)
    _rounds(words, key)


@numba.njit("void(uint32[:, ::1], uint32, uint64)", nogil=True, cache=True)
def philox_at(words: np.ndarray, second: int, key: int) -> None:
    """Fill `words` ([4, n] uint32) with the blocks of counters (words[0, j], second, 0, 0)."""
    for j in range(words.shape[1]):
        words[1, j] = second
        words[2, j] = uint32(0)
        words[3, j] = uint32(0)
    _rounds(words, key)
