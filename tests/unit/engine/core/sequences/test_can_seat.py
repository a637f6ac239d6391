"""`can_seat`: its answer must equal what the next plan then does."""

from __future__ import annotations

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import STRICT, Engine, make_prompt, make_request


def ask(engine: Engine, length: int, seed: int = 50) -> tuple[bool, bool]:
    """Return the answer for a new remote sequence, and whether the next plan seats it."""
    sequence = Sequence(1000 + seed, make_request(length, seed=seed), has_remote_kv=True)
    said = engine.scheduler.can_seat(sequence)
    engine.scheduler.add(sequence)
    engine.plan()
    return said, sequence.status is SequenceStatus.WAITING_FOR_KV


@pytest.mark.covers("S49")
@pytest.mark.parametrize(("length", "fits"), [(31, True), (32, False), (33, False), (1, True)])
def test_on_an_idle_node_the_pool_decides(length: int, fits: bool) -> None:
    # An idle node never refuses what fits its pool; 32 tokens need a ninth block to decode.
    assert ask(Engine(num_blocks=8, max_model_len=40), length) == (fits, fits)


@pytest.mark.covers("F11")
def test_without_a_free_seat_nobody_is_seated() -> None:
    engine = Engine(seats=1)
    assert ask(engine, 4, seed=1) == (True, True)
    assert ask(engine, 4, seed=2) == (False, False)


def test_the_growth_of_decoding_sequences_comes_first() -> None:
    engine = Engine(num_blocks=4, **STRICT)
    engine.add(make_request(8, max_tokens=8, ignore_eos=True))
    engine.step()
    # The next step gives the decode its third block: one is left, two were.
    assert engine.scheduler.pool.num_available == 2
    assert ask(engine, 4) == (False, False)
    engine = Engine(num_blocks=4, **STRICT)
    engine.add(make_request(8, max_tokens=8, ignore_eos=True))
    engine.step()
    assert ask(engine, 3) == (True, True)


@pytest.mark.covers("F10")
@pytest.mark.parametrize(("others", "fits"), [(1, True), (2, False)])
def test_a_hit_counts_once_as_blocks_that_stop_being_evictable(others: int, fits: bool) -> None:
    # Three blocks in all; two of them are cached with this prompt's start.
    engine = Engine(num_blocks=3 + others - 1, max_model_len=40, **STRICT)
    engine.add(make_request(make_prompt(9), max_tokens=1))
    engine.run()
    for seed in range(1, others):
        engine.add(make_request(1, seed=seed, max_tokens=8, ignore_eos=True))
        engine.step()
    sequence = Sequence(1000, make_request(make_prompt(11 if fits else 12)), has_remote_kv=True)
    assert engine.scheduler.can_seat(sequence) is fits
    engine.scheduler.add(sequence)
    engine.plan()
    assert (sequence.status is SequenceStatus.WAITING_FOR_KV) is fits


def test_a_waiting_sequence_is_seated_first_and_does_not_stand_in_the_way() -> None:
    engine = Engine(num_blocks=8, seats=3, max_model_len=40)
    first = engine.add(make_request(4, seed=1), has_remote_kv=True)
    second = Sequence(900, make_request(4, seed=2), has_remote_kv=True)
    assert engine.scheduler.can_seat(second)
    engine.scheduler.add(second)
    third = Sequence(901, make_request(16, seed=3), has_remote_kv=True)
    assert not engine.scheduler.can_seat(third), "4 of 8 blocks are spoken for, it needs 5"
    step = engine.plan()
    assert step.reserved == [first, second]


def test_asking_changes_nothing() -> None:
    engine = Engine()
    engine.add(make_request(9))
    engine.step()
    before = engine.scheduler.pool.counts()
    sequence = Sequence(900, make_request(9), has_remote_kv=True)
    assert engine.scheduler.can_seat(sequence)
    assert engine.scheduler.pool.counts() == before
    assert not engine.scheduler.waiting
    assert sequence.status is SequenceStatus.WAITING


@pytest.mark.covers("S49")
def test_what_drafts_will_take_is_not_promised() -> None:
    # The decode's next step takes a third block for its drafts; one is left, and two were.
    engine = Engine(num_blocks=4, method="ngram", num_drafts=4, max_model_len=16, **STRICT)
    engine.add(make_request(7, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.draft_with(AlwaysFour())
    assert engine.scheduler.pool.num_available == 2
    said, is_seated = ask(engine, 3)
    assert said is is_seated


class AlwaysFour:
    """Speculation that always drafts four tokens."""

    has_proposals = False

    def drafts(self, decoding: list[Sequence]) -> list[tuple[int, ...]]:
        return [(1, 2, 3, 4)] * len(decoding)
