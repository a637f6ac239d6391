"""Accept drafts: a step yields one token for each sequence, and one more for each accepted draft.

A draft is accepted exactly when it equals the token that the model itself draws at that position,
with that position's noise. So drafts change how many tokens a step yields and never which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from common.request import TokenLogprobs
from engine.core.runner_contract import DrawnTokens, SampleInput
from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.sampler import SampledRows
from engine.runner.flat_batch import FlatBatch


@dataclass(slots=True)
class Draws:
    """What was drawn after each row of `FlatBatch.sampled_rows`, drafts' rows included.

    `is_drawn` is False where no token could be drawn. `logprobs` are by row.
    """

    token_ids: list[int] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class RowDraw(Protocol):
    """Draws a token after each sampled row of a step."""

    def draw(self, hidden: Any, sampled: np.ndarray, rows: SampledRows, batch: StepBatch) -> Draws:
        """Draw from the logits after rows `sampled` of `hidden`, in the way that `rows` describes.

        `batch` is the step whose rows they are.
        """


class PlainSteps(Protocol):
    """Computes plain steps from their rows to their tokens, and goes on after them."""

    def begin(self, flat: FlatBatch, batch: StepBatch) -> Any:
        """Begin a plain step, unless that was done after the step before; return `hidden`.

        `hidden` is the decoder's, and the runner's `RowDraw` has the step's tokens. May begin the
        step after it, too: then it sets `batch.has_gone_on`.
        """


def draw_inputs(batch: StepBatch) -> Iterator[SampleInput]:
    """Yield the inputs of all draws of a batch one by one, in the order of the sampled rows."""
    for entry in np.flatnonzero(batch.is_sampled).tolist():
        first = batch[entry].sample
        assert first is not None
        yield first
        drafts = batch.drafts(entry)
        for count in range(1, len(drafts) + 1):
            yield replace(
                first,
                output_index=first.output_index + count,
                output_token_ids=[*first.output_token_ids, *drafts[:count]],
            )


def accept_drafts(batch: StepBatch, draws: Draws) -> tuple[list[DrawnTokens | None], list[int]]:
    """Return what each entry drew, None where it draws nothing, and the entries that could not.

    Rows after the first wrong draft of an entry are not looked at.
    """
    results: list[DrawnTokens | None] = [None] * len(batch)
    bad: list[int] = []
    token_ids, logprobs = draws.token_ids, draws.logprobs
    num_drafts = batch.num_drafts.tolist()
    row = 0
    for entry in np.flatnonzero(batch.is_sampled).tolist():
        first = last = row
        row += num_drafts[entry] + 1
        if num_drafts[entry]:
            drafts = batch.drafts(entry)
            while last < first + len(drafts) and token_ids[last] == drafts[last - first]:
                last += 1
        if not all(draws.is_drawn[first : last + 1]):
            bad.append(entry)
            continue
        found: tuple[TokenLogprobs, ...] = ()
        if first in logprobs:
            found = tuple(logprobs[one] for one in range(first, last + 1))
        results[entry] = DrawnTokens(tuple(token_ids[first : last + 1]), found)
    return results, bad
