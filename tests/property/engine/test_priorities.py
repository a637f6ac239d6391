"""Priorities: urgent requests wait a bounded time, and a stream of them starves nobody."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import Engine, make_request
from tests.support.engine.choices import MODES, REQUEUES
from tests.support.engine.hash_runner import expected_tokens
from tests.support.examples import everyday

fixed = settings(derandomize=True, deadline=None, database=None)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    return Engine(
        num_blocks=draw(st.integers(12, 24)),
        seats=draw(st.integers(1, 3)),
        budget=draw(st.integers(4, 16)),
        caching=draw(st.booleans()),
        enable_priority_scheduling=True,
        **draw(policies()),
    )


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "reservation_policy": draw(st.sampled_from(["none", "global_ratio"])),
        "preemption_mode": draw(st.sampled_from(MODES)),
        "num_host_blocks": 64,
        "requeue": draw(st.sampled_from(REQUEUES)),
        "skip_ahead_window": draw(st.integers(0, 2)),
        "skip_ahead_limit": draw(st.integers(1, 4)),
        "priority_pass_limit": draw(st.integers(1, 4)),
        "min_progress_tokens": draw(st.sampled_from([0, 2, 16])),
    }


def add(engine: Engine, length: int, max_tokens: int, seed: int, priority: int) -> Sequence:
    return engine.add(
        make_request(length, seed=seed, max_tokens=max_tokens, ignore_eos=True, priority=priority)
    )


def check_answer(engine: Engine, sequence: Sequence) -> None:
    request = sequence.request
    right = expected_tokens(request.prompt_token_ids, request.sampling)
    assert engine.outputs[sequence.sequence_id] == right


@pytest.mark.covers("S41", "F144")
@settings(fixed, max_examples=everyday(10, of=60))
@given(st.data())
def test_a_stream_of_urgent_requests_starves_nobody(data: st.DataObject) -> None:
    engine = data.draw(engines())
    most_output = 10
    low = [
        add(engine, data.draw(st.integers(1, 20)), most_output, seed, -seed) for seed in (1, 2, 3)
    ]
    urgent_length, urgent_output = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    config = engine.config
    # Each time that it is seated, a sequence produces a token at least; then it is passed at most
    # so often, by one that ends after so many steps.
    passes = config.priority_pass_limit + config.skip_ahead_limit + 4
    bound = len(low) * most_output * passes * (urgent_length + urgent_output + 20)
    for step in range(bound):
        if all(one.status is SequenceStatus.FINISHED for one in low):
            break
        while len(engine.scheduler.waiting) < 6:
            add(engine, urgent_length, urgent_output, 5 + step % 3, 1)
        engine.step()
    for one in low:
        check_answer(engine, one)


@pytest.mark.covers("S41", "F144")
@settings(fixed, max_examples=everyday(10, of=60))
@given(st.data())
def test_an_urgent_request_does_not_wait_for_the_outputs_of_others(data: st.DataObject) -> None:
    engine = data.draw(engines())
    lows = [add(engine, 8, 30, seed, 0) for seed in range(data.draw(st.integers(1, 6)))]
    for _ in range(data.draw(st.integers(1, 12))):
        engine.step()
    urgent = add(engine, data.draw(st.integers(1, 20)), 4, 7, 1000)
    # The prompts and recomputations that run already, the progress of one that has just resumed,
    # and its own prompt, beside which the oldest other prompt keeps a share. No output of 30.
    bound = 8 * len(lows) + 16 + urgent.num_prompt + 4
    for _ in range(bound):
        if urgent.num_output:
            break
        engine.step()
    assert urgent.num_output, "it still waits"
    engine.run(most_steps=2000)
    for one in (*lows, urgent):
        check_answer(engine, one)


def test_one_urgent_request_after_another_waits_for_progress_of_the_one_it_displaced_only() -> None:
    engine = Engine(seats=1, budget=16, enable_priority_scheduling=True, min_progress_tokens=3)
    low = add(engine, 8, 40, 1, 0)
    engine.step()
    waits = []
    while low.status is not SequenceStatus.FINISHED:
        urgent = add(engine, 4, 2, 2, 1)
        waits.append(0)
        while not urgent.num_output:
            engine.step()
            waits[-1] += 1
        engine.run_until(lambda one=urgent: one.status is SequenceStatus.FINISHED)  # type: ignore[misc]
        engine.step()
    assert max(waits) <= 6
    assert len(waits) > 8
    check_answer(engine, low)
