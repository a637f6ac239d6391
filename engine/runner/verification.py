"""Draw a sequence's next tokens: one always, and one more for each draft that is accepted.

A draft is accepted exactly when it equals the token that the model itself draws at that position,
with that position's noise. So drafts change how many tokens a step yields and never which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from common.request import TokenLogprobs
from engine.core.plan import DrawnTokens, SampleInput
from engine.runner.sampler import Sampled

Rows = Sequence[Any] | np.ndarray
"""Rows of logits, or what else a sampler takes for a row."""


class RowSampler(Protocol):
    """Draws the token of one row."""

    def sample(self, row: Any, one: SampleInput) -> Sampled: ...


def draw_inputs(first: SampleInput, draft_token_ids: Sequence[int]) -> Iterator[SampleInput]:
    """Yield the inputs of the draws after 0, 1, … drafts; `first` is the first of them."""
    yield first
    for count in range(1, len(draft_token_ids) + 1):
        yield replace(
            first,
            output_index=first.output_index + count,
            output_token_ids=[*first.output_token_ids, *draft_token_ids[:count]],
        )


def draw_tokens(
    sampler: RowSampler, rows: Rows, first: SampleInput, draft_token_ids: Sequence[int]
) -> DrawnTokens:
    """Return the accepted drafts and the model's own token after them.

    Row j, of `drafts + 1` that `sampler` takes, follows the first j drafts; `first` describes the
    draw of row 0. Rows behind the first difference are not read. Destroys logits; raises
    `BadLogits` when a row that is needed is not finite.
    """
    drawn: list[int] = []
    logprobs: list[TokenLogprobs] = []
    wanted = [*draft_token_ids, None]
    for row, one, draft in zip(rows, draw_inputs(first, draft_token_ids), wanted, strict=True):
        token_id, of_token = sampler.sample(row, one)
        drawn.append(token_id)
        if of_token is not None:
            logprobs.append(of_token)
        if token_id != draft:
            break
    return DrawnTokens(tuple(drawn), tuple(logprobs))
