"""Rows under grammars that are drawn without a mask and then checked.

A greedy draw, and one by temperature alone, takes the largest of the values that every token has by
itself. So where the token drawn from the whole row is allowed, a mask would not have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.errors import PdserveError
from common.request import GREEDY_BELOW, SamplingParams
from engine.runner.grammars.allowed_tokens import AllowedTokens


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """The rows of one sequence: `output` tokens are known, `drafts` follow them."""

    seat: int
    first_row: int
    params: SamplingParams
    output: list[int]
    drafts: list[int]


def needs_no_mask(job: GrammarJob) -> bool:
    """Return whether the draw is the same without a mask wherever it draws an allowed token.

    Then it depends on the largest value alone. Filters and log probabilities depend on what all
    allowed tokens are.
    """
    params, budget = job.params, job.params.rules.thinking
    return not (
        job.drafts
        or len(job.output) < params.min_tokens
        or params.logprobs is not None
        or params.has_penalties
        or params.rules.are_everywhere
        or (budget is not None and len(job.output) in budget.indices(has_grammar=True))
        or (
            params.temperature >= GREEDY_BELOW
            and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        )
    )


class MaskSource(Protocol):
    """What knows the grammars: `masks.GrammarMasks`."""

    def checked(self, job: GrammarJob, token_id: int, logits: np.ndarray) -> int | None:
        """Return what the job draws with its mask, having drawn `token_id` from `logits` without.

        None: that takes the mask.
        """

    def fill(self, jobs: Sequence[GrammarJob], failures: dict[int, PdserveError]) -> AllowedTokens:
        """Return the masks of jobs without drafts; write into `failures` why a seat has none."""


class UnmaskedRows:
    """Rows of a step's draws that are drawn without the mask of their grammar, and then checked.

    Row r is that of `jobs[job_rows[r]]`; below 0 it is none of these.
    """

    def __init__(
        self,
        grammars: MaskSource,
        jobs: Sequence[GrammarJob],
        job_rows: np.ndarray,
        failures: dict[int, PdserveError],
    ) -> None:
        self._grammars, self._jobs = grammars, jobs
        self._job_rows, self._failures = job_rows, failures

    def take(self, rows: np.ndarray) -> UnmaskedRows:
        """Return these rows."""
        return UnmaskedRows(self._grammars, self._jobs, self._job_rows[rows], self._failures)

    @property
    def rows(self) -> np.ndarray:
        """The rows that are drawn without a mask."""
        return np.flatnonzero(self._job_rows >= 0)

    def check(self, logits: np.ndarray, token_ids: np.ndarray, is_drawn: np.ndarray) -> np.ndarray:
        """Return the rows that must be drawn again, with a mask.

        `token_ids` were drawn from `logits`, one from each row where it `is_drawn`. Those that the
        grammars force are written there.
        """
        refused = []
        for row in self.rows.tolist():
            if is_drawn[row]:
                job = self._jobs[self._job_rows[row]]
                checked = self._grammars.checked(job, int(token_ids[row]), logits[row])
                if checked is None:
                    refused.append(row)
                else:
                    token_ids[row] = checked
        return np.array(refused, np.int64)

    def masked(self, rows: np.ndarray) -> AllowedTokens:
        """Return the masks of these rows, one for each."""
        jobs = [self._jobs[number] for number in self._job_rows[rows].tolist()]
        return self._grammars.fill(jobs, self._failures)
