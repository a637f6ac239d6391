"""Many histories, one seed after the other, until one is wrong; and that one made short."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from simulator.faults.cluster import run_history
from simulator.faults.demand.shares import way_of
from simulator.faults.demand.simpler import simpler_demands
from simulator.faults.drawing import Wishes, draw_history
from simulator.faults.history import Fault, History
from simulator.faults.kinds import HARMLESS, FaultKind

MOST_RUNS = 400
IsWrong = Callable[[History], str]
"""Runs a history; returns what is wrong in it, empty if nothing is."""
ALL = Wishes(kinds=tuple(FaultKind), num_requests=20)
RUNS_PER_COLLECTION = 50


@dataclass(frozen=True, slots=True)
class WrongHistory:
    """A history that is wrong, and what is wrong in it."""

    history: History
    wrong: str


def history_of(seed: int, wishes: Wishes) -> History:
    """Return the history of a seed, drawn in the way of this seed.

    In a calm one nothing breaks, unless the wishes are for nothing else.
    """
    way = way_of(seed)
    calm = tuple(kind for kind in wishes.kinds if kind in HARMLESS)
    kinds = calm if way.is_calm and calm else wishes.kinds
    return draw_history(seed, replace(wishes, kinds=kinds), way.shares)


def wrong_histories(
    seeds: Sequence[int], wishes: Wishes, run: IsWrong = run_history
) -> Iterator[WrongHistory | None]:
    """Run the history of each seed; yield it if it is wrong, and None if not."""
    for number, seed in enumerate(seeds):
        if number % RUNS_PER_COLLECTION == 0:
            gc.collect()
        history = history_of(seed, wishes)
        wrong = run(history)
        yield WrongHistory(history, wrong) if wrong else None


def first_wrong(seed: int, most: int, kinds: tuple[FaultKind, ...]) -> tuple[int, str]:
    """Return how many histories from `seed` on were run, and what is wrong in the last of them.

    That is empty when nothing is wrong in `most` of them.
    """
    with quiet():
        found = wrong_histories(range(seed, seed + most), replace(ALL, kinds=kinds))
        for number, wrong in enumerate(found, 1):
            if wrong is not None:
                return number, wrong.wrong
    return most, ""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of the code that serves, and collect garbage only between histories.

    That code warns of every fault. Objects that exist already are not traversed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
        logging.disable(before)


def kind_of(wrong: str) -> str:
    """Return a violation without its names and numbers, to compare those of two histories."""
    return re.sub(r"\b(?:[a-z]+-\d\w*#\d+|r?\d[\d.]*)", "_", wrong)[:40]


def shortened(
    history: History, wrong: str, run: IsWrong, most_runs: int = MOST_RUNS
) -> tuple[History, str]:
    """Return the shortest history found with a violation of the same kind, and that violation.

    Parts are left out in halves, quarters and so on (delta debugging), then the spans of faults and
    the requests' lives are made simple, and what they demand.
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
        """Continue with a history if it has a violation of the same kind; return whether."""
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
        """Try simpler values of the faults and requests that are left."""
        for simpler_demand in simpler_demands():
            shorter = simpler_demand(self.history)
            if shorter != self.history:
                self._takes(shorter)
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
