"""The sum that a card makes of a block's bytes, in numpy (`kernels/gathering.py`)."""

from __future__ import annotations

import numpy as np

_INDEX = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def bytes_sum(content: np.ndarray) -> int:
    """Return the sum of some bytes, in words of 8; zeros follow the last one."""
    padded = np.zeros(-(-content.size // 8) * 8, np.uint8)
    padded[: content.size] = content
    words = padded.view("<u8")
    mixed = words + _INDEX * np.arange(1, words.size + 1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))
