"""Drafts in a running scheduler: charged, verified, counted, and never part of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.request import FinishReason, TokenLogprobs
from engine.core.runner_contract import RunnerResult
from engine.core.sequences.sequence import Sequence
from tests.support.engine.build import STRICT, Engine, check_idle, make_request
from tests.support.engine.hash_runner import VOCAB_SIZE, expected_tokens


class Oracle:
    """In place of a node's speculation: drafts what really follows, wrong from `wrong_from` on."""

    method = "oracle"
    has_proposals = False

    def __init__(self, engine: Engine, *, wrong_from: int = 1000) -> None:
        self.k = engine.scheduler.limits.num_speculative_tokens
        self.wrong_from = wrong_from
        self.following: dict[int, list[int]] = {}
        self.forgotten: list[int] = []
        self.observed: list[tuple[int, float, int]] = []
        engine.draft_with(self)

    def add(self, engine: Engine, length: int, **given: Any) -> Sequence:
        sequence = engine.add(make_request(length, ignore_eos=True, **given))
        # Stops play no part in drawing: beyond them the same tokens would follow.
        endless = make_request(length, **{**given, "max_tokens": 60, "stop_token_ids": ()})
        sampling = replace(endless.sampling, ignore_eos=True)
        self.following[sequence.sequence_id] = expected_tokens(sequence.prompt_token_ids, sampling)
        return sequence

    def drafts(self, decoding: list[Sequence]) -> list[tuple[int, ...]]:
        return [self._drafts(sequence) for sequence in decoding]

    def _drafts(self, sequence: Sequence) -> tuple[int, ...]:
        first = sequence.num_output
        following = self.following[sequence.sequence_id][first : first + self.k]
        return tuple(
            (token + (index >= self.wrong_from)) % VOCAB_SIZE
            for index, token in enumerate(following, first)
        )

    def learn(self, view: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted <= self.k

    def observe(self, rows: int, step_s: float, num_proposals: int) -> None:
        self.observed.append((rows, step_s, num_proposals))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.sequence_id)


def drafting(k: int, **given: Any) -> Engine:
    settings = {"num_blocks": 64, "caching": False, **given}
    return Engine(method="ngram", num_drafts=k, **settings)


def answer(sequence: Sequence) -> list[int]:
    return expected_tokens(sequence.prompt_token_ids, sequence.request.sampling)


def plain_answer(length: int, max_tokens: int) -> list[int]:
    request = make_request(length, max_tokens=max_tokens)
    return expected_tokens(request.prompt_token_ids, request.sampling)


def test_right_drafts_give_several_tokens_a_step() -> None:
    engine = drafting(3)
    oracle = Oracle(engine)
    sequence = oracle.add(engine, 5, max_tokens=10)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert [len(output.token_ids) for output in outputs] == [1, 4, 4, 1]
    assert [output.first_index for output in outputs] == [0, 1, 5, 9]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert engine.outputs[sequence.sequence_id] == answer(sequence)
    assert (sequence.num_drafted, sequence.num_accepted_drafts) == (6, 6)
    assert oracle.forgotten == [sequence.sequence_id]
    check_idle(engine.scheduler)


def test_wrong_drafts_cost_rows_and_change_nothing() -> None:
    engine = drafting(3)
    sequence = Oracle(engine, wrong_from=0).add(engine, 5, max_tokens=10)
    engine.run()
    assert engine.outputs[sequence.sequence_id] == answer(sequence)
    assert sequence.num_accepted_drafts == 0
    assert sequence.num_drafted > 0
    # A token is drawn in each step, whatever became of the drafts.
    assert len(engine.runner.batches) == 10


@pytest.mark.covers("F102")
def test_a_rejected_draft_leaves_no_kv_and_publishes_no_block() -> None:
    engine = drafting(7, caching=True)
    sequence = Oracle(engine, wrong_from=3).add(engine, 5, max_tokens=30)
    engine.step()
    step = engine.plan()
    assert step.batch[0].num_drafts == 7
    engine.apply(step)
    # Three right tokens: 1 and 2 were drafts, the third is the model's own.
    assert sequence.num_output == 4
    assert (sequence.num_computed, sequence.num_hashed_blocks) == (8, 2)
    again = Sequence(99, make_request((*sequence.prompt_token_ids, *sequence.output_token_ids, 1)))
    assert engine.scheduler.num_cached_tokens(again) == 8
    engine.run()
    assert engine.outputs[sequence.sequence_id] == answer(sequence)


