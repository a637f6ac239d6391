"""Answers under grammars: the same tokens whatever happens around them, and each of them whole.

The grammar of a request and its output tokens alone decide what may follow.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.request import SamplingParams
from tests.property.engine.strategies import engines, fixed
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine import hash_grammars
from tests.support.engine.build import Engine
from tests.support.engine.choices import METHODS, MODES
from tests.support.engine.hash_grammars import NUMBERS, PERSON
from tests.support.engine.hash_runner import EOS_TOKEN_ID, expected_tokens
from tests.support.engine.tool_grammars import GRAMMARS
from tests.support.examples import everyday


@st.composite
def constrained(draw: st.DrawFn, engine: Engine) -> list[Arrival]:
    """Requests with and without grammars, long enough that most answers are whole."""
    room = engine.runner.max_model_len
    arrival = st.builds(
        Arrival,
        at_step=st.integers(0, 6),
        family=st.integers(0, 2),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 3),
        kind=st.sampled_from(("local", "remote", "exported")),
        delay=st.integers(0, 4),
        abort_after=st.none() | st.integers(0, 12),
        grammar=st.sampled_from([*GRAMMARS, None]),
    )
    found = draw(st.lists(arrival, min_size=1, max_size=6))
    return sorted(
        (one for one in found if one.length + one.max_tokens <= room), key=lambda a: a.at_step
    )


@pytest.mark.covers("G04", "G23")
@settings(fixed, max_examples=everyday(20, of=150))
@given(st.data())
def test_the_same_tokens_whatever_happens(data: st.DataObject) -> None:
    engine = data.draw(engines(least_blocks=8))
    run = Run(engine, data.draw(constrained(engine)))
    check_answers(run, run.to_the_end())


@settings(fixed, max_examples=everyday(15, of=60))
@given(st.integers(0, 10**6), st.sampled_from([0, 3, 12, 30]))
def test_whole_answers_follow_their_schema(seed: int, min_tokens: int) -> None:
    for grammar, schema in zip(GRAMMARS, (PERSON, NUMBERS), strict=False):
        sampling = SamplingParams(max_tokens=60, seed=seed, grammar=grammar, min_tokens=min_tokens)
        tokens = expected_tokens((1, 2, 3), sampling)
        if tokens[-1] == EOS_TOKEN_ID:
            jsonschema.validate(json.loads(hash_grammars.text_of(tokens)), schema)


@pytest.mark.covers("G01")
@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
def test_preempted_answers_follow_their_grammars(mode: str, method: str, is_ahead: bool) -> None:
    """The pool holds a third of what six requests need, so they preempt each other."""
    for family in range(everyday(1, of=3)):
        engine = Engine(
            num_blocks=14, seats=4, budget=20, caching=False, num_host_blocks=64,
            reservation_policy="none", retract_decode_steps=0, min_progress_tokens=0,
            preemption_mode=mode, method=method, num_drafts=0 if method == "none" else 2,
            is_ahead=is_ahead,
        )  # fmt: skip
        arrivals = [
            Arrival(0, family, 8, 40, i, grammar=GRAMMARS[(family + i) % len(GRAMMARS)])
            for i in range(6)
        ]
        run = Run(engine, arrivals)
        check_answers(run, run.to_the_end())
        counters = engine.scheduler.statistics().counters
        assert counters.num_preemptions > 0, "nothing was shown"
        assert (counters.num_swapped_out > 0) == (mode == "swap")
        assert (counters.num_drafted > 0) == (method != "none")


def _outputs(**given: Any) -> tuple[list[list[int]], Engine]:
    engine = Engine(num_blocks=200, seats=4, budget=80, **given)
    arrivals = [Arrival(0, i, 5, 60, 7, grammar=GRAMMARS[0]) for i in range(4)]
    run = Run(engine, arrivals)
    outputs = run.to_the_end()
    check_answers(run, outputs)
    return outputs, engine


def test_forced_tokens_are_drafts_that_are_always_accepted() -> None:
    plain, slow = _outputs()
    drafted, fast = _outputs(method="grammar", num_drafts=8)
    assert drafted == plain
    counters = fast.scheduler.statistics().counters
    assert counters.num_drafted == counters.num_accepted > 10
    assert len(fast.runner.batches) < 0.8 * len(slow.runner.batches)
