"""Sequences whose KV arrives from another node or is sent there, and the ends of all sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.request import FinishReason
from engine.core.blocks.block_pool import BlockUse
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import (
    BLOCK_SIZE,
    STRICT,
    Engine,
    check_books,
    check_idle,
    make_prompt,
    make_request,
    status_of,
)
from tests.support.engine.hash_runner import expected_tokens

# --- receiving ------------------------------------------------------------------------------------


@pytest.mark.covers("E84")
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_landed_sequence_decodes_from_token_1_as_if_it_had_been_here(length: int) -> None:
    engine = Engine()
    request = make_request(length, max_tokens=6)
    sequence = engine.add(request, has_remote_kv=True)
    step = engine.plan()
    assert (list(step.batch), step.reserved) == ([], [sequence])
    assert status_of(sequence) is SequenceStatus.WAITING_FOR_KV
    counts = engine.scheduler.pool.counts()
    assert counts.receiving == -(-length // BLOCK_SIZE)
    assert counts.reserved == (1 if length % BLOCK_SIZE == 0 else 0)
    output = engine.land(sequence)
    assert (output.first_index, output.finish_reason) == (0, None)
    assert status_of(sequence) is SequenceStatus.RUNNING_DECODE
    engine.run()
    assert engine.outputs[sequence.sequence_id] == expected_tokens(
        request.prompt_token_ids, request.sampling
    )
    check_idle(engine.scheduler)


@pytest.mark.covers("S48")
def test_a_full_pool_does_not_stop_the_first_step_of_a_landed_sequence() -> None:
    # Whoever was reserved is not admitted again.
    engine = Engine(num_blocks=3, seats=1)
    sequence = engine.add(make_request(8, max_tokens=2), has_remote_kv=True)
    engine.plan()
    assert engine.scheduler.pool.num_available == 0
    engine.land(sequence)
    engine.step()
    assert status_of(sequence) is SequenceStatus.FINISHED


@pytest.mark.covers("F43", "F114")
def test_only_what_is_missing_is_received_beside_a_cached_prefix() -> None:
    # The prefix is locked from reservation to landing.
    engine = Engine()
    prompt = make_prompt(11)
    engine.add(make_request(prompt[:9], max_tokens=1))
    engine.run()
    sequence = engine.add(make_request(prompt, max_tokens=5), has_remote_kv=True)
    engine.plan()
    counts = engine.scheduler.pool.counts()
    assert sequence.num_cached_tokens == 8
    assert (counts.running, counts.receiving, counts.reserved) == (2, 1, 0)
    assert not any(map(engine.scheduler.pool.is_evictable, sequence.block_table))
    engine.land(sequence)
    engine.run()
    assert engine.outputs[sequence.sequence_id] == expected_tokens(
        prompt, sequence.request.sampling
    )


@pytest.mark.covers("F35", "F109")
def test_blocks_being_received_are_not_findable_before_they_have_landed() -> None:
    engine = Engine()
    request = make_request(9)
    sequence = engine.add(request, has_remote_kv=True)
    engine.plan()
    assert engine.scheduler.num_cached_tokens(Sequence(99, request)) == 0
    engine.land(sequence)
    assert engine.scheduler.num_cached_tokens(Sequence(99, request)) == 8


def test_a_step_that_only_reserves_made_progress() -> None:
    # One may pass the blocked head in each plan: nothing else would cause the next plan.
    engine = Engine(num_blocks=8, **(STRICT | {"skip_ahead_window": 1}))
    engine.add(make_request(9, seed=1), has_remote_kv=True)
    engine.plan()
    engine.add(make_request(27, seed=2), has_remote_kv=True)
    small = [engine.add(make_request(1, seed=seed), has_remote_kv=True) for seed in (3, 4)]
    reserved = []
    while (step := engine.plan()).made_progress:
        reserved += step.reserved
    assert reserved == small


def test_a_receiving_sequence_holds_a_seat() -> None:
    engine = Engine(seats=1)
    sequence = engine.add(make_request(4), has_remote_kv=True)
    engine.plan()
    assert engine.scheduler.num_free_seats == 0
    follower = engine.add(make_request(4, seed=1))
    assert not engine.plan().made_progress
    engine.scheduler.finish(sequence)
    assert engine.plan().sequences == [follower]


@pytest.mark.covers("F39")
def test_a_landed_first_token_that_ends_the_output_ends_it() -> None:
    engine = Engine()
    request = make_request(5, max_tokens=1)
    sequence = engine.add(request, has_remote_kv=True)
    engine.plan()
    assert engine.land(sequence).finish_reason is FinishReason.LENGTH
    check_idle(engine.scheduler)


def test_a_landed_sequence_that_is_preempted_is_computed_here() -> None:
    engine = Engine(num_blocks=5, seats=2, caching=False, max_model_len=20, **STRICT)
    old = engine.add(make_request(6, seed=1, max_tokens=10, ignore_eos=True))
    engine.step()
    request = make_request(6, seed=2, max_tokens=10, ignore_eos=True)
    landed = engine.add(request, has_remote_kv=True)
    engine.step()
    engine.land(landed)
    engine.run()
    assert engine.num_preemptions > 0
    for sequence in (old, landed):
        given = sequence.request
        assert engine.outputs[sequence.sequence_id] == expected_tokens(
            given.prompt_token_ids, given.sampling
        )
    check_idle(engine.scheduler)


# --- exporting ------------------------------------------------------------------------------------


@pytest.mark.covers("F108")
def test_an_exported_sequence_keeps_its_blocks_but_no_seat_after_its_token() -> None:
    engine = Engine(seats=1)
    sequence = engine.add(make_request(9), is_exported=True)
    (output,) = engine.step()
    assert output.finish_reason is None
    assert status_of(sequence) is SequenceStatus.EXPORTING
    assert len(sequence.block_table) == 3
    assert engine.scheduler.num_free_seats == 1
    assert engine.scheduler.pool.counts().running == 3
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running
    engine.scheduler.release(sequence)
    assert status_of(sequence) is SequenceStatus.FINISHED
    check_idle(engine.scheduler)
    assert engine.scheduler.pool.counts().cached == 2, "F108: findable after the export"


def test_an_exported_sequence_that_ends_with_its_token_keeps_its_blocks_too() -> None:
    # A transfer is open; only its end lets go of the blocks.
    engine = Engine()
    sequence = engine.add(make_request(9, max_tokens=1), is_exported=True)
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.LENGTH
    assert status_of(sequence) is SequenceStatus.EXPORTING
    engine.scheduler.release(sequence)
    check_idle(engine.scheduler)


@pytest.mark.covers("F25", "F113")
def test_blocks_that_a_transfer_reads_are_never_given_away() -> None:
    engine = Engine(num_blocks=4)
    sequence = engine.add(make_request(9), is_exported=True)
    engine.step()
    held = set(sequence.block_table)
    other = engine.add(make_request(8, seed=1))
    engine.plan()
    assert status_of(other) is SequenceStatus.WAITING
    engine.scheduler.release(sequence)
    engine.plan()
    assert status_of(other) is SequenceStatus.RUNNING_PREFILL
    assert held & set(other.block_table)


# --- the ends -------------------------------------------------------------------------------------


def waiting(engine: Engine) -> Sequence:
    return engine.add(make_request(9))


def waiting_for_kv(engine: Engine) -> Sequence:
    sequence = engine.add(make_request(8), has_remote_kv=True)
    engine.plan()
    return sequence


def running_prefill(engine: Engine) -> Sequence:
    sequence = engine.add(make_request(20))
    engine.step()
    return sequence


def running_decode(engine: Engine) -> Sequence:
    sequence = engine.add(make_request(9))
    engine.step()
    engine.step()
    return sequence


def preempted(engine: Engine) -> Sequence:
    for seed in (1, 2):
        last = engine.add(make_request(12, seed=seed, max_tokens=24, ignore_eos=True))
    engine.run_until(lambda: engine.num_preemptions > 0)
    engine.scheduler.finish(engine.scheduler.running[0])
    return last


REACH = [waiting, waiting_for_kv, running_prefill, running_decode, preempted]


@pytest.mark.parametrize("reach", REACH)
def test_a_sequence_can_be_finished_in_every_status(reach: Callable[[Engine], Sequence]) -> None:
    engine = Engine(num_blocks=12, budget=12, max_model_len=40, **STRICT)
    sequence = reach(engine)
    assert sequence.status.value == reach.__name__
    engine.scheduler.finish(sequence)
    assert status_of(sequence) is SequenceStatus.FINISHED
    if reach is waiting_for_kv:
        engine.scheduler.end_quarantine(sequence)
    check_idle(engine.scheduler)


@pytest.mark.covers("F60")
@pytest.mark.parametrize("reach", REACH)
def test_a_finished_sequence_cannot_be_finished_again(
    reach: Callable[[Engine], Sequence],
) -> None:
    engine = Engine(num_blocks=12, budget=12, max_model_len=40, **STRICT)
    sequence = reach(engine)
    engine.scheduler.finish(sequence)
    with pytest.raises(ValueError, match="has finished already"):
        engine.scheduler.finish(sequence)
    with pytest.raises(KeyError):
        engine.scheduler.release(sequence)
    if reach is waiting_for_kv:
        engine.scheduler.end_quarantine(sequence)
    with pytest.raises(KeyError):
        engine.scheduler.end_quarantine(sequence)
    check_idle(engine.scheduler)


@pytest.mark.covers("F13")
@pytest.mark.parametrize("reach", [running_prefill, running_decode])
def test_what_a_transfer_still_reads_is_kept_until_release(
    reach: Callable[[Engine], Sequence],
) -> None:
    engine = Engine(num_blocks=12, budget=12, max_model_len=40, **STRICT)
    sequence = reach(engine)
    held = len(sequence.block_table)
    engine.scheduler.finish(sequence, keep_blocks=True)
    assert status_of(sequence) is SequenceStatus.EXPORTING
    check_books(engine.scheduler)
    assert engine.scheduler.pool.counts().running == held
    with pytest.raises(ValueError, match="must be ended by release"):
        engine.scheduler.finish(sequence)
    engine.scheduler.release(sequence)
    check_idle(engine.scheduler)


@pytest.mark.parametrize("reach", [waiting, preempted])
def test_there_is_nothing_to_keep_of_a_sequence_without_blocks(
    reach: Callable[[Engine], Sequence],
) -> None:
    engine = Engine(num_blocks=12, budget=12, max_model_len=40, **STRICT)
    sequence = reach(engine)
    engine.scheduler.finish(sequence, keep_blocks=True)
    assert status_of(sequence) is SequenceStatus.FINISHED
    check_idle(engine.scheduler)


def test_an_aborted_reservation_gives_back_every_kind_of_block() -> None:
    engine = Engine()
    prompt = make_prompt(8)
    engine.add(make_request(prompt, max_tokens=1))
    engine.run()
    sequence = engine.add(make_request(prompt), has_remote_kv=True)
    engine.plan()
    counts = engine.scheduler.pool.counts()
    assert (counts.running, counts.receiving, counts.reserved) == (1, 1, 1)
    target = sequence.block_table[1]
    engine.scheduler.finish(sequence)
    check_books(engine.scheduler)
    counts = engine.scheduler.pool.counts()
    assert (counts.available, counts.quarantined) == (15, 1)
    assert target not in engine.scheduler.pool.allocate(15, BlockUse.RUNNING)
    engine.scheduler.end_quarantine(sequence)
    assert engine.scheduler.pool.allocate(1, BlockUse.RUNNING) == [target]


def test_a_seat_is_free_while_the_blocks_of_a_landing_are_quarantined() -> None:
    engine = Engine(num_blocks=4, seats=1)
    given_up = engine.add(make_request(9), has_remote_kv=True)
    engine.plan()
    engine.scheduler.finish(given_up)
    small, large = engine.add(make_request(2, max_tokens=2)), engine.add(make_request(9, seed=1))
    engine.run_until(lambda: small.status is SequenceStatus.FINISHED)
    assert not engine.plan().made_progress
    engine.scheduler.end_quarantine(given_up)
    engine.run()
    assert large.status is SequenceStatus.FINISHED
    check_idle(engine.scheduler)


def test_a_last_decode_waits_for_quarantined_blocks_and_does_not_starve() -> None:
    engine = Engine(num_blocks=4, seats=2, max_model_len=16, **STRICT)
    given_up = engine.add(make_request(5), has_remote_kv=True)
    engine.plan()
    alone = engine.add(make_request(4, seed=1, max_tokens=9, ignore_eos=True))
    engine.scheduler.finish(given_up)
    while (step := engine.plan()).made_progress:
        assert not step.starved
        engine.apply(step)
    assert alone.is_decoding
    engine.scheduler.end_quarantine(given_up)
    engine.run()
    assert len(engine.outputs[alone.sequence_id]) == 9
    check_idle(engine.scheduler)


# --- the checker ----------------------------------------------------------------------------------


@pytest.mark.covers("B15", "S16")
def test_the_checker_notices_a_sequence_too_many_and_a_lost_block() -> None:
    engine = Engine(seats=1)
    running_decode(engine)
    sequence = engine.scheduler.running[0]
    engine.scheduler.running.add(sequence)
    with pytest.raises(AssertionError, match="more sequences than seats"):
        engine.scheduler.check()
    engine.scheduler.running.remove(sequence)
    sequence.num_computed += 1
    with pytest.raises(AssertionError, match="not caught up"):
        engine.scheduler.check()
    sequence.num_computed = 100
    with pytest.raises(AssertionError, match="without a block"):
        engine.scheduler.check()
