"""Whether what is sent to a node arrives there, counted in ticks of this process.

A network may lose one direction alone. A node that is cut off from its router is heard as before,
while calls to it get no reply. So the router sends a number every few ticks, and the node repeats
the latest one in its messages (a heartbeat at the latest). A node that is heard and has not
repeated a number in time is not reached (`pace`).

A node of an earlier release repeats nothing, and is not judged.
"""

from __future__ import annotations

from router.dispatch.liveness.pace import USUAL, Pace

MOST_MISSING = 8
"""Numbers that are remembered until they are repeated: the first ones decide."""


class Echoes:
    """The numbers sent on one stream, which are its ticks, and those that did not come back.

    Ticks are those of `Silence`: time in which this process did not run hardly counts. Time in
    which the node says nothing does not count either (`forgive`): `Silence` judges that.
    """

    def __init__(self, phase: int = 0) -> None:
        """Count from `phase`: those of many nodes should send in different ticks."""
        self.pace: Pace = USUAL
        self._now = self.latest = phase
        self._missing: list[int] = []
        self.can_repeat = False

    def restart(self) -> None:
        """Begin with a new stream: nothing was sent on it."""
        self.forgive()
        self.can_repeat = False

    def forgive(self) -> None:
        """Wait for no number that was sent so far: the node was silent meanwhile."""
        self._missing.clear()

    def tick(self) -> int:
        """Count a tick; return the number to send now, or 0."""
        self._now += 1
        return 0 if self._now % self.pace.echo_every else self.ask()

    def skip(self) -> bool:
        """Count a tick in which no number is to be sent; return False, and count none, where one
        is."""
        if (self._now + 1) % self.pace.echo_every:
            self._now += 1
            return True
        return False

    def ask(self) -> int:
        """Return a number to send now, whatever the pace."""
        if self.latest != self._now:
            self.latest = self._now
            if len(self._missing) < MOST_MISSING:
                self._missing.append(self._now)
        return self._now

    def heard(self, number: int) -> None:
        """Take the number of a message of the node; 0: it repeats none."""
        if number:
            self.can_repeat = True
            self._missing = [one for one in self._missing if one > number]

    @property
    def is_waiting(self) -> bool:
        """Whether the node is to repeat a number, and can."""
        return self.can_repeat and bool(self._missing)

    @property
    def is_reached(self) -> bool:
        """Whether the node repeats numbers in time, as far as is known."""
        return not self.is_waiting or self._now - self._missing[0] < self.pace.unreached
