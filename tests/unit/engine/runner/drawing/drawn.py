"""What verification draws, by counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from engine.core.runner_contract import DrawnTokens, SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.decoder import Decoder
from engine.runner.drawing.draws import HostDraw, accept_drafts
from engine.runner.drawing.sampler import sampled_rows


class GivenLogits:
    """A decoder whose logits are given."""

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits

    def logits(self, hidden: object, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._logits[rows])


def drawn_from(
    logits: np.ndarray,
    first: SampleInput,
    drafts: Sequence[int],
    eos_token_ids: frozenset[int] = frozenset(),
) -> DrawnTokens | None:
    """What a sequence draws from its rows of logits, one more than drafts; None if it cannot."""
    known = [*first.prompt_token_ids, *first.output_token_ids]
    entry = ScheduledSequence(
        0, [known[-1], *drafts], len(known) - 1, range(9), first, num_drafts=len(drafts)
    )
    batch = batch_of([entry])
    rows = sampled_rows(batch, logits.shape[1], eos_token_ids)
    draw = HostDraw(cast(Decoder, GivenLogits(logits)), logits.shape[1])
    draws = draw.draw(None, np.arange(len(drafts) + 1), rows, batch)
    (result,), bad = accept_drafts(batch, draws)
    assert (result is None) == (bad == [0])
    return result
