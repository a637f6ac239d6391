"""Inputs of the draws after a step's graph: arrays of `Staging`, one row for each row of the step.

The large array is the first and is filled from its end, so that few unused bytes are sent with it.
"""

from __future__ import annotations

from engine.runner.gpu.drawing.filter_launches import staged_filters
from engine.runner.gpu.drawing.mask_launches import staged_masks


def staged_rules(num_rows: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of masks, ways of draws, filters, and numbers of log probabilities."""
    rows = (num_rows,)
    return {
        **staged_masks(num_rows, vocab_size),
        "draw_temperatures": rows, "draw_seeds": (num_rows, 2), "draw_indices": rows,
        **staged_filters(num_rows),
        "num_tops": rows, "weighed_temperatures": rows,
    }  # fmt: skip
