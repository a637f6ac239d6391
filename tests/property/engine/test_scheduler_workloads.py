"""Random workloads: right answers, exact budgets, conserved blocks, no idle seat and no stall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.runner_contract import OnLayer, OnQueued, RunnerResult, ScheduledSequence
from tests.property.engine.strategies import engines, fixed, policies, workloads
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine.build import Engine
from tests.support.engine.choices import MODES
from tests.support.engine.hash_runner import HashRunner
from tests.support.examples import everyday


@pytest.mark.covers("B08", "F51", "F53", "S11", "S15", "S60")
@settings(fixed, max_examples=everyday(30, of=500))
@given(st.data())
def test_every_answer_is_right_whatever_happens_around_it(data: st.DataObject) -> None:
    engine = data.draw(engines())
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


@pytest.mark.covers("F51")
@settings(fixed, max_examples=everyday(8, of=100))
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


@pytest.mark.covers("T26")
def test_preempted_prompts_are_scored_once() -> None:
    arrivals = [Arrival(0, family, 8, 12, 1, prompt_logprobs=1) for family in range(4)]
    for mode in MODES:
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
    for budget in range(3, 40, everyday(3, of=1)):
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
