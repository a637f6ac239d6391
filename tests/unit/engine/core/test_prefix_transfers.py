"""Blocks of prefixes between pools: held until nobody uses them, findable when all are verified."""

from __future__ import annotations

import pytest

from engine.core.prefix_transfers import ComingPrefix
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import BLOCK_SIZE, STRICT, Engine, check_books, make_request

HELD = 7
"""The id of a sequence that is not queued yet."""


def begin(engine: Engine, num_blocks: int = 3, seed: int = 5) -> tuple[Sequence, ComingPrefix]:
    """A prompt of which other nodes have all whole blocks, and the blocks that they write."""
    length = num_blocks * BLOCK_SIZE + 1
    sequence = Sequence(HELD, make_request(length, seed=seed))
    coming = engine.scheduler.prefix_transfers.begin(sequence, num_blocks * BLOCK_SIZE)
    assert coming is not None
    check_books(engine.scheduler)
    return sequence, coming


def test_a_landed_prefix_is_found_and_can_be_evicted() -> None:
    engine = Engine()
    sequence, coming = begin(engine)
    scheduler, transfers = engine.scheduler, engine.scheduler.prefix_transfers
    assert scheduler.num_cached_tokens(sequence) == 0
    assert scheduler.pool.counts().receiving == len(coming.block_ids) == 3
    transfers.land(coming)
    check_books(scheduler)
    assert scheduler.num_cached_tokens(sequence) == 3 * BLOCK_SIZE
    assert scheduler.pool.counts().cached == 3
    assert transfers.begin(sequence, 3 * BLOCK_SIZE) is None, "nothing is missing"
    with pytest.raises(KeyError):
        transfers.land(coming)


def test_blocks_before_those_that_come_are_not_evicted_meanwhile() -> None:
    engine = Engine(num_blocks=4)
    engine.add(make_request(BLOCK_SIZE + 1, max_tokens=1, seed=5))
    engine.run()
    sequence, coming = begin(engine, num_blocks=3)
    assert len(coming.kept_ids) == 1
    assert len(coming.block_ids) == 2
    engine.scheduler.pool.acquire_cached(())
    assert engine.scheduler.pool.num_available == 1
    engine.scheduler.prefix_transfers.land(coming)
    assert engine.scheduler.num_cached_tokens(sequence) == 3 * BLOCK_SIZE


def test_a_failed_prefix_is_never_found_and_stays_quarantined() -> None:
    engine = Engine()
    sequence, coming = begin(engine)
    scheduler, transfers = engine.scheduler, engine.scheduler.prefix_transfers
    transfers.fail(coming)
    transfers.fail(coming)
    check_books(scheduler)
    assert scheduler.pool.counts().quarantined == transfers.num_quarantined == 3
    transfers.free(coming)
    check_books(scheduler)
    assert scheduler.pool.counts().free == scheduler.pool.num_blocks
    assert scheduler.num_cached_tokens(sequence) == 0


def test_there_is_room_for_all_or_nothing_is_taken() -> None:
    engine = Engine(num_blocks=2)
    sequence = Sequence(HELD, make_request(3 * BLOCK_SIZE + 1))
    assert engine.scheduler.prefix_transfers.begin(sequence, 3 * BLOCK_SIZE) is None
    assert engine.scheduler.pool.counts().free == 2
    check_books(engine.scheduler)


def test_only_what_was_cached_when_a_sequence_was_seated_is_sent() -> None:
    engine = Engine()
    engine.add(make_request(2 * BLOCK_SIZE + 1, max_tokens=1))
    engine.run()
    sequence = engine.add(make_request(4 * BLOCK_SIZE), has_remote_kv=True)
    transfers = engine.scheduler.prefix_transfers
    assert transfers.pin(sequence, 0, 1) == (), "it has no seat yet"
    engine.plan()
    assert transfers.pin(sequence, 0, 3) == (), "the third block is still written"
    assert transfers.pin(sequence, 1, 2) == ()
    block_ids = transfers.pin(sequence, 0, 2)
    assert len(block_ids) == 2
    engine.scheduler.finish(sequence)
    engine.scheduler.end_quarantine(sequence)
    check_books(engine.scheduler)
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks - 2
    transfers.unpin(block_ids)
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks


def test_a_plan_made_before_blocks_were_taken_is_not_used() -> None:
    engine = Engine(num_blocks=6, seats=2, **STRICT)
    engine.add(make_request(BLOCK_SIZE, max_tokens=8))
    step = engine.plan()
    engine.add(make_request(3 * BLOCK_SIZE, max_tokens=2, seed=3))
    engine.scheduler.plan_ahead(step)
    begin(engine, num_blocks=3)
    engine.scheduler.apply(step, engine.runner.execute(step.batch))
    engine.plan()
    assert not engine.was_ahead


def test_a_sequence_waits_for_blocks_that_a_prefix_holds() -> None:
    engine = Engine(num_blocks=4, seats=1, **STRICT)
    sequence = engine.add(make_request(BLOCK_SIZE, max_tokens=8))
    engine.step()
    _, coming = begin(engine, num_blocks=2)
    while sequence.num_known < 2 * BLOCK_SIZE + 1:
        engine.step()
    step = engine.plan()
    assert engine.scheduler.pool.num_available == 0
    assert step.starved == [], "it is given up, though blocks come back"
    engine.scheduler.prefix_transfers.land(coming)
    engine.run()
    assert sequence.status is SequenceStatus.FINISHED
