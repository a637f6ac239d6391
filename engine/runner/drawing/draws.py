"""Draw a token after each sampled row of a step, and accept drafts by what was drawn.

A step yields one token for each sequence, and one more for each accepted draft. A draft is accepted
exactly when it equals the token that the model itself draws at that position, with that position's
noise. So drafts change how many tokens a step yields and never which.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from common.request import TokenLogprobs
from engine.core.runner_contract import DrawnTokens
from engine.core.step.step_batch import StepBatch
from engine.runner.decoder import Decoder
from engine.runner.drawing.sampler import SampledRows, Sampler, token_logprobs
from engine.runner.drawing.token_rules import Biases
from engine.runner.flat_batch import FlatBatch
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.kernels.sampling.withhold import withhold


@dataclass(slots=True)
class Draws:
    """What was drawn after each row of `FlatBatch.sampled_rows`, drafts' rows included.

    `is_drawn` is False where no token could be drawn. `logprobs` are by row. `left_behind` are rows
    of a plain step whose token is not the one that the step begun after it has taken.
    """

    token_ids: list[int] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    left_behind: list[int] = field(default_factory=list)


class RowDraw(Protocol):
    """Draws a token after each sampled row of a step."""

    asks_afterwards: bool
    """Whether it draws rows without the mask of their grammar, where that can be checked after the
    draw (`SampledRows.unmasked`)."""

    def draw(self, hidden: Any, sampled: np.ndarray, rows: SampledRows, batch: StepBatch) -> Draws:
        """Draw from the logits after rows `sampled` of `hidden`, in the way that `rows` describes.

        `batch` is the step whose rows they are.
        """


class DecodingSteps(Protocol):
    """Computes steps that decode from their rows to their tokens, and goes on after plain ones."""

    def begin(self, flat: FlatBatch, batch: StepBatch) -> Any:
        """Begin a step with a draw after each row, unless that was done before; return `hidden`.

        `hidden` is the decoder's, and the runner's `RowDraw` has the step's tokens. May set
        `batch.has_gone_on`: then the step after it is begun now or, at the latest, by the draw.
        """


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


MAX_SAMPLED_ROWS = 64
"""The most rows of logits in memory: 39 MB at 152,000 tokens."""


class HostDraw:
    """A `RowDraw` on the host: from the decoder's logits, a group of rows at a time."""

    asks_afterwards = True

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
