"""Whole steps of the scheduler, with a runner whose tokens depend on every byte of KV."""

from __future__ import annotations

import pytest

from common.kv.blocks import blocks_for
from common.request import FinishReason, GenerationRequest
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import (
    BLOCK_SIZE,
    STRICT,
    Engine,
    check_idle,
    make_prompt,
    make_request,
)
from tests.support.engine.hash_runner import EOS_TOKEN_ID, expected_tokens


def answer(request: GenerationRequest) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling)


def request_ending_with_eos(prompt: tuple[int, ...]) -> GenerationRequest:
    """A request whose very first token is the end of sequence."""
    for seed in range(100_000):
        request = make_request(prompt, seed=seed, max_tokens=4)
        if answer(request) == [EOS_TOKEN_ID]:
            return request
    raise AssertionError("no seed gives an end of sequence")


@pytest.mark.parametrize("budget", [4, 5, 7, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12])
def test_every_prompt_length_in_every_chunking_gives_the_same_answer(
    length: int, budget: int
) -> None:
    engine = Engine(budget=budget)
    request = make_request(length, max_tokens=6)
    sequence = engine.add(request)
    engine.run()
    assert engine.outputs[sequence.sequence_id] == answer(request)
    assert sequence.status is SequenceStatus.FINISHED
    check_idle(engine.scheduler)
    computed = [len(s.token_ids) for batch in engine.runner.batches for s in batch]
    assert sum(computed) == length + 5
    assert max(computed) <= budget


def test_a_token_is_drawn_only_where_all_known_tokens_are_computed() -> None:
    engine = Engine(budget=4)
    engine.add(make_request(9, max_tokens=1))
    engine.run()
    drawn = [(s.start, len(s.token_ids), s.sample is not None) for (s,) in engine.runner.batches]
    assert drawn == [(0, 4, False), (4, 4, False), (8, 1, True)]


def test_outputs_carry_index_token_and_reason() -> None:
    engine = Engine()
    request = make_request(3, max_tokens=3)
    sequence = engine.add(request)
    steps = [engine.step() for _ in range(3)]
    assert [(o.first_index, o.token_ids[0]) for (o,) in steps] == list(enumerate(answer(request)))
    assert [o.finish_reason for (o,) in steps] == [None, None, FinishReason.LENGTH]
    assert all(o.sequence is sequence for (o,) in steps)
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


def test_a_token_that_ends_only_another_output_takes_no_detour() -> None:
    engine = Engine(seats=5, num_blocks=32)
    request, neighbour = make_request(3, max_tokens=6), make_request(4, seed=1, max_tokens=6)
    stops = sorted(set(answer(request)) - set(answer(neighbour)))
    engine.add(request)
    for number in range(4):
        name, ends = f"neighbour-{number}", tuple(stops)
        engine.add(make_request(4, name=name, seed=1, max_tokens=6, stop_token_ids=ends))
    steps = [engine.step() for _ in range(6)]
    every = [0, 1, 2, 3, 4]
    assert len(stops) == 6
    assert [len(outputs) for outputs in steps] == [5] * 6
    assert [sorted(outputs.others) for outputs in steps] == [every, [], [], [], [], every]


def test_outputs_are_in_the_order_of_the_batch_wherever_one_of_them_ends() -> None:
    for ending in range(3):
        engine = Engine()
        most = [2 if i == ending else 9 for i in range(3)]
        added = [engine.add(make_request(3 + i, seed=i, max_tokens=most[i])) for i in range(3)]
        engine.step()
        outputs = engine.step()
        assert [o.sequence for o in outputs] == added
        assert [o.sequence for o in outputs[1:]] == added[1:]
        assert outputs[ending] is outputs.others[ending]
        assert outputs[ending].finish_reason is FinishReason.LENGTH


@pytest.mark.covers("F40")
def test_max_tokens_1_ends_with_the_first_token() -> None:
    engine = Engine()
    request = make_request(5, max_tokens=1)
    engine.add(request)
    (output,) = engine.step()
    assert (output.first_index, output.finish_reason) == (0, FinishReason.LENGTH)
    check_idle(engine.scheduler)