@pytest.mark.covers("S04")
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_an_answer_ends_at_its_last_token_with_any_number_of_drafts(max_tokens: int) -> None:
    engine = drafting(4)
    sequence = Oracle(engine).add(engine, 3, max_tokens=max_tokens)
    engine.run()
    assert engine.outputs[sequence.sequence_id] == answer(sequence)
    assert sequence.num_accepted_drafts < max(max_tokens, 1)
    drawn = sum(s.num_drafts + 1 for batch in engine.runner.batches for s in batch if s.sample)
    assert drawn == max_tokens, "no draft was verified that could not be output"


@pytest.mark.covers("E13", "F106", "S04")
def test_nothing_is_computed_past_the_models_length() -> None:
    engine = drafting(4, num_blocks=4, max_model_len=13)
    sequence = Oracle(engine).add(engine, 6, max_tokens=100)
    engine.run()
    ends = [s.start + len(s.token_ids) for batch in engine.runner.batches for s in batch]
    assert max(ends) == 12
    assert len(engine.outputs[sequence.sequence_id]) == 7


@pytest.mark.covers("F106")
def test_a_stop_among_right_drafts_ends_the_output_there() -> None:
    engine = drafting(6)
    oracle = Oracle(engine)
    plain = plain_answer(5, 9)
    sequence = oracle.add(engine, 5, max_tokens=9, stop_token_ids=(plain[3],))
    engine.step()
    (output,) = engine.step()
    assert list(output.token_ids) == plain[1:4]
    assert output.finish_reason is FinishReason.STOP
    assert engine.outputs[sequence.sequence_id] == plain[:4] == answer(sequence)
    check_idle(engine.scheduler)


def test_there_are_no_log_probabilities_of_what_was_drawn_behind_a_stop() -> None:
    engine = drafting(6)
    plain = plain_answer(5, 9)
    Oracle(engine).add(engine, 5, max_tokens=9, stop_token_ids=(plain[3],))
    engine.step()
    step = engine.plan()
    (drawn,) = engine.runner.execute(step.batch)
    assert drawn is not None
    assert len(drawn.token_ids) == 7
    logprobs = tuple(TokenLogprobs(-float(n)) for n in range(7))
    (output,) = engine.scheduler.apply(step, RunnerResult([replace(drawn, logprobs=logprobs)]))
    assert output.logprobs == logprobs[:3]


def test_drafts_behind_a_stop_are_not_counted_as_accepted() -> None:
    # Six drafts equal what the model draws, but three of them became output.
    engine = drafting(6)
    plain = plain_answer(5, 9)
    sequence = Oracle(engine).add(engine, 5, max_tokens=9, stop_token_ids=(plain[3],))
    engine.run()
    assert sequence.num_drafted == 6
    assert sequence.num_accepted_drafts == 3
    assert engine.scheduler.statistics().counters.num_accepted == 3


@pytest.mark.covers("C30", "E15", "S08")
def test_landed_sequences_are_charged_their_drafts_at_once() -> None:
    engine = Engine(num_blocks=200, seats=50, budget=100, method="mtp", num_drafts=1, caching=False)
    sequences = [
        engine.add(make_request(3, seed=seed, max_tokens=9), has_remote_kv=True)
        for seed in range(50)
    ]
    assert engine.plan().reserved == sequences
    late = engine.add(make_request(3, seed=99))
    for sequence in sequences:
        engine.scheduler.land(sequence, 5, (6,))
    step = engine.plan()
    statistics = engine.scheduler.statistics()
    assert len(step.batch) * 1 == 50, "the upstream charge"
    assert statistics.counters.last_step_tokens == 100
    assert (statistics.counters.num_decode_tokens, statistics.counters.num_draft_tokens) == (50, 50)
    assert list(engine.scheduler.waiting) == [late]


