"""Steps begun before the one before has ended: the answers are the same, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import step_after
from tests.property.engine.strategies import fixed, policies, workloads
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine.build import Engine
from tests.support.engine.tool_grammars import GRAMMARS
from tests.support.examples import everyday

LEAVES = st.sampled_from([0, 0, 2, 5])
"""The runner leaves one of so many tokens behind."""


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Small engines whose runner goes on by itself, at once or as late as it may.

    Those that draft what grammars force do so after one or two steps without drafts.
    """
    seats, method = draw(st.integers(1, 5)), draw(st.sampled_from(["none", "none", "grammar"]))
    num_drafts = 0 if method == "none" else draw(st.integers(1, 4))
    least_budget = seats * (1 + num_drafts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_after, "STEPS_WITHOUT_DRAFTS", draw(st.integers(1, 2)))
        return Engine(
            num_blocks=draw(st.integers(2, 24)),
            seats=seats,
            budget=draw(st.integers(least_budget, least_budget + 24)),
            block_size=draw(st.sampled_from([1, 2, 4, 8])),
            caching=draw(st.booleans()),
            method=method,
            num_drafts=num_drafts,
            is_ahead=draw(st.booleans()),
            goes_on=draw(st.sampled_from(["early", "late"])),
            leaves_one_in=draw(LEAVES),
            **draw(policies()),
        )


@pytest.mark.covers("S61")
@settings(fixed, max_examples=everyday(30, of=500))
@given(st.data())
def test_every_answer_is_right_though_steps_begin_early(data: st.DataObject) -> None:
    engine = data.draw(engines())
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


@settings(fixed, max_examples=everyday(40, of=200))
@given(st.data())
def test_answers_under_grammars_are_right_too(data: st.DataObject) -> None:
    engine = data.draw(engines())
    arrivals = data.draw(workloads(engine, ("local", "remote", "exported")))
    grammars = data.draw(
        st.lists(st.sampled_from([*GRAMMARS, None]), min_size=len(arrivals), max_size=len(arrivals))
    )
    followed = [
        replace(one, grammar=grammar, min_tokens=0)
        for one, grammar in zip(arrivals, grammars, strict=True)
    ]
    run = Run(engine, followed)
    check_answers(run, run.to_the_end())


@pytest.mark.parametrize("goes_on", ["early", "late"])
@settings(fixed, max_examples=everyday(8, of=100))
@given(data=st.data())
def test_pools_that_preempt_all_the_time_change_no_answer(
    goes_on: str, data: st.DataObject
) -> None:
    length = data.draw(st.integers(4, 10))
    engine = Engine(
        num_blocks=data.draw(st.integers(-(-(length + 12) // 4), 8)),
        seats=4,
        budget=data.draw(st.integers(4, 20)),
        caching=data.draw(st.booleans()),
        is_ahead=True,
        goes_on=goes_on,
        leaves_one_in=data.draw(LEAVES),
        **data.draw(policies()),
    )
    arrivals = [
        Arrival(at, family, length, 12, 1, abort_after=abort)
        for family, (at, abort) in enumerate(
            data.draw(
                st.lists(
                    st.tuples(st.integers(0, 9), st.none() | st.integers(3, 20)),
                    min_size=4, max_size=4,
                )
            )
        )
    ]  # fmt: skip
    run = Run(engine, sorted(arrivals, key=lambda a: a.at_step))
    check_answers(run, run.to_the_end())


def test_such_engines_go_on_and_preempt() -> None:
    engine = Engine(
        num_blocks=9, seats=4, caching=False, is_ahead=True, goes_on="late", leaves_one_in=5,
        reservation_policy="none", retract_decode_steps=0, min_progress_tokens=0,
    )  # fmt: skip
    arrivals = [Arrival(0, family, 8, 12, 1) for family in range(3)]
    arrivals += [Arrival(0, 3, 8, 12, 1, grammar=GRAMMARS[0])]
    arrivals += [Arrival(9, family, 6, 10, 2, abort_after=8) for family in range(2)]
    run = Run(engine, arrivals)
    check_answers(run, run.to_the_end())
    assert engine.num_preemptions >= 2
    assert engine.runner.num_begun >= 6
    assert engine.runner.num_left_behind >= 2
