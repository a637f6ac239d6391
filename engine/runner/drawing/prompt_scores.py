"""How likely a prompt's own tokens were: log-softmax of the logits of its rows, a few at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.prompt_logprobs import PromptLogprobs
from engine.core.step.prompt_rows import PromptRows, prompt_rows
from engine.core.step.step_batch import StepBatch
from engine.runner.decoder import Decoder
from engine.runner.drawing.draws import MAX_SAMPLED_ROWS
from engine.runner.drawing.sampler import log_of_sum
from engine.runner.flat_batch import FlatBatch
from engine.runner.kernels.sampling.filters import likeliest


def find_prompt_logprobs(
    decoder: Decoder, hidden: Any, flat: FlatBatch, batch: StepBatch, vocab_size: int
) -> tuple[dict[int, PromptLogprobs], list[int]]:
    """Return the log probabilities by entry, and the entries whose logits are not finite.

    No more rows of logits are in memory than for a draw. A row's result is a function of its logits
    alone, and the same as `sampler.token_logprobs` where that token is drawn, as 32-bit floats.
    """
    scores: dict[int, PromptLogprobs] = {}
    bad = []
    for rows in prompt_rows(batch):
        found = _Found(rows, flat, vocab_size)
        found.fill(decoder, hidden)
        if np.isfinite(found.logprobs).all():
            scores[rows.entry] = found.value()
        else:
            bad.append(rows.entry)
    return scores, bad


class _Found:
    """The columns of one entry."""

    def __init__(self, rows: PromptRows, flat: FlatBatch, vocab_size: int) -> None:
        self._following = rows.following
        self._first = int(flat.row_starts[rows.entry])
        self._num_top = min(rows.num_top, vocab_size)
        count = len(rows.following)
        self.logprobs = np.zeros(count, np.float32)
        self.ranks = np.zeros(count, np.int64)
        self.top_ids = np.zeros((count, self._num_top), np.int64)
        self.top_logprobs = np.zeros((count, self._num_top), np.float32)

    def fill(self, decoder: Decoder, hidden: Any) -> None:
        following = self._following
        for start in range(0, len(following), MAX_SAMPLED_ROWS):
            places = np.arange(start, min(start + MAX_SAMPLED_ROWS, len(following)))
            logits = decoder.logits(hidden, self._first + places)
            with np.errstate(invalid="ignore"):  # what is not finite is found after the last row
                for place, row in zip(places.tolist(), logits, strict=True):
                    self._take(place, row, int(following[place]))

    def _take(self, place: int, logits: np.ndarray, token_id: int) -> None:
        own, log_sum = logits[token_id], log_of_sum(logits)
        self.logprobs[place] = float(own) - log_sum
        is_before = (logits > own).sum() + (logits[:token_id] == own).sum()
        self.ranks[place] = 1 + is_before
        top = likeliest(logits, self._num_top)
        self.top_ids[place] = top
        self.top_logprobs[place] = logits[top].astype(np.float64) - log_sum

    def value(self) -> PromptLogprobs:
        return PromptLogprobs(
            self._num_top,
            tuple(self.logprobs.tolist()),
            tuple(self.ranks.tolist()),
            tuple(self.top_ids.ravel().tolist()),
            tuple(self.top_logprobs.ravel().tolist()),
        )
