"""The chance that a looked-up token is right, by the length of the match that it follows.

Every looked-up token is compared with the token that is drawn, whether it was drafted or not. So
learning costs no model time and goes on while no draft pays.
"""

from __future__ import annotations

LONGEST = 16
"""Longer matches count as this long: their tokens are right equally often."""
_LATEST_WEIGHT = 0.02


class MatchConfidence:
    """Moving averages by length of the match, common to all sequences of a drafter.

    They start at `1 - 1 / length`, and 1/4 for a single token: measured streams of chat, summaries
    and code follow that closely.
    """

    def __init__(self) -> None:
        self._means = [0.0, 0.25, *(1 - 1 / length for length in range(2, LONGEST + 1))]

    def chances(self, length: int, most: int, lowest: float = 0.0) -> tuple[float, ...]:
        """Return the chances that the first 1, 2, … tokens after a match are all right.

        The match has `length` tokens. At most `most` chances, none below `lowest`; none without a
        match (length 0).
        """
        means, chance, chances = self._means, 1.0, []
        for longer in range(length, length + most):
            chance *= means[longer if longer < LONGEST else LONGEST]
            if chance < lowest or not chance:
                break
            chances.append(chance)
        return tuple(chances)

    def learn(self, length: int, *, was_right: bool) -> None:
        """Record whether the token after a match of `length` was right."""
        length = min(length, LONGEST)
        self._means[length] += (was_right - self._means[length]) * _LATEST_WEIGHT
