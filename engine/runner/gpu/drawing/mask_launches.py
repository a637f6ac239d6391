"""Masks of the tokens that rows may draw: on the host as bits, and the launch that applies them."""

from __future__ import annotations

import numpy as np

from engine.runner.drawing.sampler import SampledRows
from engine.runner.gpu.kernels.withholding import withhold
from engine.runner.gpu.launches import DRAW_SLICE, Bound, Launches
from engine.runner.gpu.steps.staging import Staging
from engine.runner.grammars.allowed_tokens import AllowedTokens

_TYPES = {"logits": "*fp32", "mask_rows": "*i32", "masks": "*i32"}


def staged_masks(num_rows: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the arrays of `Staging` that `put_masks` writes; the large one stands last."""
    return {"mask_rows": (num_rows,), "masks": (num_rows, -(-vocab_size // 32))}


def masks_of(rows: SampledRows, on_host: np.ndarray, vocab_size: int) -> AllowedTokens | None:
    """Return what rows may draw that are not drawn on the host; None: all may draw everything.

    Tokens that are withheld one by one have no bit either.
    """
    has_mask = np.diff(rows.withheld_starts) > 0
    if rows.allowed is not None:
        has_mask |= rows.allowed.mask_rows >= 0
    masked = (has_mask & ~on_host).nonzero()[0]
    if not len(masked):
        return None
    mask_rows = np.full(len(rows), -1, np.int64)
    mask_rows[masked] = np.arange(len(masked))
    masks = np.full((len(masked), -(-vocab_size // 32)), -1, np.int32)
    for mask, row in zip(masks.view(np.uint32), masked.tolist(), strict=True):
        if rows.allowed is not None and rows.allowed.mask_rows[row] >= 0:
            mask[:] = rows.allowed.masks.view(np.uint32)[rows.allowed.mask_rows[row]]
        ids = rows.withheld_ids[rows.withheld_starts[row] : rows.withheld_starts[row + 1]]
        np.bitwise_and.at(mask, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return AllowedTokens(mask_rows, masks)


def put_masks(staging: Staging, allowed: AllowedTokens) -> None:
    """Write the masks of rows."""
    staging.put("mask_rows", allowed.mask_rows)
    staging.put("masks", allowed.masks)


def bind_masks(make: Launches, logits: int, staging: Staging, num_rows: int) -> Bound:
    """Return the launch that changes the logits of rows which have a mask."""
    constants = {"VOCABULARY": make.spec.vocab_size, "SLICE": DRAW_SLICE}
    kernel = make.kernel(withhold, _TYPES, constants, 4, 1)
    grid = (num_rows, make.num_slices)
    return kernel.bind(grid, logits, staging["mask_rows"], staging["masks"])
