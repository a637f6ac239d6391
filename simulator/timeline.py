"""The virtual clock and its events: one heap, without sleeping and without threads."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

_Event = tuple[float, bool, int, Callable[[], object]]


class Timeline:
    """A clock that stands still while an event is handled, and then jumps to the next one.

    Events of one moment are handled in the order in which they were added, `last` ones after all
    others: a message that arrives at the end of a step is read when the step ends.
    """

    def __init__(self) -> None:
        self.present_s = 0.0
        """The seconds since the start; an attribute, as it is read very often."""
        self._events: list[_Event] = []
        self._numbers = count()
        self._is_stopping = False
        self.num_handled = 0

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return self.present_s

    def at(self, at_s: float, call: Callable[[], object], *, last: bool = False) -> None:
        """Schedule `call` at `at_s`. Raises `ValueError` for a time that has passed."""
        if at_s < self.present_s:
            raise ValueError(f"an event at {at_s} s, and it is {self.present_s} s")
        heappush(self._events, (at_s, last, next(self._numbers), call))

    def after(self, span_s: float, call: Callable[[], object]) -> None:
        """Schedule `call` in `span_s` seconds. Raises `ValueError` for a span below 0."""
        if span_s < 0:
            raise ValueError(f"an event {-span_s} s ago")
        heappush(self._events, (self.present_s + span_s, False, next(self._numbers), call))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Handle events until there is none left, one has called `stop`, or `until()` is true after
        one.
        """
        events, self._is_stopping = self._events, False
        while events:
            self.present_s, _, _, call = heappop(events)
            self.num_handled += 1
            call()
            if (until is not None and until()) or self._is_stopping:
                return

    def stop(self) -> None:
        """Let `run` return after the present event."""
        self._is_stopping = True
