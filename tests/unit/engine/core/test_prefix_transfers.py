"""Blocks of prefixes between pools: held until nobody uses them, findable when all are verified."""

from __future__ import annotations

import pytest

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.prefix_transfers import ComingPrefix
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import BLOCK_SIZE, STRICT, Engine, check_books, make_request
from tests.support.engine.keeping import ask, evict, keeping, rest, use_twice

HELD = 7
"""The id of a sequence that is not queued yet."""


def begin(engine: Engine, num_blocks: int = 3, seed: int = 5) -> tuple[Sequence, ComingPrefix]:
    """A prompt of which other nodes have all whole blocks, and the blocks that they write."""
    length = num_blocks * BLOCK_SIZE + 1
    sequence = Sequence(HELD, make_request(length, seed=seed))
    transfers = engine.scheduler.prefix_transfers
    coming = transfers.begin(*transfers.missing(sequence, num_blocks * BLOCK_SIZE))
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
    assert transfers.missing(sequence, 3 * BLOCK_SIZE) == (list(coming.block_ids), [])
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
    transfers = engine.scheduler.prefix_transfers
    assert transfers.begin(*transfers.missing(sequence, 3 * BLOCK_SIZE)) is None
    assert engine.scheduler.pool.counts().free == 2
    check_books(engine.scheduler)


def cached_hashes(engine: Engine, num_blocks: int) -> list[BlockHash]:
    """The hashes of a prompt whose whole blocks are cached here now."""
    request = make_request(num_blocks * BLOCK_SIZE + 1, max_tokens=1)
    engine.add(request)
    engine.run()
    sequence = Sequence(HELD, request)
    kept_ids, missing = engine.scheduler.prefix_transfers.missing(sequence, BLOCK_SIZE * num_blocks)
    assert (len(kept_ids), missing) == (num_blocks, [])
    return list(sequence.block_hashes)


def test_blocks_are_sent_by_their_whole_hash_all_or_none() -> None:
    engine = Engine(num_blocks=12)
    transfers, cache = engine.scheduler.prefix_transfers, engine.scheduler.pool.prefix_cache
    hashes = cached_hashes(engine, 3)
    block_ids = transfers.pin(hashes)
    assert list(block_ids) == [cache.find(one) for one in hashes]
    transfers.unpin(block_ids)
    for changed in range(16):
        wrong = bytearray(hashes[1])
        wrong[changed] ^= 1
        assert transfers.pin([hashes[0], bytes(wrong), hashes[2]]) == (), "no other block"
    assert transfers.pin([hashes[0][:8]]) == (), "a part of a hash names no block"
    assert len(transfers) == 0
    assert engine.scheduler.pool.counts().running == 0


def test_what_is_sent_is_not_evicted_and_is_no_more_than_half_of_the_pool() -> None:
    engine = Engine(num_blocks=6)
    transfers = engine.scheduler.prefix_transfers
    hashes = cached_hashes(engine, 4)
    assert transfers.pin(hashes) == ()
    block_ids = transfers.pin(hashes[:3])
    assert transfers.pin(hashes[1:3]) == block_ids[1:], "it is the same half"
    assert transfers.pin(hashes[3:]) == ()
    engine.scheduler.pool.allocate(3, BlockUse.RUNNING)
    with pytest.raises(ValueError, match="asked for 1 blocks, 0 are available"):
        engine.scheduler.pool.allocate(1, BlockUse.RUNNING)
    transfers.unpin(block_ids)
    transfers.unpin(block_ids[1:])
    assert engine.scheduler.pool.num_available == 3


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


@pytest.mark.parametrize("is_some", [False, True])
def test_a_plan_made_before_blocks_were_kept_for_a_transfer_is_not_used(is_some: bool) -> None:
    engine = Engine(num_blocks=6, seats=2, **STRICT)
    scheduler, transfers = engine.scheduler, engine.scheduler.prefix_transfers
    hashes = cached_hashes(engine, 3)
    growing = engine.add(make_request(3 * BLOCK_SIZE, max_tokens=4, seed=3))
    step = engine.plan()
    scheduler.plan_ahead(step)
    kept = transfers.pin_some(hashes, 0) if is_some else transfers.pin(hashes)
    assert kept is not None
    assert scheduler.pool.num_available == 0
    engine.apply(step)
    step = engine.plan()
    assert (engine.was_ahead, step.sequences) == (False, [])
    engine.apply(step)
    transfers.unpin(kept)
    engine.run()
    assert growing.num_output == 4


def test_blocks_that_are_in_use_may_be_kept_too_and_the_plan_stays() -> None:
    engine = Engine(num_blocks=12, **STRICT)
    scheduler, transfers = engine.scheduler, engine.scheduler.prefix_transfers
    hashes = cached_hashes(engine, 2)
    engine.add(make_request(2 * BLOCK_SIZE + 1, max_tokens=4))
    step = engine.plan()
    scheduler.plan_ahead(step)
    transfers.unpin(transfers.pin(hashes))
    engine.apply(step)
    engine.apply(engine.plan())
    assert engine.was_ahead


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


def kept_hashes(engine: Engine, family: int = 0) -> list[BlockHash]:
    """The hashes of a prompt of three whole blocks, which only host memory has."""
    use_twice(engine, family)
    hashes = engine.scheduler.pool.latest(3)
    evict(engine)
    assert all(engine.scheduler.pool.prefix_cache.find(one) is None for one in hashes)
    return hashes


