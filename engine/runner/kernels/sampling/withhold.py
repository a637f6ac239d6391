"""Withhold the tokens that a grammar does not allow, in a step's logits."""

from __future__ import annotations

import numpy as np
from numba import njit

WITHHELD = np.float32(-1e30)
"""The logit of a withheld token: its weight is 0 at every temperature, and penalties keep it
finite, so the checks of the sampler still find what is not."""


@njit("void(float32[:, ::1], int64[::1], int32[:, ::1])", nogil=True, cache=True)
def withhold(logits: np.ndarray, mask_rows: np.ndarray, masks: np.ndarray) -> None:
    """Set the logits of tokens whose bit is 0 to `WITHHELD`; all of a row without a bit to NaN.

    Row r of `logits` `[rows, vocab_size]` has the mask `masks[mask_rows[r]]`, 32 tokens to a word,
    lowest bit first; a row below 0 has none.
    """
    vocab_size = logits.shape[1]
    for row in range(len(mask_rows)):
        if mask_rows[row] < 0:
            continue
        words = masks[mask_rows[row]]
        value = np.float32(np.nan)
        for word in words:
            if word != 0:
                value = WITHHELD
                break
        for number in range(len(words)):
            word = words[number]
            if word == -1:
                continue
            start = number * 32
            for bit in range(min(32, vocab_size - start)):
                if not (word >> bit) & 1:
                    logits[row, start + bit] = value
