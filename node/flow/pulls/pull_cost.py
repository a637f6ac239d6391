"""Whether a pull pays, and which nodes failed to send lately. Pure.

A pull is tried where a prompt should be computed sooner with it:

    pulled    a fixed time + tokens × the time of a token's KV + a part of the source's step
    computed  what a step takes of so many tokens, and of those that wait here before them

The rule is that of llm-d's router, pull if α + β·Δ < Δ / rate, with the load of both nodes: what
waits here is added to Δ, because a pull goes on beside it, and a source answers when its step has
ended. The constants are guesses until the first pull has ended. Handoffs correct them meanwhile:
they wait for their prompts as well, so a link is at least as quick as it seems. Then each pull
corrects the constant that explains more of its time: long ones tell how quick a link is, short ones
how long it takes to ask, and those from busy nodes how much of a step is before them. Routers count
whole prompts on a node, of which much is cached there.

Pulls that go on at once are slow together where a node or a network stands still for some seconds.
That counts as one slow pull: of those far slower than expected only one counts that had begun when
another one raised what is expected.
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
_MOST_CHANGE = 1.0
"""The most by which one pull that was slow raises a constant: twice as much."""
_LEAST, _MOST = 1 / 256, 64.0
"""How many times the guesses the constants are, at least and at most."""
_FORGIVEN, _FORGIVEN_GUESS = 0.95, 0.5
"""A pull that is not tried shows nothing: after some of them one is tried again; after a few, where
nothing was measured yet."""
_OF_STEP = 0.5
"""A guess: when a source is asked, half of its step is left."""
MOST_PAUSES = 1024


class PullCost:
    """The rule, corrected by what pulls take."""

    def __init__(self, token_bytes: float, compute_s: Callable[[int], float]) -> None:
        """Take the bytes of a token's KV, and the seconds of a step of so many tokens."""
        self._token_guess_s = token_bytes / BYTES_PER_S
        self.compute_s = compute_s
        self._fixed = self._token = 1.0
        """How many times its guess each constant is."""
        self._of_step = _OF_STEP
        """How much of its step a source takes to answer."""
        self._is_measured = False
        self._raised_at_s = 0.0
        """The time at which a pull that was far too slow raised the constants last."""

    def expected_s(self, num_tokens: int, num_at_source: int = 0) -> float:
        """Return the seconds that a pull of so many tokens is expected to take, from a node whose
        step computes so many others."""
        return sum(self._parts(num_tokens, num_at_source))

    def _parts(self, num_tokens: int, num_at_source: int) -> tuple[float, float, float]:
        """Return the seconds of the three parts of a pull."""
        step_s = self.compute_s(num_at_source) if num_at_source else 0.0
        token_s = num_tokens * self._token_guess_s
        return self._fixed * FIXED_S, self._token * token_s, self._of_step * step_s

    def is_worth(
        self, num_tokens: int, num_before: int = 0, *, num_read: int = 0, num_at_source: int = 0
    ) -> bool:
        """Return whether a pull is expected to end sooner than computing so many tokens, and the
        `num_before` that wait before them.

        The source's step computes `num_at_source`, and it reads `num_read` of the tokens from disk
        first: their bytes move twice.
        """
        expected_s = self.expected_s(num_tokens + num_read, num_at_source)
        if expected_s < self.compute_s(num_tokens + num_before):
            return True
        forgiven = _FORGIVEN if self._is_measured else _FORGIVEN_GUESS
        self._scale(forgiven, forgiven, forgiven)
        return False

    def on_pulled(
        self, num_tokens: int, began_at_s: float, now_s: float, num_at_source: int = 0
    ) -> None:
        """Learn from the time of a pull, from its request to its landing."""
        took_s = now_s - began_at_s
        # Neither part took longer than the whole. How much of a step was left differs each time.
        self._fixed = _within(min(self._fixed, took_s / FIXED_S))
        self._bound_token(num_tokens, took_s)
        parts = self._parts(num_tokens, num_at_source)
        expected_s = sum(parts)
        self._is_measured = True
        change = _NEWEST * (took_s / expected_s - 1)
        if change > _MOST_CHANGE:
            if began_at_s < self._raised_at_s:
                return
            change, self._raised_at_s = _MOST_CHANGE, now_s
        self._scale(*(1 + change * part / expected_s for part in parts))

    def _scale(self, fixed: float, token: float, of_step: float) -> None:
        self._fixed = _within(self._fixed * fixed)
        self._token = _within(self._token * token)
        self._of_step = min(_within(self._of_step * of_step), 1.0)

    def on_sent(self, num_tokens: int, sending_s: float) -> None:
        """Learn from the time of a handoff, from its first byte to its last acknowledgement."""
        if num_tokens and not self._is_measured:
            self._bound_token(num_tokens, sending_s)

    def _bound_token(self, num_tokens: int, took_s: float) -> None:
        found = took_s / (num_tokens * self._token_guess_s)
        self._token = _within(min(self._token, found))


def _within(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST)


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
        """Record that a pull from the node landed."""
        self._pauses.pop(node, None)

    def on_failed(self, node: Incarnation, now_s: float) -> None:
        """Record that a pull from the node failed."""
        pause = self._pauses.pop(node) if node in self._pauses else Pause()
        pause.on_failed(now_s)
        self._pauses[node] = pause
        if len(self._pauses) > MOST_PAUSES:
            self._pauses.popitem(last=False)
