"""Draw a step's tokens on the host, from logits that are there, a group of rows at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.core.step.step_batch import StepBatch
from engine.runner.decoder import Decoder
from engine.runner.drawing.sampler import SampledRows, Sampler, token_logprobs
from engine.runner.drawing.token_rules import Biases
from engine.runner.drawing.verification import Draws
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.kernels.sampling.withhold import withhold

MAX_SAMPLED_ROWS = 64
"""The most rows of logits in memory: 39 MB at 152,000 tokens."""


class HostDraw:
    """A `verification.RowDraw` over the decoder's logits."""

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        self._decoder = decoder
        self._sampler = Sampler(vocab_size)

    def draw(self, hidden: Any, sampled: np.ndarray, rows: SampledRows, batch: StepBatch) -> Draws:
        """Draw from the logits after rows `sampled` of `hidden`."""
        draws = Draws()
        is_one_group = len(sampled) <= MAX_SAMPLED_ROWS
        for first in range(0, len(sampled), MAX_SAMPLED_ROWS):
            group = np.arange(first, min(first + MAX_SAMPLED_ROWS, len(sampled)))
            logits = self._decoder.logits(hidden, sampled[group])
            add_draws(draws, self._sampler, logits, rows if is_one_group else rows.take(group))
        return draws


def add_draws(draws: Draws, sampler: Sampler, logits: np.ndarray, rows: SampledRows) -> None:
    """Draw after `rows` and append what was drawn, with log probabilities where asked for.

    The logits of tokens that are not allowed are changed.
    """
    first = len(draws.token_ids)
    if rows.allowed is not None:
        logits = _withheld(logits, rows.allowed)
    drawn, is_drawn = _drawn(sampler, logits, rows)
    if rows.unmasked is not None:
        refused = rows.unmasked.check(logits, drawn, is_drawn)
        if len(refused):
            masks = rows.unmasked.masked(refused)
            again = replace(rows.take(refused), allowed=masks, unmasked=None)
            masked = _withheld(logits[refused], masks)
            drawn[refused], is_drawn[refused] = _drawn(sampler, masked, again)
    draws.token_ids += drawn.tolist()
    draws.is_drawn += is_drawn.tolist()
    num_logprobs = rows.ways["num_logprobs"]
    for row in np.flatnonzero((num_logprobs >= 0) & is_drawn).tolist():
        draws.logprobs[first + row] = token_logprobs(
            logits[row], int(drawn[row]), int(num_logprobs[row])
        )


def _drawn(
    sampler: Sampler, logits: np.ndarray, rows: SampledRows
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token of each row, and whether there is one."""
    drawn, is_drawn = sampler.draw(_biased(logits, rows.biases), rows)
    if rows.allowed is not None:
        # Where all allowed tokens are withheld for another reason, one that is not was drawn.
        is_drawn &= rows.allowed.allows(drawn)
    return drawn, is_drawn


def _biased(logits: np.ndarray, biases: Biases | None) -> np.ndarray:
    """Return logits with these biases; log probabilities are those of the logits without them."""
    if biases is None:
        return logits
    biased = logits.copy()
    for row in np.flatnonzero(biases.has_rows).tolist():
        token_ids, values = biases.of_row(row)
        np.add.at(biased[row], token_ids, values)
    return biased


def _withheld(logits: np.ndarray, allowed: AllowedTokens) -> np.ndarray:
    """Return `logits` without the tokens that are not allowed, changed in place where possible."""
    if not (allowed.mask_rows >= 0).any():
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    withhold(logits, allowed.mask_rows, allowed.masks)
    return logits
