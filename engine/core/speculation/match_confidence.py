"""How likely a looked-up token is right, by the length of the match that it follows.

Every guess is compared with the token that came, whether it was put into a step or not: learning
costs no model time and goes on while no draft pays.
"""

from __future__ import annotations

LONGEST = 16
"""Longer matches are equally good."""
_LATEST_WEIGHT = 0.02


class MatchConfidence:
    """Moving averages by length of the match; one for all sequences of a drafter.

    They start at `1 - 1 / length`, and 1/4 for a single token: streams of chat, summaries and code
    that were measured follow that closely.
    """

    def __init__(self) -> None:
        self._means = [0.0, 0.25, *(1 - 1 / length for length in range(2, LONGEST + 1))]

    def chances(self, length: int, most: int, lowest: float = 0.0) -> tuple[float, ...]:
        """How likely the first `1, 2, …` guesses behind a match of `length` are all right.

        At most `most` of them, and none below `lowest`; none at all without a match (length 0).
        """
        means, chance, chances = self._means, 1.0, []
        for longer in range(length, length + most):
            chance *= means[longer if longer < LONGEST else LONGEST]
            if chance < lowest or not chance:
                break
            chances.append(chance)
        return tuple(chances)

    def learn(self, length: int, *, was_right: bool) -> None:
        """The guess behind a match of `length` was right or wrong."""
        length = min(length, LONGEST)
        self._means[length] += (was_right - self._means[length]) * _LATEST_WEIGHT