@pytest.mark.covers("S08")
def test_a_landed_sequence_needs_no_block_for_its_first_drafts() -> None:
    engine = Engine(num_blocks=3, seats=1, method="mtp", num_drafts=3, caching=False)
    sequence = engine.add(make_request(6, max_tokens=6), has_remote_kv=True)
    engine.plan()
    assert len(sequence.block_table) == 3, "6 tokens, 1 and 3 drafts"
    assert engine.scheduler.pool.num_available == 0
    engine.scheduler.land(sequence, 5, (6, 7, 8))
    (scheduled,) = engine.plan().batch
    assert list(scheduled.token_ids) == [5, 6, 7, 8][: 1 + scheduled.num_drafts]
    assert scheduled.num_drafts >= 1


@pytest.mark.covers("F101")
def test_drafts_from_a_node_that_speculates_are_dropped_where_nobody_does() -> None:
    engine = Engine()
    sequence = engine.add(make_request(3, max_tokens=9), has_remote_kv=True)
    engine.plan()
    engine.scheduler.land(sequence, 5, (6, 7))
    (scheduled,) = engine.plan().batch
    assert (list(scheduled.token_ids), scheduled.num_drafts) == ([5], 0)


def test_proposals_of_an_earlier_token_are_not_drafted() -> None:
    """A step whose runner proposes nothing leaves nothing to verify, whatever was accepted."""
    engine = Engine(num_blocks=40, method="mtp", num_drafts=3, caching=False)
    sequence = engine.add(make_request(6, max_tokens=80, ignore_eos=True))
    num_drawn = set()
    while sequence.num_output < 60:
        engine.run_until(lambda: len(sequence.proposed_token_ids) > 0)
        step = engine.plan()
        assert step.batch[0].num_drafts > 0
        step.batch[0].num_proposals = 0
        (output,) = engine.apply(step)
        num_drawn.add(len(output.token_ids))
        assert sequence.proposed_token_ids == ()
        engine.step()
    assert {1, 2, 4} <= num_drawn


def test_a_victims_drafts_are_forgotten() -> None:
    engine = Engine(
        num_blocks=6, seats=2, caching=False, method="mtp", num_drafts=2, max_model_len=20, **STRICT
    )
    sequences = [
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)
    ]
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert sequences[1].draft_token_ids == ()
    assert sequences[1].proposed_token_ids == ()
    engine.run()
    for sequence in sequences:
        assert engine.outputs[sequence.sequence_id] == answer(sequence)


@pytest.mark.covers("S52", "S53")
@pytest.mark.parametrize("num_blocks", [10, 40])
@pytest.mark.parametrize(("k", "granularity"), [(0, 1), (0, 4), (3, 1), (3, 4), (1, 4)])
def test_the_smallest_legal_budget_never_stalls(k: int, granularity: int, num_blocks: int) -> None:
    seats, per_seq = 4, 1 + k
    budget = max(seats * per_seq, (seats - 1) * per_seq + granularity)
    engine = Engine(
        num_blocks=num_blocks,
        seats=seats,
        budget=budget,
        max_model_len=32,
        chunk_granularity=granularity,
        method="mtp" if k else "none",
        num_drafts=k,
    )
    sequences = [
        engine.add(make_request(length, seed=seed, max_tokens=8, ignore_eos=True))
        for seed, length in enumerate((20, 1, 9, 4, 17, 3, 24, 2))
    ]
    for _ in range(300):
        if not engine.scheduler.running and not engine.scheduler.waiting:
            break
        step = engine.plan()
        assert step.made_progress, "somebody waits and nobody moves"
        planned = sum(len(s.token_ids) for s in step.batch)
        assert planned <= budget
        for scheduled, sequence in zip(step.batch, step.sequences, strict=True):
            is_last = scheduled.start + len(scheduled.token_ids) >= sequence.num_known
            assert is_last or len(scheduled.token_ids) % granularity == 0
        engine.apply(step)
    for sequence in sequences:
        assert engine.outputs[sequence.sequence_id] == answer(sequence)
    check_idle(engine.scheduler)


def test_the_cost_of_a_step_counts_drafts_and_prompt_chunks_too() -> None:
    engine = drafting(3)
    oracle = Oracle(engine)
    oracle.add(engine, 5, max_tokens=20)
    engine.step()
    oracle.add(engine, 7, max_tokens=20)
    step = engine.plan()
    step.took_s = 0.5
    engine.apply(step)
    assert oracle.observed == [(1 + 3 + 7, 0.5, 0)]  # the first step's time is not known
