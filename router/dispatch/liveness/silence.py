"""How long a node has been silent, counted in ticks of this process.

A node that was not heard for a while is suspected (`pace`). If its process runs nevertheless, its
Python is busy (`pings`), and it is suspected after `BUSY_TICKS`: its requests make no progress
either.
"""

from __future__ import annotations

from enum import Enum

from router.dispatch.liveness.pace import USUAL, Pace

TICK_S = 0.25
BUSY_TICKS = 12
LOSS_TICKS = 20
LOSS_S = LOSS_TICKS * TICK_S


class SilenceVerdict(Enum):
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
        self.pace: Pace = USUAL
        self._num_ticks = 0
        self._is_running = False
        self._is_suspected = False

    def heard(self) -> None:
        """Start again from zero: the node sent something."""
        self._num_ticks = 0
        self._is_suspected = False

    @property
    def has_begun(self) -> bool:
        """Whether nothing was heard for longer than a late heartbeat takes."""
        return self._num_ticks > self.pace.late

    @property
    def reason(self) -> str:
        """How long nothing was heard, in words."""
        return f"nothing was heard for {self._num_ticks * TICK_S} s" + (
            ", although its process runs" if self._is_running else ""
        )

    def tick(self, *, is_running: bool) -> SilenceVerdict:
        """Count a tick; return the verdict that it brings. `is_running`: so the process shows."""
        self._num_ticks += 1
        self._is_running = is_running
        if self._num_ticks == LOSS_TICKS:
            return SilenceVerdict.LOST
        most_ticks = BUSY_TICKS if is_running else self.pace.suspicion
        if self._is_suspected or self._num_ticks < most_ticks:
            return SilenceVerdict.NONE
        self._is_suspected = True
        return SilenceVerdict.SUSPECTED