def test_what_the_pool_has_evicted_is_sent_from_host_memory() -> None:
    engine = keeping()
    transfers, host_pool = engine.scheduler.prefix_transfers, engine.scheduler.host_pool
    hashes, num_blocks = kept_hashes(engine), engine.scheduler.pool.num_blocks
    source_ids = transfers.pin(hashes)
    assert source_ids == tuple(num_blocks + (host_pool.find(one) or 0) for one in hashes)
    assert transfers.split(source_ids) == ([], [host_pool.find(one) for one in hashes])
    assert engine.scheduler.pool.counts().running == 0, "the pool gives nothing"
    check_books(engine.scheduler)
    again = transfers.pin(hashes[1:])
    assert host_pool.num_read == 3
    transfers.unpin(source_ids)
    check_books(engine.scheduler)
    assert host_pool.num_read == 2
    transfers.unpin(again)
    check_books(engine.scheduler)
    assert host_pool.num_read == 0


def test_what_is_sent_is_no_more_than_half_of_host_memory() -> None:
    engine = keeping(num_host_blocks=7)
    transfers = engine.scheduler.prefix_transfers
    hashes, other = kept_hashes(engine), kept_hashes(engine, family=1)
    source_ids = transfers.pin(hashes)
    assert len(source_ids) == 3
    assert transfers.pin(other[:1]) == ()
    check_books(engine.scheduler)
    transfers.unpin(source_ids)
    assert len(transfers.pin(other[:1])) == 1


def test_what_is_kept_while_others_are_read_leaves_room_for_those_in_the_same_half() -> None:
    engine = keeping(num_host_blocks=8)
    transfers, host_pool = engine.scheduler.prefix_transfers, engine.scheduler.host_pool
    hashes, nowhere = kept_hashes(engine), bytes(16)
    assert transfers.pin_some([*hashes, nowhere], 2) is None
    assert host_pool.num_read == 0
    some = transfers.pin_some([*hashes, nowhere], 1)
    assert some == transfers.pin(hashes)
    check_books(engine.scheduler)
    assert transfers.pin_some([nowhere], 2) is None
    assert transfers.pin_some([nowhere], 1) == ()
    transfers.unpin(())
    for _ in range(2):
        assert host_pool.num_read == 3
        transfers.unpin(some or ())
    assert host_pool.num_read == 0
    check_books(engine.scheduler)


def test_of_a_prefix_that_may_be_short_the_beginning_is_kept_as_far_as_it_is_here() -> None:
    engine = keeping(num_host_blocks=7)
    transfers = engine.scheduler.prefix_transfers
    hashes, other, nowhere = kept_hashes(engine), kept_hashes(engine, family=1), bytes(16)
    assert transfers.pin([nowhere, *hashes], may_be_short=True) == ()
    assert len(transfers) == 0
    some = transfers.pin([*hashes[:2], nowhere, hashes[2]], may_be_short=True)
    assert len(some) == 2
    more = transfers.pin([hashes[0], *other], may_be_short=True)
    assert len(more) == 2, "three blocks are half of host memory, two of which are kept already"
    check_books(engine.scheduler)
    transfers.unpin(some)
    transfers.unpin(more)
    check_books(engine.scheduler)


def test_a_prefix_that_may_be_short_keeps_half_of_the_pool() -> None:
    engine = Engine(num_blocks=6)
    transfers = engine.scheduler.prefix_transfers
    hashes = cached_hashes(engine, 4)
    assert transfers.pin(hashes, may_be_short=True) == transfers.pin(hashes[:3])


def test_of_a_prefix_that_landed_in_part_the_rest_is_free() -> None:
    engine = Engine()
    sequence, coming = begin(engine)
    engine.scheduler.prefix_transfers.land(coming, 2)
    check_books(engine.scheduler)
    assert engine.scheduler.num_cached_tokens(sequence) == 2 * BLOCK_SIZE
    counts = engine.scheduler.pool.counts()
    assert (counts.cached, counts.free) == (2, engine.scheduler.pool.num_blocks - 2)


def test_the_latest_are_those_of_the_pool_and_then_what_only_host_memory_has() -> None:
    engine = keeping(num_host_blocks=32)
    transfers, pool = engine.scheduler.prefix_transfers, engine.scheduler.pool
    older, newer = kept_hashes(engine, family=1), kept_hashes(engine, family=2)
    use_twice(engine, 3)
    rest(engine)
    kept = transfers.pin(newer[:1])
    in_pool = tuple(pool.latest(6))
    assert len(in_pool) > 3
    latest = transfers.latest(100)
    assert latest[: len(in_pool)] == in_pool
    below = latest[len(in_pool) :]
    assert len(set(latest)) == len(latest)
    assert [one for one in below if one in newer] == newer, "each behind what is before it"
    assert [one for one in below if one in older] == older
    assert below.index(newer[-1]) < below.index(older[-1])
    assert transfers.latest(len(in_pool) + 1) == latest[: len(in_pool) + 1]
    assert transfers.latest(2) == in_pool[:2]
    transfers.unpin(kept)


def test_a_block_that_is_in_both_is_sent_from_the_pool() -> None:
    engine = keeping()
    transfers, host_pool = engine.scheduler.prefix_transfers, engine.scheduler.host_pool
    hashes = kept_hashes(engine)
    ask(engine, 0)
    assert all(host_pool.find(one) is not None for one in hashes)
    block_ids, host_block_ids = transfers.split(transfers.pin(hashes))
    assert (len(block_ids), host_block_ids) == (3, [])


def test_what_was_sent_from_host_memory_counts_as_used_last() -> None:
    engine = keeping(num_host_blocks=6)
    transfers, host_pool = engine.scheduler.prefix_transfers, engine.scheduler.host_pool
    sent, other = kept_hashes(engine), kept_hashes(engine, family=1)
    transfers.unpin(transfers.pin(sent))
    host_pool.allocate(1)
    assert all(host_pool.find(one) is not None for one in sent)
    assert sum(host_pool.find(one) is None for one in other) == 1