def test_a_first_token_that_ends_the_sequence_ends_the_output() -> None:
    engine = Engine()
    engine.add(request_ending_with_eos(make_prompt(5)))
    (output,) = engine.step()
    assert output.token_ids == (EOS_TOKEN_ID,)
    assert output.finish_reason is FinishReason.STOP
    check_idle(engine.scheduler)


def test_a_stop_token_is_part_of_the_output_and_its_last() -> None:
    engine = Engine()
    plain = make_request(5, max_tokens=8)
    stop = answer(plain)[2]
    request = make_request(5, max_tokens=8, stop_token_ids=(stop,))
    sequence = engine.add(request)
    engine.run()
    assert engine.outputs[sequence.sequence_id] == answer(plain)[:3] == answer(request)
    check_idle(engine.scheduler)


def test_a_stop_token_of_one_that_comes_later_ends_its_output() -> None:
    engine = Engine()
    first = make_request(5, max_tokens=20, ignore_eos=True)
    plain = make_request(6, seed=1, max_tokens=8, ignore_eos=True)
    stop = answer(plain)[2]
    before = engine.add(first)
    engine.step()
    engine.step()
    after = engine.add(
        make_request(6, seed=1, max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    )
    engine.run()
    assert engine.outputs[after.sequence_id] == answer(plain)[:3]
    assert engine.outputs[before.sequence_id] == answer(first)


def test_the_longest_sequence_of_the_model_ends_by_length_and_fits_its_blocks() -> None:
    engine = Engine(num_blocks=3, max_model_len=12)
    sequence = engine.add(make_request(9, max_tokens=100, ignore_eos=True))
    engine.run()
    assert len(engine.outputs[sequence.sequence_id]) == 3
    check_idle(engine.scheduler)


# --- the prefix cache -----------------------------------------------------------------------------


@pytest.mark.covers("E76", "E77", "F111", "S47")
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    # E76, E77 (S47).
    engine = Engine()
    request = make_request(length, max_tokens=2)
    engine.add(request)
    engine.run()
    again = engine.add(request)
    assert engine.scheduler.num_cached_tokens(again) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    engine.run()
    assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.outputs[again.sequence_id] == answer(request)
    check_idle(engine.scheduler)


def test_without_the_cache_nothing_is_found_and_nothing_stays() -> None:
    engine = Engine(caching=False)
    request = make_request(9)
    for _ in range(2):
        sequence = engine.add(request)
        engine.run()
        assert sequence.num_cached_tokens == 0
        assert engine.outputs[sequence.sequence_id] == answer(request)
    assert engine.scheduler.pool.counts().free == 16


@pytest.mark.covers("F108")
def test_output_blocks_are_found_by_the_next_turn_of_a_conversation() -> None:
    engine = Engine()
    request = make_request(6, max_tokens=6, ignore_eos=True)
    first = engine.add(request)
    engine.run()
    # Known: 12 tokens, 11 of them computed: two full blocks.
    turn = make_request((*request.prompt_token_ids, *first.output_token_ids, 3), max_tokens=3)
    second = engine.add(turn)
    engine.run()
    assert second.num_cached_tokens == 8
    assert engine.outputs[second.sequence_id] == answer(turn)


@pytest.mark.covers("F35", "F36")
def test_a_block_is_findable_only_after_its_step_was_applied() -> None:
    # A step that is planned, or has failed, has published nothing.
    engine = Engine()
    request = make_request(9)
    sequence = engine.add(request)
    step = engine.plan()
    twin = Sequence(99, request)
    assert engine.scheduler.num_cached_tokens(twin) == 0
    engine.scheduler.finish(sequence)
    assert engine.scheduler.num_cached_tokens(twin) == 0
    assert step.sequences == [sequence]
    check_idle(engine.scheduler)
    assert engine.scheduler.pool.counts().cached == 0


def test_a_block_is_findable_as_soon_as_a_decode_has_filled_it() -> None:
    engine = Engine(num_blocks=8)
    sequence = engine.add(make_request(3, max_tokens=20, ignore_eos=True))
    while not sequence.is_decoding or sequence.num_computed < 16:
        engine.step()
        assert sequence.num_hashed_blocks == sequence.num_computed // BLOCK_SIZE
        known = (*sequence.prompt_token_ids, *sequence.output_token_ids)
        again = Sequence(99, make_request((*known[: sequence.num_computed], 990)))
        assert engine.scheduler.num_cached_tokens(again) == (
            sequence.num_hashed_blocks * BLOCK_SIZE
        )


def test_a_chunk_publishes_its_full_blocks_and_not_the_partial_one() -> None:
    engine = Engine(budget=6)
    request = make_request(11)
    engine.add(request)
    engine.step()
    assert engine.scheduler.num_cached_tokens(Sequence(99, request)) == 4
    engine.step()
    assert engine.scheduler.num_cached_tokens(Sequence(99, request)) == 8


def test_two_prompts_that_part_after_a_block_share_that_block_alone() -> None:
    engine = Engine()
    common = make_prompt(4, seed=5)
    left = make_request((*common, 1, 2, 3, 4, 5), max_tokens=5)
    right = make_request((*common, 9, 8, 7, 6, 5), max_tokens=5)
    first = engine.add(left)
    engine.step()
    second = engine.add(right)
    engine.step()
    shared = set(first.block_table) & set(second.block_table)
    assert len(shared) == 1
    engine.run()
    assert engine.outputs[first.sequence_id] == answer(left)
    assert engine.outputs[second.sequence_id] == answer(right)
    check_idle(engine.scheduler)


# --- preemption -----------------------------------------------------------------------------------


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    engine = Engine(num_blocks=4, seats=2, caching=False, **STRICT)
    requests = [make_request(6, seed=seed, max_tokens=7, ignore_eos=True) for seed in (1, 2)]
    old, young = [engine.add(request) for request in requests]
    engine.step()
    engine.step()
    assert (old.status, young.status) == (SequenceStatus.RUNNING_DECODE,) * 2
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert young.status is SequenceStatus.PREEMPTED
    assert young.num_computed == 0
    assert list(engine.scheduler.waiting) == [young]
    engine.run()
    for sequence, request in zip((old, young), requests, strict=True):
        assert engine.outputs[sequence.sequence_id] == answer(request)
    check_idle(engine.scheduler)


def test_a_preempted_sequence_waits_before_later_arrivals() -> None:
    engine = Engine(num_blocks=4, seats=2, caching=False, **STRICT)
    for seed in (1, 2):
        engine.add(make_request(6, seed=seed, max_tokens=7, ignore_eos=True))
    engine.step()
    late = engine.add(make_request(1, seed=3))
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert [s.sequence_id for s in engine.scheduler.waiting] == [2, late.sequence_id]


def test_a_step_that_only_preempts_made_progress() -> None:
    engine = Engine(num_blocks=4, seats=2, caching=False, max_model_len=12, **STRICT)
    for seed in (1, 2):
        engine.add(make_request(4, seed=seed, max_tokens=8, ignore_eos=True))
    engine.run_until(lambda: [s.num_computed for s in engine.scheduler.running] == [8, 8])
    step = engine.plan()
    # Both need a block and none is free: the younger gives up its two, the older takes one.
    assert step.num_preempted == 1
    assert [s.sequence_id for s in step.sequences] == [1]
    assert step.made_progress
    engine.apply(step)
    engine.run()
    check_idle(engine.scheduler)


def test_an_idle_engine_makes_no_progress_and_says_so() -> None:
    engine = Engine()
    step = engine.plan()
    assert (list(step.batch), step.reserved, step.num_preempted) == ([], [], 0)
    assert not step.made_progress
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


def test_what_a_hit_reports_is_the_hit_at_arrival_not_after_a_preemption() -> None:
    engine = Engine(num_blocks=6, seats=2, max_model_len=24, **STRICT)
    requests = [make_request(9, seed=seed, max_tokens=12, ignore_eos=True) for seed in (1, 2)]
    _, young = [engine.add(request) for request in requests]
    engine.run()
    assert engine.num_preemptions > 0
    assert young.num_cached_tokens == 0
    assert engine.outputs[young.sequence_id] == answer(requests[1])


def test_admission_takes_the_blocks_of_the_whole_prompt_at_once() -> None:
    engine = Engine(budget=4)
    sequence = engine.add(make_request(11))
    engine.step()
    assert len(sequence.block_table) == blocks_for(11, BLOCK_SIZE) == 3
    assert sequence.num_computed == 4
