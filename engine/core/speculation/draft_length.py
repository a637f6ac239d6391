"""How many drafts pay: the expected tokens they bring against the time their rows take.

A step of `n` sequences costs `C(rows)` and brings `n` tokens and the accepted drafts. Sorted by
their chance to be accepted, drafts are taken as long as that raises expected tokens per second,
`(n + sum of chances) / C(n + drafts)`: on a narrow batch nearly all of them, on a wider one only
near-certain ones, and none where each row costs its full share of time.

Where no draft pays nothing is learnt either, so a drafter that runs inside the model probes: a
sequence that has not drafted for long tries one, so rarely that all probes together cost at most
`PROBE_SHARE` of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.core.plan import StepCosts

PROBE_SHARE = 0.01
"""Most time that probes may take, as a share of all steps."""
CHANCE_DISCOUNT = 0.7
"""Discount on estimated chances of acceptance. A token that one sequence gains shortens the batch
only if every sequence gains one; otherwise it saves that sequence's row in a later step, which is
less. In replays of the demo model's answers, 8 and 32 at once, drafting with 0.7 was at most 0.2 %
slower than no drafts, and with 0.95 up to 5 % slower. One answer at a time was equally fast."""
LATEST_WEIGHT = 0.1
"""What the latest draft weighs in a sequence's estimate."""
MEAN_WEIGHT = 0.02
"""What the latest draft weighs in the mean over all sequences."""
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was learnt about one sequence: how likely its next draft is right, given the last was.

    `num_idle_steps` counts decode steps since drafts were last verified.
    """

    probability: float
    num_idle_steps: int = 0

    def after(self, num_drafted: int, num_accepted: int) -> Acceptance:
        """The estimate after a decode step that verified `num_drafted` drafts (0: none tried)."""
        if num_drafted == 0:
            return Acceptance(self.probability, self.num_idle_steps + 1)
        return Acceptance(
            moving_average(self.probability, num_drafted, num_accepted, LATEST_WEIGHT)
        )


def moving_average(probability: float, num_drafted: int, num_accepted: int, weight: float) -> float:
    """The average after `num_accepted` hits and, unless all were accepted, one miss.

    Drafts behind the first wrong one say nothing: they follow a token that was not drawn.
    """
    probability = 1 - (1 - probability) * (1 - weight) ** num_accepted
    return probability if num_accepted == num_drafted else probability * (1 - weight)


class DraftLength:
    """The number of drafts for each sequence of a batch; a pure function of its arguments."""

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self._draft_s = costs.draft_s
        self._max_drafts = max_drafts
        self._rows = costs.rows
        # A step never gets cheaper by more rows: where it was measured so, that is noise.
        self._step_s = tuple(accumulate(costs.step_s, max, initial=_LEAST_S))[1:]
        self._slopes = _slopes(self._rows, self._step_s)
        self._tail_s = self._slopes[-1][1] if self._slopes else 0.0
        self._cost_s: list[float] = []

    def lengths(self, chances: Sequence[Sequence[float]], *, is_drafted: bool = False) -> list[int]:
        """How many drafts each sequence of a step should have, at most `max_drafts`.

        `chances[i][j]` is how likely draft `j` of sequence `i` and all before it are accepted. What
        is chosen gives the most expected tokens per second over all prefixes of the drafts, sorted
        by chance, with chances lowered by `CHANCE_DISCOUNT`. Drafts that are there already
        (`is_drafted`) cost their rows alone.
        """
        draft_s = 0.0 if is_drafted else self._draft_s
        threshold = self._threshold(len(chances), self._candidates(chances, draft_s), draft_s)
        return [self._num_above(threshold, falling) for falling in chances]

    def lowest_chance(self, num_sequences: int, draft_s: float = 0.0) -> float:
        """A draft with less never pays in a batch this wide: even the cheapest row costs more."""
        slope_s = min((s for end, s in self._slopes if end > num_sequences), default=self._tail_s)
        return (slope_s + draft_s) * num_sequences / (CHANCE_DISCOUNT * self.cost_s(num_sequences))

    def probe_period(self, num_sequences: int) -> int:
        """Steps between two probes of one sequence in a batch of this many."""
        now_s = self.cost_s(num_sequences)
        probe_s = self.cost_s(num_sequences + 1) + self._draft_s - now_s
        return max(1, math.ceil(num_sequences * probe_s / (PROBE_SHARE * now_s)))

    def cost_s(self, rows: int) -> float:
        """Seconds of a step of `rows` tokens, between the measured ones and beyond them linear."""
        while len(self._cost_s) <= rows:
            self._cost_s.append(self._interpolate(len(self._cost_s)))
        return self._cost_s[rows]

    def _num_above(self, threshold: float, falling: Sequence[float]) -> int:
        num = 0
        for chance in falling[: self._max_drafts]:
            if chance < threshold:
                break
            num += 1
        return num

    def _candidates(self, chances: Sequence[Sequence[float]], draft_s: float) -> list[float]:
        """The chances of every draft that might pay, the best first."""
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
        """The smallest chance that is worth a row; more than any chance when none is."""
        tokens = float(num_sequences)
        rows = num_sequences
        self.cost_s(rows + len(gains))
        cost_s = self._cost_s
        best, threshold = tokens / cost_s[rows], math.inf
        last = len(gains) - 1
        for i, gain in enumerate(gains):
            tokens += CHANCE_DISCOUNT * gain
            if i < last and gains[i + 1] == gain:
                continue  # equal ones are taken together or not at all
            rate = tokens / (cost_s[rows + i + 1] + (i + 1) * draft_s)
            if rate > best:
                best, threshold = rate, gain
        return threshold

    def _interpolate(self, rows: int) -> float:
        known, step_s = self._rows, self._step_s
        if rows >= known[-1]:
            return step_s[-1] + self._tail_s * (rows - known[-1])
        right = bisect_left(known, rows)
        if right == 0:
            return step_s[0]
        slope_s = self._slopes[right - 1][1]
        return step_s[right - 1] + slope_s * (rows - known[right - 1])


def _slopes(rows: Sequence[int], step_s: Sequence[float]) -> list[tuple[int, float]]:
    """Each measured span's last row, and seconds per row in it."""
    spans = zip(pairwise(rows), pairwise(step_s), strict=True)
    return [(end, (end_s - begin_s) / (end - begin)) for (begin, end), (begin_s, end_s) in spans]
