"""A wrong history made short: parts are left out while the same thing is wrong. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from simulator.faults.history import Fault, History

MOST_RUNS = 400
IsWrong = Callable[[History], str]
"""Runs a history; returns what is wrong in it, empty if nothing is."""


def kind_of(wrong: str) -> str:
    """Return what is wrong without the names and numbers, which other histories have too."""
    return re.sub(r"\b(?:[a-z]+-\d\w*#\d+|r?\d[\d.]*)", "_", wrong)[:40]


def shortened(
    history: History, wrong: str, run: IsWrong, most_runs: int = MOST_RUNS
) -> tuple[History, str]:
    """Return the shortest history found in which the same kind of thing is wrong, and what.

    Parts are left out in halves, quarters and so on (delta debugging), then the spans of faults and
    the requests' lives are made simple.
    """
    search = _Search(history, wrong, run, most_runs)
    search.leave_out()
    search.simplify()
    return search.history, search.wrong


class _Search:
    def __init__(self, history: History, wrong: str, run: IsWrong, most_runs: int) -> None:
        self.history, self.wrong = history, wrong
        self._kind = kind_of(wrong)
        self._run = run
        self._num_left = most_runs

    def _takes(self, shorter: History) -> bool:
        """Go on with a history if the same is wrong in it."""
        if not self._num_left:
            return False
        self._num_left -= 1
        wrong = self._run(shorter)
        if kind_of(wrong) != self._kind:
            return False
        self.history, self.wrong = shorter, wrong
        return True

    def leave_out(self) -> None:
        """Leave out parts of any size, until no single one can be left out."""
        size = max(1, len(self.history) // 2)
        while True:
            has_shrunk, begin = False, 0
            while begin < len(self.history):
                every = range(len(self.history))
                kept = [i for i in every if not begin <= i < begin + size]
                if self._takes(self.history.only(kept)):
                    has_shrunk = True
                else:
                    begin += size
            if size > 1:
                size //= 2
            elif not has_shrunk or not self._num_left:
                return

    def simplify(self) -> None:
        """Try simpler values of what is left."""
        for index, asked in enumerate(self.history.requests):
            requests = list(self.history.requests)
            requests[index] = replace(asked, leaves_at_s=None, num_shared=0)
            if requests[index] != asked:
                self._takes(replace(self.history, requests=tuple(requests)))
        for index, fault in enumerate(self.history.faults):
            for simpler in _simpler(fault):
                faults = list(self.history.faults)
                faults[index] = simpler
                if self._takes(replace(self.history, faults=tuple(faults))):
                    break


def _simpler(fault: Fault) -> list[Fault]:
    spans_s = [span_s for span_s in (0.0, 0.05, 1.0) if span_s < fault.span_s]
    return [replace(fault, span_s=span_s) for span_s in spans_s]
