"""Tokens drawn without a model: the seed of a request is the number of tokens of its answer.

The last one is the stop token of the request, and all others are equal. A token depends on the seed
and its index alone, so an attempt that goes on elsewhere draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.core.runner_contract import DrawnTokens
from engine.core.step.step_batch import StepBatch
from simulator.clients import FILLER_TOKEN_ID, STOP_TOKEN_ID


def num_left(batch: StepBatch) -> list[int]:
    """Return how many tokens of its answer each entry has still to draw."""
    seats = batch.seats
    # Row by row: steps are of a few entries, most often.
    length_of, num_prompt_of = seats.sampling["seed"].item, seats.num_prompt.item
    num_known_of = seats.num_known.item
    return [
        length_of(row) - (num_known_of(row) - num_prompt_of(row)) for row in batch.rows.tolist()
    ]


def not_last(num_entries: int, num_steps: int) -> npt.NDArray[np.int64]:
    """Return `[entries, steps]` tokens of answers that do not end with them."""
    return np.full((num_entries, num_steps), FILLER_TOKEN_ID, np.int64)


def drawn(batch: StepBatch, num_steps: int, num_left: Sequence[int]) -> list[DrawnTokens | None]:
    """Return the tokens of each entry when the step is run `num_steps` times; None: it draws none.

    Each entry has `num_left` tokens to draw; no answer ends before the last run.
    """
    tokens = [_drawn_by_one(num_steps, left == num_steps) for left in num_left]
    if batch.is_plain_decodes:
        return list(tokens)
    return [one if draws else None for one, draws in zip(tokens, batch.is_sampled, strict=True)]


@lru_cache(maxsize=256)
def _drawn_by_one(num_steps: int, is_end: bool) -> DrawnTokens:
    last = STOP_TOKEN_ID if is_end else FILLER_TOKEN_ID
    return DrawnTokens((FILLER_TOKEN_ID,) * (num_steps - 1) + (last,))
