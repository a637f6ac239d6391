"""Random workloads: right answers, exact budgets, conserved blocks, no idle seat and no stall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.runner_contract import (
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
)
from tests.examples import everyday
from tests.fakes.hash_runner import HashRunner
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.unit.engine_core.build import Engine

fixed = settings(derandomize=True, deadline=None, database=None)


@st.composite
def engines(draw: st.DrawFn, *, least_blocks: int = 2) -> Engine:
    """Small engines, so that seats, blocks and tokens run out all the time."""
    seats = draw(st.integers(1, 5))
    method = draw(st.sampled_from(["none", "ngram", "suffix", "mtp", "grammar"]))
    num_drafts = 0 if method == "none" else draw(st.integers(1, 4))
    least_budget = seats * (1 + num_drafts)
    return Engine(
        num_blocks=draw(st.integers(least_blocks, 24)),
        seats=seats,
        budget=draw(st.integers(least_budget, least_budget + 24)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        caching=draw(st.booleans()),
        method=method,
        num_drafts=num_drafts,
        pairs_per_token=draw(st.sampled_from([0, 1, 8])),
        is_ahead=draw(st.booleans()),
        **draw(policies()),
    )


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Every choice that a configuration offers."""
    return {
        "reservation_policy": draw(
            st.sampled_from(["none", "fixed_blocks", "token_ratio", "global_ratio", "learned"])
        ),
        "preemption_policy": draw(
            st.sampled_from(["last_in_first_out", "shortest_output", "priority"])
        ),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_host_blocks": draw(st.sampled_from([2, 64])),
        "num_copy_polls": draw(st.sampled_from([None, 0, 1, 3])),
        "requeue": draw(st.sampled_from(["arrival", "tail"])),
        "enable_priority_scheduling": draw(st.booleans()),
        "skip_ahead_window": draw(st.integers(0, 3)),
        "skip_ahead_limit": draw(st.integers(1, 4)),
        "priority_pass_limit": draw(st.integers(1, 4)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 1, 5])),
        "retract_decode_steps": draw(st.sampled_from([0, 1, 20])),
        "min_progress_tokens": draw(st.sampled_from([0, 2, 16])),
        "retract_extra_tokens": draw(st.sampled_from([-1, 0, 8])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([0, 3, 600])),
    }


@st.composite
def workloads(draw: st.DrawFn, engine: Engine, kinds: tuple[str, ...]) -> list[Arrival]:
    longest = min(engine.runner.max_model_len - 1, 30)
    arrival = st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        family=st.integers(0, 2),
        length=st.integers(1, longest),
        max_tokens=st.integers(1, 10),
        seed=st.integers(0, 3),
        kind=st.sampled_from(kinds),
        delay=st.integers(0, 6),
        abort_after=st.none() | st.integers(0, 12),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    found = draw(st.lists(arrival, min_size=1, max_size=9))
    least = draw(st.sampled_from([0, 2, 7]))
    found = [replace(one, min_tokens=min(least, one.max_tokens)) for one in found]
    room = engine.runner.max_model_len
    fitting = [a for a in found if a.length + a.max_tokens <= room]
    return sorted(fitting, key=lambda a: a.at_step)


@pytest.mark.covers("B08", "F51", "F53", "S11", "S15", "S60")
@settings(fixed, max_examples=everyday(150, of=500))
@given(st.data())
def test_every_answer_is_right_whatever_happens_around_it(data: st.DataObject) -> None:
    engine = data.draw(engines())
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


@pytest.mark.covers("F51")
@settings(fixed, max_examples=everyday(40, of=100))
@given(st.data())
def test_pools_that_preempt_all_the_time_change_no_answer(data: st.DataObject) -> None:
    length = data.draw(st.integers(4, 10))
    num_blocks = data.draw(st.integers(-(-(length + 12) // 4), 8))
    engine = Engine(
        num_blocks=num_blocks,
        seats=4,
        budget=data.draw(st.integers(4, 20)),
        caching=data.draw(st.booleans()),
        is_ahead=data.draw(st.booleans()),
        **data.draw(policies()),
    )
    arrivals = [Arrival(0, family, length, 12, 1) for family in range(4)]
    run = Run(engine, arrivals)
    check_answers(run, run.to_the_end())


def test_preempted_prompts_are_scored_once() -> None:
    arrivals = [Arrival(0, family, 8, 12, 1, prompt_logprobs=1) for family in range(4)]
    for mode in ("recompute", "swap"):
        engine = Engine(
            num_blocks=6,
            seats=4,
            num_host_blocks=4,
            reservation_policy="none",
            retract_decode_steps=0,
            min_progress_tokens=0,
            preemption_mode=mode,
        )
        run = Run(engine, arrivals)
        check_answers(run, run.to_the_end())
        assert engine.scheduler.statistics().counters.num_preemptions >= 2


def test_such_pools_do_preempt() -> None:
    engine = Engine(
        num_blocks=6,
        seats=4,
        caching=False,
        reservation_policy="none",
        retract_decode_steps=0,
        min_progress_tokens=0,
    )
    run = Run(engine, [Arrival(0, family, 8, 12, 1) for family in range(4)])
    check_answers(run, run.to_the_end())
    assert engine.scheduler.statistics().counters.num_preemptions >= 2


@pytest.mark.covers("F42")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 9, 40])
def test_every_chunk_budget_gives_the_same_outputs(num_blocks: int, caching: bool) -> None:
    arrivals = [
        Arrival(0, 0, 17, 6, 1),
        Arrival(0, 1, 4, 5, 2),
        Arrival(1, 0, 13, 6, 3, prompt_logprobs=1),
        Arrival(3, 0, 17, 6, 1, prompt_logprobs=2),
        Arrival(5, 2, 1, 4, 1),
    ]
    answers = []
    for budget in range(3, 40):
        engine = Engine(num_blocks=num_blocks, seats=3, budget=budget, caching=caching)
        run = Run(engine, arrivals)
        answers.append(run.to_the_end())
        check_answers(run, answers[-1])
    assert all(answer == answers[0] for answer in answers)


class ForgetfulRunner(HashRunner):
    """Loses one byte of KV: the first byte of block 0."""

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        results = super().execute(batch, on_layer, on_queued)
        self.cache[0, 0, 0, 0] ^= 1
        return results


def test_one_lost_byte_of_kv_would_be_noticed() -> None:
    engine = Engine(num_blocks=6, seats=2)
    engine.runner = ForgetfulRunner(num_blocks=6)
    run = Run(engine, [Arrival(0, 0, 8, 6, 1), Arrival(0, 1, 8, 6, 1)])
    outputs = run.to_the_end()
    with pytest.raises(AssertionError):
        check_answers(run, outputs)
