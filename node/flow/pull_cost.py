"""Whether cached tokens are had sooner from another node than by computing them. Pure.

    pulled    fixed time + tokens × time of a token's KV on the wire, both × what pulls took lately
    computed  what a step of so many tokens takes, by the costs measured at the start

The rule is that of llm-d's router: pull if α + β·Δ < Δ / rate. Its constants are guesses here until
the first pull has ended.
"""

from __future__ import annotations

from collections.abc import Callable

FIXED_S = 0.02
BYTES_PER_S = 0.5e9
"""Less than any lane carries."""
_NEWEST = 0.25
"""Weight of the latest pull."""
_LEAST, _MOST = 1 / 64, 64.0
_FORGIVEN = 0.95
"""A pull that is not tried shows nothing: after some of them one is tried again."""


class PullCost:
    """The rule, corrected by what pulls take."""

    def __init__(self, token_bytes: float, compute_s: Callable[[int], float]) -> None:
        """Take the bytes of a token's KV, and the seconds of a step of so many tokens."""
        self._token_bytes = token_bytes
        self._compute_s = compute_s
        self._slowness = 1.0

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds that a pull of so many tokens is expected to take."""
        return self._slowness * self._planned_s(num_tokens)

    def is_worth(self, num_tokens: int) -> bool:
        """Return whether a pull is expected to be quicker than computing."""
        if self.expected_s(num_tokens) < self._compute_s(num_tokens):
            return True
        self._set(self._slowness * _FORGIVEN)
        return False

    def on_pulled(self, num_tokens: int, took_s: float) -> None:
        """Take how long a pull took, from its request to its landing."""
        found = took_s / self._planned_s(num_tokens)
        self._set(self._slowness + _NEWEST * (found - self._slowness))

    def on_failed(self) -> None:
        """Take that a pull failed: the next one must promise twice as much."""
        self._set(2 * self._slowness)

    def _planned_s(self, num_tokens: int) -> float:
        return FIXED_S + num_tokens * self._token_bytes / BYTES_PER_S

    def _set(self, slowness: float) -> None:
        self._slowness = min(max(slowness, _LEAST), _MOST)
