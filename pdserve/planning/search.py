"""Which shapes are tried, and which is the cheapest that meets the targets. Pure.

`Try` runs one trial; everything else is arithmetic on scores. What it relies on: more nodes are
never worse, more load is never better, and of the splits of some nodes there is one best, from
which the others fall off to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.nodes import Role

PRECISION = 0.06
"""The load that a shape carries is found this exactly, as a share of it."""
LEAST_LOAD, MOST_LOAD = 1 / 16, 8.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many nodes of each role: `prefill` and `decode`, or `mixed` alone."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @property
    def total(self) -> int:
        """All nodes."""
        return self.prefill + self.decode + self.mixed

    @property
    def num_nodes(self) -> dict[Role, int]:
        """Nodes by role, without roles that it does not have."""
        found = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return {role: count for role, count in found.items() if count}

    def __str__(self) -> str:
        return f"{self.mixed} mixed" if self.mixed else f"{self.prefill}P + {self.decode}D"


Score = Callable[[Fleet, float], float]
"""The score of a shape at a load: the share of requests within both targets, or below 0."""


class Search:
    """Asks `score` for what it has to know; no shape is asked for twice at one load."""

    def __init__(self, score: Score, wanted: float, share: float) -> None:
        """Begin with splits of which a `share` prefills, then with that of the last best one."""
        self._score = score
        self._wanted = wanted
        self._share = share
        self.tried: dict[tuple[Fleet, float], float] = {}

    def score(self, shape: Fleet, load: float = 1.0) -> float:
        """Return the score of a shape at a load."""
        key = (shape, load)
        if key not in self.tried:
            self.tried[key] = self._score(shape, load)
        return self.tried[key]

    def meets(self, shape: Fleet, load: float = 1.0) -> bool:
        """Return whether enough requests are within both targets."""
        return self.score(shape, load) >= self._wanted

    def best_split(self, total: int, *, is_enough: float = math.inf) -> Fleet | None:
        """Return the best prefill and decode nodes, climbing from the share of the last ones.

        The first one that has a score of `is_enough` is taken.
        """
        if total < 2:
            return None
        now = min(total - 1, max(1, round(total * self._share)))
        best = self.score(Fleet(now, total - now))
        for step in (1, -1):
            while best < is_enough and 1 <= now + step < total:
                found = self.score(Fleet(now + step, total - now - step))
                if found <= best:
                    break
                now, best = now + step, found
        self._share = now / total
        return Fleet(now, total - now)

    def least(self, first: int, most: int) -> int | None:
        """Return the least number of nodes that meets the targets; None: not even `most`."""
        low, high = first - 1, first
        while not self._can(high):
            if high >= most:
                return None
            low, high = high, min(most, high * 2)
        while high - low > 1:
            middle = (low + high) // 2
            if middle and self._can(middle):
                high = middle
            else:
                low = middle
        return high

    def carried(self, shape: Fleet) -> float:
        """Return the most load that a shape carries within the targets.

        It is a multiple of the workload's: 0 below `LEAST_LOAD`, and at most `MOST_LOAD`.
        """
        if self.meets(shape):
            low, high = 1.0, 1.5
            while self.meets(shape, high):
                low, high = high, high * 1.5
                if high > MOST_LOAD:
                    return low
        else:
            low, high = 0.5, 1.0
            while not self.meets(shape, low):
                low, high = low / 2, low
                if low < LEAST_LOAD:
                    return 0.0
        while high / low > 1 + PRECISION:
            middle = math.sqrt(low * high)
            if self.meets(shape, middle):
                low = middle
            else:
                high = middle
        return low

    def _can(self, total: int) -> bool:
        if self.meets(Fleet(mixed=total)):
            return True
        split = self.best_split(total, is_enough=self._wanted)
        return split is not None and self.meets(split)
