"""Why a sequence of a step has no token: its request, its grammar, or a bug."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from common.errors import InternalError, InvalidRequest, PdserveError
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.draws import Draws
from engine.runner.drawing.sampler import SampledRows


def why_undrawn(
    bad: Iterable[int],
    batch: StepBatch,
    draws: Draws,
    rows: SampledRows,
    failures: Mapping[int, PdserveError],
) -> dict[int, PdserveError]:
    """Return the error of each entry of `bad`, which drew nothing.

    `failures` are those of grammars, by seat. Where the request's own rules about tokens leave none
    it is an `InvalidRequest`: another node would come to the same. Else it is a bug.
    """
    counts = np.where(batch.is_sampled, batch.num_drafts + 1, 0)
    first_rows = (np.cumsum(counts) - counts).tolist()
    errors: dict[int, PdserveError] = {}
    for entry in bad:
        row = draws.is_drawn.index(False, first_rows[entry])
        failure = failures.get(int(batch.rows[entry]))
        if failure is not None:
            errors[entry] = failure
        elif _has_nothing_left(rows, row):
            errors[entry] = InvalidRequest(
                f"no token is left to draw behind {rows.output_indices[row]} tokens: what the "
                "grammar or allowed_token_ids allows is withheld by bad_words or min_tokens",
                param="bad_words",
            )
        else:
            errors[entry] = InternalError("logits are not finite, or no token can be drawn")
    return errors


def _has_nothing_left(rows: SampledRows, row: int) -> bool:
    """Return whether every token that a row may draw is withheld from it."""
    if rows.allowed is None or rows.allowed.mask_rows[row] < 0:
        return False
    left = rows.allowed.masks[rows.allowed.mask_rows[row]].view(np.uint32).copy()
    ids = rows.withheld_ids[rows.withheld_starts[row] : rows.withheld_starts[row + 1]]
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return not left.any()
