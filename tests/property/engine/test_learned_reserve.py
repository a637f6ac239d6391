"""The learned reserve beside a simulation of the expected future, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.policies.learned_outputs import LearnedOutputs
from engine.core.policies.output_history import OutputHistory
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import View
from tests.support.examples import everyday

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=everyday(60, of=200))


@st.composite
def policies(draw: st.DrawFn) -> LearnedOutputs:
    history = OutputHistory()
    outputs = st.tuples(st.integers(1, 60), st.sampled_from([8, 30, 64, 100]))
    for num_output, most in draw(st.lists(outputs, max_size=40)):
        history = history.after_output(min(num_output, most), most)
    return LearnedOutputs(
        quantile_ppm=draw(st.integers(0, 1_000_000)),
        first_share_ppm=draw(st.integers(1, 1_000_000)),
        clip=4096,
        lookahead=draw(st.integers(0, 3)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        history=history,
    )


@st.composite
def views(draw: st.DrawFn) -> View:
    num_output = draw(st.integers(0, 60))
    num_known = num_output + draw(st.integers(1, 80))
    return View(
        num_known=num_known,
        num_output=num_output,
        max_new_tokens=draw(st.sampled_from([0, 8, 30, 64, 100])),
        num_held_blocks=draw(st.integers(0, 30)),
    )


def end_of(policy: LearnedOutputs, view: View) -> int:
    """When the sequence ends, by the definition of the quantile, without arrays."""
    most, out = view.max_new_tokens, view.num_output
    if out >= most:
        return 0
    everyone = policy.history.recent[0]
    if len(everyone) < 8:
        return -(-(most - out) * policy.first_share_ppm // 1_000_000)
    own = policy.history.recent[most.bit_length()]
    longer = sorted(n for n in (own if len(own) >= 8 else everyone) if n > out)
    if not longer:
        return min(max(out // 2, 16), most - out)
    index = min(len(longer) * policy.quantile_ppm // 1_000_000, len(longer) - 1)
    return min(longer[index] - out, most - out)


def simulated(policy: LearnedOutputs, seated: list[View]) -> int:
    size = policy.block_size
    seated = [view for view in seated if view.max_new_tokens]
    ends = [end_of(policy, view) for view in seated]
    held = sum(view.num_held_blocks for view in seated) * size
    largest = held
    for now in range(1, max(ends, default=0) + 1):
        used = [
            view.num_known + now + policy.lookahead + 3 * size // 4
            for view, end in zip(seated, ends, strict=True)
            if end >= now
        ]
        largest = max(largest, sum(used))
    return -(-(largest - held) // size)


@pytest.mark.covers("S26")
@fixed
@given(policies(), st.lists(views(), max_size=10), st.lists(views(), max_size=3), st.data())
def test_the_reserve_is_the_largest_use_of_the_simulated_future(
    policy: LearnedOutputs, seated: list[View], later: list[View], data: st.DataObject
) -> None:
    reserve = policy.reserve(growth_columns([*seated, View(max_new_tokens=0)]))
    assert reserve.blocks == simulated(policy, seated)
    for view in later:
        with_it = simulated(policy, [*seated, view])
        assert reserve.blocks_with(view) == with_it
        reserve, seated = reserve.plus(view), [*seated, view]
        assert reserve.blocks == with_it
    for number, view in enumerate(seated):
        num_more = data.draw(st.integers(0, 9))
        reserve = reserve.grown(view, num_more)
        seated[number] = replace(view, num_held_blocks=view.num_held_blocks + num_more)
        assert reserve.blocks == simulated(policy, seated)
    while seated:
        gone = seated.pop(data.draw(st.integers(0, len(seated) - 1)))
        reserve = reserve.minus(gone)
        assert reserve.blocks == simulated(policy, seated)
        assert type(reserve.blocks) is int
