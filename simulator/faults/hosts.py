"""Processes on hosts: the clock of each, and which hosts reach which others, one way at a time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from simulator.timeline import Timeline

_Call = Callable[[], object]


class ProcessClock:
    """Stands in for a `Timeline` inside one process.

    Its time is that of the timeline, and ahead of it after a `jump`. Calls that come due while the
    process is frozen are made when it goes on, in order; a dead process makes no calls.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ahead_s = 0.0
        self._held: deque[_Call] = deque()
        self.is_alive = True
        self.is_frozen = False

    @property
    def is_running(self) -> bool:
        """Whether the process makes the calls that come due."""
        return self.is_alive and not self.is_frozen

    def now_s(self) -> float:
        """Return the time of the process."""
        return self._timeline.present_s + self._ahead_s

    @property
    def present_s(self) -> float:
        """The time of the process, as that of a `Timeline` is read."""
        return self._timeline.present_s + self._ahead_s

    def at(self, at_s: float, call: _Call, *, last: bool = False) -> None:
        """Make `call` in the process at `at_s`, a time of its clock, or now if that is over."""
        timeline = self._timeline
        due_s = max(at_s - self._ahead_s, timeline.present_s)
        # Rounded down, it would be reached before anything is due, again and again.
        while due_s + self._ahead_s < at_s:
            due_s = math.nextafter(due_s, math.inf)
        timeline.at(due_s, partial(self.run, call), last=last)

    def after(self, span_s: float, call: _Call) -> None:
        """Make `call` in the process in `span_s` seconds."""
        self._timeline.after(span_s, partial(self.run, call))

    def run(self, call: _Call) -> None:
        """Make `call` now, or when the process goes on."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._held.append(call)
        else:
            call()

    def freeze(self) -> None:
        """Stop the process: its calls wait for `thaw`."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Make the calls that came due meanwhile."""
        self.is_frozen = False
        held, self._held = self._held, deque()
        now_s = self._timeline.now_s()
        for call in held:
            self._timeline.at(now_s, partial(self.run, call))

    def kill(self) -> None:
        """Stop the process for good."""
        self.is_alive = False
        self._held.clear()

    def jump(self, span_s: float) -> None:
        """Set the clock ahead, as after a machine stood still, and make the calls due by then."""
        self._ahead_s += span_s


class Paths:
    """Every host reaches every other one, except where that was cut; hosts go by their names.

    Two cuts of one way end when both have ended.
    """

    def __init__(self) -> None:
        self._cuts: Counter[tuple[str, str]] = Counter()

    def is_open(self, source: str, target: str) -> bool:
        """Return whether what `source` sends arrives at `target`."""
        return not self._cuts or (source, target) not in self._cuts

    def cut(self, source: str, target: str) -> None:
        """Cut the way from `source` to `target`: messages wait for its mending."""
        self._cuts[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """End one cut of this way."""
        self._cuts[source, target] -= 1
        if not self._cuts[source, target]:
            del self._cuts[source, target]
