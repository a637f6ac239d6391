"""How long a node has been silent, counted in ticks of this process.

A node that was not heard for `PROBE_TICKS` is asked for a new connection, which gRPC's own threads
accept however busy the node's Python is. Without that it is suspected after `SUSPICION_S`. A busy
node is suspected after `BUSY_S`, because its requests make no progress either.
"""

from __future__ import annotations

from enum import Enum

TICK_S = 0.25
PROBE_TICKS = 3
SUSPICION_TICKS = 5
BUSY_TICKS = 12
LOSS_TICKS = 20
SUSPICION_S = SUSPICION_TICKS * TICK_S
BUSY_S = BUSY_TICKS * TICK_S
LOSS_S = LOSS_TICKS * TICK_S


class Verdict(Enum):
    """What a tick changes about a silent node."""

    NONE = "none"
    PROBE = "probe"
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
        self._num_unanswered = 0
        self._is_suspected = False

    def heard(self) -> None:
        """Start again from zero: the node sent something."""
        self._num_ticks = 0
        self._num_unanswered = 0
        self._is_suspected = False

    def answered(self) -> None:
        """Take the new connection that a verdict of `PROBE` asked for: the node is busy."""
        self._num_unanswered = 0

    @property
    def reason(self) -> str:
        """How long nothing was heard, in words."""
        is_busy = self._num_unanswered < self._num_ticks
        return f"nothing was heard for {self._num_ticks * TICK_S} s" + (
            ", although its process runs" if is_busy else ""
        )

    def tick(self) -> Verdict:
        """Count a tick; return the verdict that it brings."""
        self._num_ticks += 1
        self._num_unanswered += 1
        if self._num_ticks == LOSS_TICKS:
            return Verdict.LOST
        if self._is_suspected:
            return Verdict.NONE
        if self._num_unanswered >= SUSPICION_TICKS or self._num_ticks >= BUSY_TICKS:
            self._is_suspected = True
            return Verdict.SUSPECTED
        return Verdict.PROBE if self._num_unanswered == PROBE_TICKS else Verdict.NONE
