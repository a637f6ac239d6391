"""Draw a sequence's next tokens: one always, and one more for each draft that is accepted.

A draft is accepted exactly when it equals the token that the model itself draws at that position,
with that position's noise. So drafts change how many tokens a step yields and never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.request import TokenLogprobs
from engine.core.plan import DrawnTokens, SampleInput
from engine.runner.sampler import Sampler


def draw_tokens(
    sampler: Sampler, logits: np.ndarray, first: SampleInput, draft_token_ids: Sequence[int]
) -> DrawnTokens:
    """Return the accepted drafts and the model's own token after them.

    Row j of `logits` `[drafts + 1, vocab_size]` follows the first j drafts; `first` describes the
    draw of row 0. Rows behind the first difference are not read. Destroys `logits`; raises
    `BadLogits` when a row that is needed is not finite.
    """
    drawn: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for row, draft in enumerate([*draft_token_ids, None]):
        one = first
        if row:
            one = replace(
                first,
                output_index=first.output_index + row,
                output_token_ids=[*first.output_token_ids, *draft_token_ids[:row]],
            )
        token_id, of_token = sampler.sample(logits[row], one)
        drawn.append(token_id)
        if of_token is not None:
            logprobs.append(of_token)
        if token_id != draft:
            break
    return DrawnTokens(tuple(drawn), tuple(logprobs))
