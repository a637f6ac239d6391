"""The number of drafts that pay: their expected tokens against the time of their rows.

A step of `n` sequences takes `C(rows)` seconds and yields `n` tokens and the accepted drafts.
Drafts are taken in order of their chance to be accepted, as long as that raises expected tokens per
second, `(n + sum of chances) / C(n + drafts)`. A narrow batch takes nearly all of them, a wider one
only near-certain ones, and a batch whose step time grows in proportion to its rows takes none.

Where no draft pays, nothing is learnt. So a drafter that runs inside the model probes: a sequence
that has not drafted for long tries one draft, so rarely that all probes together take at most
`PROBE_SHARE` of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from engine.core.runner_contract import StepCosts
from engine.core.speculation.step_curve import StepCurve

PROBE_SHARE = 0.01
"""The largest share of time that probes may take."""
CHANCE_DISCOUNT = 0.7
"""Discount on estimated chances of acceptance.

A token that one sequence gains shortens the batch only if every sequence gains one; otherwise it
saves that sequence's row in a later step, which is less. In replays of the demo model's answers, 8
and 32 at once, drafting with 0.7 was at most 0.2 % slower than no drafts, and with 0.95 up to 5 %
slower. One answer at a time was equally fast.
"""
LATEST_WEIGHT = 0.1
"""Weight of the latest draft in a sequence's estimate."""
MEAN_WEIGHT = 0.02
"""Weight of the latest draft in the mean over all sequences."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The estimated chance that a sequence's next draft is right, if the one before was.

    `num_idle_steps` counts decode steps since drafts were last verified.
    """

    probability: float
    num_idle_steps: int = 0

    def after(self, num_drafted: int, num_accepted: int) -> Acceptance:
        """Return the estimate after a step that verified `num_drafted` drafts (0: none tried)."""
        if num_drafted == 0:
            return Acceptance(self.probability, self.num_idle_steps + 1)
        return Acceptance(
            moving_average(self.probability, num_drafted, num_accepted, LATEST_WEIGHT)
        )


def moving_average(probability: float, num_drafted: int, num_accepted: int, weight: float) -> float:
    """Return the average after `num_accepted` hits and, unless all were accepted, one miss.

    Drafts after the first wrong one do not count: they follow a token that was not drawn.
    """
    probability = 1 - (1 - probability) * (1 - weight) ** num_accepted
    return probability if num_accepted == num_drafted else probability * (1 - weight)


class DraftLength:
    """The number of drafts for each sequence of a batch, by chances and what steps cost.

    `costs` are the first estimate; `observe` corrects it.
    """

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self._draft_s = costs.draft_s
        self._max_drafts = max_drafts
        self._curve = StepCurve(costs)
        self._cost_s: list[float] = []
        self._use_curve()

    def observe(self, rows: int, step_s: float, num_proposals: int = 0) -> None:
        """Learn from a step of `rows` tokens, prompt chunks included, that took `step_s` seconds.

        The drafts made in it, `num_proposals`, took a part of it.
        """
        if self._curve.observe(rows, step_s - num_proposals * self._draft_s):
            self._use_curve()

    def lengths(self, chances: Sequence[Sequence[float]], *, is_drafted: bool = False) -> list[int]:
        """Return how many drafts each sequence of a step should have, at most `max_drafts`.

        `chances[i][j]` is the chance that draft `j` of sequence `i` and all before it are accepted.
        The chosen lengths give the most expected tokens per second over all prefixes of the drafts,
        sorted by chance, with chances multiplied by `CHANCE_DISCOUNT`. Drafts that exist already
        (`is_drafted`) cost only their rows.
        """
        draft_s = 0.0 if is_drafted else self._draft_s
        threshold = self._threshold(len(chances), self._candidates(chances, draft_s), draft_s)
        return [self._num_above(threshold, falling) for falling in chances]

    def lowest_chance(self, num_sequences: int, draft_s: float = 0.0) -> float:
        """Return the chance below which no draft pays in a batch of `num_sequences`.

        It is the chance that pays for the cheapest further row.
        """
        slope_s = self._cheapest_s[bisect_right(self._ends, num_sequences)]
        return (slope_s + draft_s) * num_sequences / (CHANCE_DISCOUNT * self.cost_s(num_sequences))

    def probe_period(self, num_sequences: int) -> int:
        """Return the number of steps between two probes of one sequence in a batch."""
        now_s = self.cost_s(num_sequences)
        probe_s = self.cost_s(num_sequences + 1) + self._draft_s - now_s
        return max(1, math.ceil(num_sequences * probe_s / (PROBE_SHARE * now_s)))

    def cost_s(self, rows: int) -> float:
        """Return the seconds of a step of `rows` tokens, linear between measured ones."""
        if len(self._cost_s) <= rows:
            known, step_s = self._curve.rows, self._curve.step_s
            wanted = np.arange(2 * rows + 2)
            self._cost_s = np.interp(wanted, known, step_s).tolist()
        return self._cost_s[rows]

    def _use_curve(self) -> None:
        slopes = _slopes(self._curve.rows, self._curve.step_s)
        self._ends = [end for end, _ in slopes]
        # The seconds of the cheapest further row from each span on. The last span has no end.
        slopes_s = [slope_s for _, slope_s in slopes]
        self._cheapest_s = [*accumulate(reversed(slopes_s), min)][::-1] + slopes_s[-1:]
        self._cost_s.clear()

    def _num_above(self, threshold: float, falling: Sequence[float]) -> int:
        num = 0
        for chance in falling[: self._max_drafts]:
            if chance < threshold:
                break
            num += 1
        return num

    def _candidates(self, chances: Sequence[Sequence[float]], draft_s: float) -> list[float]:
        """Return the chances of all drafts that might pay, the best first."""
        floor = self.lowest_chance(len(chances), draft_s)
        found = []
        for falling in chances:
            for chance in falling[: self._max_drafts]:
                if chance < floor:
                    break
                found.append(chance)
        found.sort(reverse=True)
        return found

    def _threshold(self, num_sequences: int, gains: Sequence[float], draft_s: float) -> float:
        """Return the smallest chance that is worth a row; above all chances when none is."""
        tokens = float(num_sequences)
        rows = num_sequences
        self.cost_s(rows + len(gains))
        cost_s = self._cost_s
        best, threshold = tokens / cost_s[rows], math.inf
        last = len(gains) - 1
        for i, gain in enumerate(gains):
            tokens += CHANCE_DISCOUNT * gain
            if i < last and gains[i + 1] == gain:
                continue  # equal chances are taken together or not at all
            rate = tokens / (cost_s[rows + i + 1] + (i + 1) * draft_s)
            if rate > best:
                best, threshold = rate, gain
        return threshold


def _slopes(rows: Sequence[int], step_s: Sequence[float]) -> list[tuple[int, float]]:
    """Return each measured span's last row, and the seconds per row in it."""
    spans = zip(pairwise(rows), pairwise(step_s), strict=True)
    return [(end, (end_s - begin_s) / (end - begin)) for (begin, end), (begin_s, end_s) in spans]
