"""Drafts come and go while steps are planned ahead: the answers are those without drafts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.sequences.sequence import Sequence
from tests.property.engine.strategies import fixed, policies, workloads
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine.build import Engine
from tests.support.engine.hash_runner import VOCAB_SIZE, expected_tokens
from tests.support.examples import everyday


class Guesses:
    """In place of a node's speculation: now and then drafts, of which the first ones are right."""

    method = "ngram"
    has_proposals = False

    def __init__(self, engine: Engine, *, share: float, seed: int) -> None:
        self._most = engine.scheduler.limits.num_speculative_tokens
        self._share = share
        self._seed = seed
        self._answers: dict[int, list[int]] = {}
        engine.draft_with(self)

    def drafts(self, decoding: list[Sequence]) -> list[tuple[int, ...]]:
        return [self._drafts(sequence) for sequence in decoding]

    def _drafts(self, sequence: Sequence) -> tuple[int, ...]:
        rng = random.Random(f"{self._seed} {sequence.sequence_id} {sequence.num_output}")
        if rng.random() >= self._share:
            return ()
        answer = self._answers.setdefault(
            sequence.sequence_id,
            expected_tokens(sequence.prompt_token_ids, sequence.request.sampling),
        )
        following = answer[sequence.num_output :][: rng.randint(0, self._most)]
        wrong = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, self._most))]
        return (*following, *wrong)[: self._most]

    def learn(self, view: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted <= self._most

    def forget(self, sequence: Sequence) -> None:
        self._answers.pop(sequence.sequence_id, None)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
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
        **draw(policies()),
    )
    Guesses(engine, share=draw(st.sampled_from([0.05, 0.3, 0.9])), seed=draw(st.integers(0, 9)))
    return engine


@pytest.mark.covers("S60")
@settings(fixed, max_examples=everyday(15, of=100))
@given(st.data())
def test_every_answer_is_right_whenever_drafts_come(data: st.DataObject) -> None:
    engine = data.draw(engines())
    run = Run(engine, data.draw(workloads(engine, ("local", "remote", "exported"))))
    check_answers(run, run.to_the_end())


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
    Guesses(engine, share=0.1, seed=1)
    run = Run(engine, [Arrival(0, family, 8, 12, 1) for family in range(6)])
    check_answers(run, run.to_the_end())
    counters = engine.scheduler.statistics().counters
    assert counters.num_preemptions >= 2
    assert 0 < counters.num_accepted < counters.num_drafted
    assert min(engine.plans_ahead[rule] for rule in ("taken", "drafts", "blocks")) >= 2
