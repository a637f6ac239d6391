"""Drafts come and go while steps are planned ahead: the answers are those without drafts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import step_after
from engine.core.sequences.sequence import Sequence
from tests.property.engine.strategies import fixed, policies, workloads
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine.build import STRICT, Engine
from tests.support.engine.hash_runner import VOCAB_SIZE, expected_tokens
from tests.support.engine.speculation_views import GuessedDrafts
from tests.support.examples import everyday


def let_guess(engine: Engine, *, share: float, seed: int) -> None:
    """Let an engine draft in a share of its steps."""
    answers: dict[int, list[int]] = {}

    def answer(one: Sequence) -> list[int]:
        if one.sequence_id not in answers:
            answers[one.sequence_id] = expected_tokens(one.prompt_token_ids, one.request.sampling)
        return answers[one.sequence_id]

    most = engine.scheduler.limits.num_speculative_tokens
    engine.draft_with(
        GuessedDrafts(answer, most=most, share=share, seed=seed, vocab_size=VOCAB_SIZE)
    )


@st.composite
def engines(draw: st.DrawFn, *, goes_on: str = "", leaves_one_in: int = 0) -> Engine:
    """Small engines that plan ahead and draft in some steps."""
    seats, num_drafts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    least_budget = seats * (1 + num_drafts)
    engine = Engine(
        num_blocks=draw(st.integers(2, 24)),
        seats=seats,
        budget=draw(st.integers(least_budget, least_budget + 24)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        caching=draw(st.booleans()),
        method="ngram",
        num_drafts=num_drafts,
        is_ahead=True,
        goes_on=goes_on,
        leaves_one_in=leaves_one_in,
        **draw(policies()),
    )
    let_guess(engine, share=draw(st.sampled_from([0.05, 0.3, 0.9])), seed=draw(st.integers(0, 9)))
    return engine


@pytest.mark.covers("S60")
@settings(fixed, max_examples=everyday(15, of=100))
@given(st.data())
def test_every_answer_is_right_whenever_drafts_come(data: st.DataObject) -> None:
    engine = data.draw(engines())
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that draft go on after two steps without drafts."""
    monkeypatch.setattr(step_after, "STEPS_WITHOUT_DRAFTS", 2)


@pytest.mark.covers("S61")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("goes_on", ["early", "late"])
@settings(
    fixed,
    max_examples=everyday(15, of=100),
    suppress_health_check=[*fixed.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_answer_is_right_where_steps_begin_early_between_drafts(
    goes_on: str, data: st.DataObject
) -> None:
    engine = data.draw(engines(goes_on=goes_on, leaves_one_in=data.draw(st.sampled_from([0, 5]))))
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


@pytest.mark.usefixtures("impatient")
def test_such_engines_begin_steps_and_draft() -> None:
    engine = Engine(
        num_blocks=14, seats=4, caching=False, method="ngram", num_drafts=3, is_ahead=True,
        goes_on="late", leaves_one_in=5, **STRICT,
    )  # fmt: skip
    let_guess(engine, share=0.1, seed=1)
    run = Run(engine, [Arrival(0, family, 8, 20, 1) for family in range(6)])
    check_answers(run, run.to_the_end())
    counters, runner = engine.scheduler.statistics().counters, engine.runner
    assert 0 < counters.num_accepted < counters.num_drafted
    assert min(counters.num_preemptions, runner.num_left_behind, runner.num_begun) >= 2
    assert engine.plans_ahead["drafts"] >= 2


@pytest.mark.covers("F146")
def test_such_engines_preempt_and_plan_ahead_and_draft() -> None:
    engine = Engine(
        num_blocks=8,
        seats=4,
        caching=False,
        method="ngram",
        num_drafts=3,
        is_ahead=True,
        reservation_policy="none",
        retract_decode_steps=0,
        min_progress_tokens=0,
    )
    let_guess(engine, share=0.1, seed=1)
    run = Run(engine, [Arrival(0, family, 8, 12, 1) for family in range(6)])
    check_answers(run, run.to_the_end())
    counters = engine.scheduler.statistics().counters
    assert counters.num_preemptions >= 2
    assert 0 < counters.num_accepted < counters.num_drafted
    assert min(engine.plans_ahead[rule] for rule in ("taken", "drafts", "blocks")) >= 2
