"""Many histories, one seed after the other, until one is wrong."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from simulator.faults.cluster import run_history
from simulator.faults.drawing import Wishes, draw_history
from simulator.faults.history import FaultKind, History
from simulator.faults.shorten import IsWrong

ALL = Wishes(kinds=tuple(FaultKind), num_requests=20)
RUNS_PER_COLLECTION = 50
CALM_SHARE = 8
"""One history in so many has no fault: there more must hold."""


@dataclass(frozen=True, slots=True)
class WrongHistory:
    """A history that is wrong, and what is wrong in it."""

    history: History
    wrong: str


def history_of(seed: int, wishes: Wishes) -> History:
    """Return the history of a seed; some have no faults."""
    calm = replace(wishes, kinds=())
    return draw_history(seed, calm if seed % CALM_SHARE == 0 else wishes)


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
    """Let the code that serves log nothing, because it warns of every fault, and collect garbage
    only between histories."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        logging.disable(before)
