"""Whether a pull pays, and from which nodes none comes. Pure.

A pull is tried where it should be quicker than computing:

    pulled    fixed time + tokens × time of a token's KV on the wire, both × what pulls took lately
    computed  what a step of so many tokens takes, by the costs measured at the start

The rule is that of llm-d's router: pull if α + β·Δ < Δ / rate. Its constants are guesses here until
the first pull has ended, and are corrected by what handoffs take meanwhile: a handoff waits for its
prompt as well, so a link is at least as quick as it seems.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from common.ids import Incarnation
from node.flow.pause import Pause

FIXED_S = 0.02
BYTES_PER_S = 0.5e9
"""Less than any lane carries."""
_NEWEST = 0.25
"""Weight of the latest pull."""
_LEAST, _MOST = 1 / 64, 64.0
_FORGIVEN = 0.95
"""A pull that is not tried shows nothing: after some of them one is tried again."""
MOST_PAUSES = 1024


class PullCost:
    """The rule, corrected by what pulls take."""

    def __init__(self, token_bytes: float, compute_s: Callable[[int], float]) -> None:
        """Take the bytes of a token's KV, and the seconds of a step of so many tokens."""
        self._token_bytes = token_bytes
        self.compute_s = compute_s
        self._slowness = 1.0
        self._is_measured = False

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds that a pull of so many tokens is expected to take."""
        return self._slowness * self._planned_s(num_tokens)

    def is_worth(self, num_tokens: int, *, num_read: int = 0) -> bool:
        """Return whether a pull is expected to be quicker than computing.

        The source reads `num_read` of the tokens from disk first: their bytes move twice.
        """
        if self.expected_s(num_tokens + num_read) < self.compute_s(num_tokens):
            return True
        self._set(self._slowness * _FORGIVEN)
        return False

    def on_pulled(self, num_tokens: int, took_s: float) -> None:
        """Take how long a pull took, from its request to its landing."""
        found = took_s / self._planned_s(num_tokens)
        self._set(self._slowness + _NEWEST * (found - self._slowness))
        self._is_measured = True

    def on_sent(self, num_tokens: int, sending_s: float) -> None:
        """Take how long a handoff took, from its first byte to its last acknowledgement."""
        if not self._is_measured:
            found = (FIXED_S + sending_s) / self._planned_s(num_tokens)
            self._set(min(self._slowness, found))

    def _planned_s(self, num_tokens: int) -> float:
        return FIXED_S + num_tokens * self._token_bytes / BYTES_PER_S

    def _set(self, slowness: float) -> None:
        self._slowness = min(max(slowness, _LEAST), _MOST)


class Pauses:
    """The nodes that failed to send lately: at most `MOST_PAUSES`, the latest ones.

    A node may be out of reach for good, behind a firewall that lets KV through one way only; each
    pull from it would keep a prompt waiting in vain.
    """

    def __init__(self) -> None:
        self._pauses: OrderedDict[Incarnation, Pause] = OrderedDict()

    def is_on(self, node: Incarnation, now_s: float) -> bool:
        """Return whether nothing is to be pulled from this node now."""
        pause = self._pauses.get(node)
        return pause is not None and pause.is_on(now_s)

    def on_landed(self, node: Incarnation) -> None:
        """Take that the node sends."""
        self._pauses.pop(node, None)

    def on_failed(self, node: Incarnation, now_s: float) -> None:
        """Take that it did not send."""
        pause = self._pauses.pop(node) if node in self._pauses else Pause()
        pause.on_failed(now_s)
        self._pauses[node] = pause
        if len(self._pauses) > MOST_PAUSES:
            self._pauses.popitem(last=False)
