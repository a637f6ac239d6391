"""How long a node has been silent, counted in ticks of this process."""

from __future__ import annotations

from enum import Enum

TICK_S = 0.25
SUSPICION_TICKS = 5
LOSS_TICKS = 20
SUSPICION_S = SUSPICION_TICKS * TICK_S
LOSS_S = LOSS_TICKS * TICK_S


class Verdict(Enum):
    """What a tick changes about a silent node."""

    NONE = "none"
    SUSPECTED = "suspected"
    LOST = "lost"


class Silence:
    """Counts the ticks since something was heard of one node.

    Its owner ticks every `TICK_S` on the event loop. Time in which this process did not run hardly
    counts: it is one late tick, and what the node sent meanwhile lies in a socket, still to be
    read.
    """

    def __init__(self) -> None:
        self._num_ticks = 0

    def heard(self) -> None:
        """Start again from zero: the node sent something."""
        self._num_ticks = 0

    def tick(self) -> Verdict:
        """Count a tick; return the verdict that it brings, once per silence."""
        self._num_ticks += 1
        if self._num_ticks == SUSPICION_TICKS:
            return Verdict.SUSPECTED
        if self._num_ticks == LOSS_TICKS:
            return Verdict.LOST
        return Verdict.NONE
