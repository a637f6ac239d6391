"""A wrong history is made short, and the same is wrong in it."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.drawing import Wishes, draw_history
from simulator.faults.history import History
from simulator.faults.kinds import FaultKind
from simulator.faults.search import kind_of, shortened

HISTORY = draw_history(
    4, Wishes(kinds=(FaultKind.CRASH, FaultKind.FREEZE), num_requests=30, num_prefill=1)
)


def test_what_is_left_is_what_is_needed() -> None:
    runs = 0

    def run(history: History) -> str:
        nonlocal runs
        runs += 1
        names = {asked.name for asked in history.requests}
        is_wrong = {"r3", "r17"} <= names and any(f.span_s >= 0 for f in history.faults)
        return f"Violation: r{len(names)} ended twice" if is_wrong else ""

    short, wrong = shortened(HISTORY, run(HISTORY), run)
    assert {asked.name for asked in short.requests} == {"r3", "r17"}
    assert len(short.faults) == 1
    assert short.faults[0].span_s == 0.0
    assert wrong == "Violation: r2 ended twice"
    assert runs < 150


def test_demands_that_are_not_needed_are_left_out() -> None:
    asked = tuple(
        replace(one, salt="s", grammar="slow", is_cut=True) for one in HISTORY.requests[:3]
    )
    shape = replace(HISTORY.shape, pools=(9, 9, 9), max_queued=2, sheds=True, chunk_granularity=4)
    history = replace(HISTORY, shape=shape, requests=asked)

    def run(history: History) -> str:
        is_wrong = history.shape.sheds and any(one.salt for one in history.requests)
        return "Violation: r1 is shed" if is_wrong else ""

    short, _ = shortened(history, run(history), run)
    assert (short.shape.sheds, short.shape.max_queued, short.shape.pools) == (True, 256, ())
    assert short.shape.chunk_granularity == 1
    (left,) = short.requests
    assert (left.salt, left.grammar, left.is_cut) == ("s", "", False)


def test_another_thing_that_goes_wrong_is_not_taken_for_the_same() -> None:
    def run(history: History) -> str:
        if len(history.requests) == 30:
            return "Violation: decode-0#2 holds something"
        return "AssertionError: no such node"

    short, wrong = shortened(HISTORY, run(HISTORY), run)
    assert len(short.requests) == 30
    assert wrong == "Violation: decode-0#2 holds something"


def test_the_runs_have_a_bound() -> None:
    runs = 0

    def run(history: History) -> str:
        nonlocal runs
        runs += 1
        return "something else"

    shortened(HISTORY, "wrong", run, most_runs=5)
    assert runs == 5


def test_names_and_numbers_do_not_make_another_kind() -> None:
    assert kind_of("Violation: r3 ended 1.250 s late") == kind_of("Violation: r17 ended 2 s late")
    assert kind_of("decode-0#2 holds") == kind_of("mixed-1x#14 holds")
    assert kind_of("Violation: r3 ended twice") != kind_of("Violation: r3 waited")
