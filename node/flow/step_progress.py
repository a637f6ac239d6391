"""Whether the step thread makes progress, by how long its turns usually take. No clock."""

from __future__ import annotations

from bisect import bisect_right

from engine.core.runner_contract import StepCosts

TICK_S = 0.25
LEAST_LIMIT_S = 3.0
MOST_LIMIT_S = 120.0
"""A turn that lasts longer ends the node."""
TIMES_LONGEST = 10.0
"""Multiple of the longest turn lately beyond which a turn is stuck."""
TIMES_EXPECTED = 4.0
"""Multiple of the largest step, by the costs measured at the start: the first one is slower."""
WINDOW_TICKS = 1200
"""The longest turn is forgotten after one to two windows of five minutes."""


class StepProgress:
    """Judges the turns of the step loop, which is looked at every `TICK_S` on the event loop.

    Time is counted in looks: while the whole process stands still, nothing is counted.
    """

    def __init__(self, expected_s: float) -> None:
        """Expect the largest step to take `expected_s` seconds."""
        self._expected_s = expected_s
        self._busy_since_s: float | None = None
        self._num_ticks = 0
        self._longest_s = self._longest_before_s = 0.0
        self._num_in_window = 0
        self._is_stuck = False

    @property
    def turn_s(self) -> float:
        """How long the present turn has lasted, in whole ticks; 0 between turns."""
        return self._num_ticks * TICK_S

    @property
    def limit_s(self) -> float:
        """How long a turn may last."""
        longest_s = max(self._longest_s, self._longest_before_s)
        limit_s = max(LEAST_LIMIT_S, TIMES_LONGEST * longest_s, TIMES_EXPECTED * self._expected_s)
        return min(limit_s, MOST_LIMIT_S)

    @property
    def stuck_s(self) -> float:
        """How long the present turn has lasted, if that is longer than its limit; 0 otherwise."""
        return self.turn_s if self._is_stuck else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the node should give up."""
        return self.turn_s > MOST_LIMIT_S

    def look(self, busy_since_s: float | None) -> None:
        """Look at the present turn: when it began; None: the step thread waits for work."""
        self._count_window()
        if busy_since_s is not None and busy_since_s == self._busy_since_s:
            self._num_ticks += 1
            self._is_stuck |= self.turn_s > self.limit_s
            return
        if self._num_ticks:  # It lasted for less than one look more.
            self._longest_s = max(self._longest_s, self.turn_s + TICK_S)
        self._busy_since_s, self._num_ticks, self._is_stuck = busy_since_s, 0, False

    def _count_window(self) -> None:
        self._num_in_window += 1
        if self._num_in_window == WINDOW_TICKS:
            self._num_in_window = 0
            self._longest_before_s, self._longest_s = self._longest_s, 0.0


def expected_step_s(costs: StepCosts, num_tokens: int) -> float:
    """Return the expected seconds of a step of so many tokens.

    It lies on the lines through the steps that were measured. A narrower one takes as long as the
    narrowest of them, because it reads all weights too. A wider one grows with its tokens from the
    widest, which is more than it takes where the weights are what that waits for. A mixture of
    experts reads fewer of them in narrow steps, and hardly more in wider ones: there both are more
    than it takes.
    """
    rows, step_s = costs.rows, costs.step_s
    wider = bisect_right(rows, num_tokens)
    if wider == 0:
        return step_s[0]
    if wider == len(rows):
        return step_s[-1] * num_tokens / rows[-1]
    of_line = (num_tokens - rows[wider - 1]) / (rows[wider] - rows[wider - 1])
    return step_s[wider - 1] + of_line * (step_s[wider] - step_s[wider - 1])


def expected_token_s(costs: StepCosts) -> float:
    """Return the expected seconds of one more token of a prompt in a wide step."""
    return costs.step_s[-1] / costs.rows[-1]
