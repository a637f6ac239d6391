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
    """Return the arrays of `Staging` that `put_masks` writes."""
    return {"masks": (num_rows, -(-vocab_size // 32)), "mask_rows": (num_rows,)}


def masks_of(rows: SampledRows) -> AllowedTokens | None:
    """Return a mask for each row that has one; None: no row has one."""
    if rows.allowed is None:
        return None
    mask_rows = rows.allowed.mask_rows.copy()
    masked = np.flatnonzero(mask_rows >= 0)
    if not len(masked):
        return None
    masks = rows.allowed.masks[mask_rows[masked]]
    mask_rows[masked] = np.arange(len(masked))
    return AllowedTokens(mask_rows, masks)


def put_masks(staging: Staging, allowed: AllowedTokens) -> None:
    """Stage the masks of rows, at the end of their array."""
    first = staging.put_last("masks", allowed.masks)
    staging.put("mask_rows", np.where(allowed.mask_rows < 0, -1, allowed.mask_rows + first))


def bind_masks(make: Launches, logits: int, staging: Staging, num_rows: int) -> Bound:
    """Return the launch that changes the logits of rows which have a mask."""
    constants = {"VOCABULARY": make.spec.vocab_size, "SLICE": DRAW_SLICE}
    kernel = make.kernel(withhold, _TYPES, constants, 4, 1)
    grid = (num_rows, make.num_slices)
    return kernel.bind(grid, logits, staging["mask_rows"], staging["masks"])
