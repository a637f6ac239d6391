"""What a router asks one node so that both know that they live, and what it finds. Pure.

Silence and echoes at one pace. Of many nodes, one on which this router has no request is asked
rarely, and may be silent until then. With a request, or once it is late, it is asked often: from
there on it is judged as one that had requests all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from router.dispatch.liveness.echoes import Echoes
from router.dispatch.liveness.pace import IDLE, IDLE_TICKS, PINGED_TICKS, USUAL, WIDE, Pace
from router.dispatch.liveness.silence import Silence, SilenceVerdict


class NodeVerdict(Enum):
    """What is wrong with a node, at a tick."""

    NONE = "none"
    SUSPECTED = "suspected"
    """Nothing was heard for too long."""
    UNREACHED = "unreached"
    """It is heard, and nothing that is sent arrives there."""
    LOST = "lost"


class NodeLiveness:
    """Told what happens on one node's stream, and ticked every `TICK_S`."""

    def __init__(self, phase: int = 0) -> None:
        """Begin in a tick of its own, by `phase`."""
        self._silence = Silence()
        self._echoes = Echoes(phase)
        self._found = SilenceVerdict.NONE
        self._num_unused = PINGED_TICKS
        """Ticks since this router had a request on the node."""
        self._is_due = False
        """Whether something is to come from the node, which is idle."""
        self._can_rest = False
        """Whether there is nothing to do until a number is to be sent, or something happens."""

    def restart(self) -> None:
        """Begin with a new stream."""
        self._set_pace(USUAL)
        self._silence.heard()
        self._echoes.restart()
        self._found, self._is_due = SilenceVerdict.NONE, False

    def heard(self) -> None:
        """Record a message of the node."""
        self._silence.heard()
        self._is_due = False

    def repeated(self, number: int) -> None:
        """Take the number of a message of the node; 0: it repeats none."""
        self._echoes.heard(number)

    def use(self) -> int:
        """Record that the node gets a request now; return the echo number to send with it, or 0."""
        self._num_unused = 0
        if self._echoes.pace is not IDLE:
            return 0
        self._set_pace(WIDE)
        return self._echoes.ask()

    def rest(self) -> bool:
        """Count a tick if nothing is to be done in it; return False, and count none, otherwise.

        Most ticks of many nodes are such, and this costs less than `tick`. Not to be asked in a
        tick in which the node `is_used`, or that `is_alarm`, or of few nodes.
        """
        return self._can_rest and self._echoes.skip()

    def tick(
        self, *, is_wide: bool, is_used: bool, is_alarm: bool, is_running: Callable[[], bool]
    ) -> int:
        """Count a tick; return the number to send now, or 0. `judge` says what it found.

        `is_wide`: there are many nodes. `is_used`: this router has a request on this one.
        `is_alarm`: another node has just fallen silent. `is_running`: whether the node's process
        shows that it runs, where it `is_pinged`.
        """
        self._num_unused = 0 if is_used else self._num_unused + 1
        echoes = self._echoes
        is_at_rest = echoes.pace is IDLE and not self._is_due
        if is_at_rest and not (is_used or is_alarm or echoes.is_waiting):
            number = echoes.tick()
            self._is_due = number > 0
            self._can_rest = not (self._is_due or self.is_pinged)
            return number
        was_idle = self._echoes.pace is IDLE
        self._set_pace(self._wanted_pace(is_wide, is_alarm))
        number = self._echoes.tick()
        if was_idle and is_used and not number:
            number = self._echoes.ask()
        self._found = SilenceVerdict.NONE
        if not self.is_at_rest:
            self._found = self._silence.tick(is_running=self.is_pinged and is_running())
        self._is_due = self._is_due or number > 0
        return number

    def judge(self) -> NodeVerdict:
        """Return what is wrong since the last tick; a suspicion of silence is returned once."""
        if self._silence.has_begun:
            self._echoes.forgive()
            if self._found is SilenceVerdict.LOST:
                return NodeVerdict.LOST
            if self._found is SilenceVerdict.SUSPECTED:
                return NodeVerdict.SUSPECTED
            return NodeVerdict.NONE
        return NodeVerdict.NONE if self.is_reached else NodeVerdict.UNREACHED

    @property
    def pace(self) -> Pace:
        return self._echoes.pace

    @property
    def is_at_rest(self) -> bool:
        """Whether the node is idle and nothing is to come from it: there is nothing to judge."""
        return self._echoes.pace is IDLE and not self._is_due

    @property
    def latest(self) -> int:
        """The latest number to send."""
        return self._echoes.latest

    @property
    def is_reached(self) -> bool:
        """Whether the node gets what is sent to it, as far as is known."""
        return self._echoes.is_reached

    @property
    def is_pinged(self) -> bool:
        """Whether pings are to tell if the node's process runs."""
        return self._num_unused < PINGED_TICKS

    @property
    def reason(self) -> str:
        """How long nothing was heard, in words."""
        return self._silence.reason

    def _wanted_pace(self, is_wide: bool, is_alarm: bool) -> Pace:
        """Return the pace; never again the usual one after the node was allowed longer silence."""
        if not is_wide and self._echoes.pace is USUAL:
            return USUAL
        is_quiet = self._num_unused >= IDLE_TICKS and not is_alarm
        is_well = self.is_reached and not self._silence.has_begun
        return IDLE if is_quiet and is_well and self._echoes.can_repeat else WIDE

    def _set_pace(self, pace: Pace) -> None:
        self._can_rest = False
        self._silence.pace = self._echoes.pace = pace
