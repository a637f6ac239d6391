"""Tokens that a row may not draw, taken out of its logits."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin


@triton.jit
def withhold(logits, mask_rows, masks, VOCABULARY: tl.constexpr, SLICE: tl.constexpr,
             IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Set the logits of tokens whose bit is 0 to -1e30, as on the host. Program: (row, slice).

    Row r has the mask `mask_rows[r]`, 32 tokens to a word, lowest bit first; below 0 it has none.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    if mask_row >= 0:
        token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        is_token = token < VOCABULARY
        words = masks + mask_row * ((VOCABULARY + 31) // 32)
        word = tl.load(words + token // 32, mask=is_token, other=-1)
        is_withheld = is_token & (((word >> (token % 32)) & 1) == 0)
        tl.store(logits + row * VOCABULARY + token, -1.0e30, mask=is_withheld)
