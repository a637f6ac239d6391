"""The life of a request over two nodes: right tokens, from the right node, and nothing left."""

from __future__ import annotations

import pytest

from common.settings.config import SchedulingConfig
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, World, right_answer
from tests.support.engine.build import make_prompt, make_request
from tests.support.engine.hash_runner import EOS_TOKEN_ID, expected_tokens


def seed_that_ends_at_once(prompt: tuple[int, ...]) -> int:
    """A seed with which the model's first token ends the sequence."""
    for seed in range(100_000):
        if expected_tokens(prompt, make_request(prompt, seed=seed).sampling) == [EOS_TOKEN_ID]:
            return seed
    raise AssertionError("no such seed")


def finish(world: World, *asked: Asked) -> None:
    world.settle()
    world.check_closed()
    for one in asked:
        assert one.outcomes == ["finished"]
        assert one.answer() == right_answer(one.request)


LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2, 40]


@pytest.mark.covers("F41", "F42", "F44")
@pytest.mark.parametrize("budget", [4, 6, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_token_0_comes_from_prefill_and_the_rest_from_decode(length: int, budget: int) -> None:
    world = World(prefill=NodeSize(budget=budget), decode=NodeSize(budget=budget))
    asked = world.ask(length, max_tokens=6)
    finish(world, asked)
    assert asked.legs[PREFILL].next_index == 1
    assert asked.legs[DECODE].next_index == 6
    assert asked.ticket is not None
    assert len(asked.ticket.target_block_ids) == -(-length // BLOCK_SIZE)
    assert world.p.num_steps == -(-length // budget)
    assert world.d.num_steps == 5


def test_token_0_does_not_wait_for_the_kv() -> None:
    world = World()
    asked = world.ask(9)
    world.settle(frames=False)
    assert asked.answer() == right_answer(asked.request)[:1]
    assert not asked.has_started
    finish(world, asked)


def test_blocks_leave_while_the_next_chunk_is_computed() -> None:
    world = World(prefill=NodeSize(budget=6))
    asked = world.ask(12)
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    pieces = [f.piece for f in world.network.frames if f.kind == "piece"]
    assert pieces == [(0, 0), (1, 0)], "6 tokens are one whole block of 4, in two layers"
    world.step_until(lambda: world.p.num_steps == 2, frames=False)
    assert {f.piece[1] for f in world.network.frames if f.kind == "piece"} == {0, 1, 2}
    finish(world, asked)


@pytest.mark.covers("F39", "S50")
def test_a_first_token_that_ends_the_output_moves_nothing() -> None:
    # The transfer is given up, and both sides let go.
    world = World()
    prompt = make_prompt(9)
    asked = world.ask(prompt, seed=seed_that_ends_at_once(prompt))
    finish(world, asked)
    assert asked.answer() == [EOS_TOKEN_ID]
    assert world.d.num_steps == 0


@pytest.mark.covers("F39")
def test_a_first_token_that_is_a_stop_token_ends_the_output() -> None:
    world = World()
    stop = right_answer(make_request(9))[0]
    asked = world.ask(9, stop_token_ids=(stop,))
    finish(world, asked)
    assert asked.answer() == [stop]
    assert world.d.num_steps == 0


@pytest.mark.covers("E78", "F40", "S50")
@pytest.mark.parametrize("length", LENGTHS)
def test_one_token_is_answered_by_prefill_alone(length: int) -> None:
    # No ticket, no reservation, no frame.
    world = World()
    asked = world.ask(length, max_tokens=1)
    finish(world, asked)
    assert list(asked.legs) == [PREFILL]
    assert world.network.num_delivered == 0


@pytest.mark.covers("F40")
def test_a_reservation_for_one_token_is_answered_with_a_local_start() -> None:
    # Nothing would be left to decode once the KV had landed.
    world = World()
    asked = Asked(make_request(9, max_tokens=1))
    world.router.asked[asked.request.id] = asked
    world.router.send_reserve(asked)
    finish(world, asked)
    assert asked.is_local
    assert world.network.num_delivered == 0


def test_a_prompt_that_leaves_room_for_one_token_on_decode_is_computed_there() -> None:
    # The prefill node takes longer sequences, so it would not know that token 0 is the last.
    world = World(decode=NodeSize(max_model_len=10))
    asked = world.ask(9, max_tokens=8)
    world.settle()
    assert asked.outcomes == ["finished"]
    assert asked.answer() == right_answer(asked.request)[:1]
    assert asked.is_local


@pytest.mark.parametrize(("threshold", "length", "is_local"), [(8, 8, True), (8, 9, False)])
def test_prompts_up_to_the_threshold_are_computed_on_decode(
    threshold: int, length: int, is_local: bool
) -> None:
    world = World(threshold=threshold)
    asked = world.ask(length)
    finish(world, asked)
    assert asked.is_local is is_local
    assert (world.p.num_steps == 0) is is_local


def test_only_uncached_tokens_count_for_the_threshold() -> None:
    world = World(threshold=8)
    prompt = make_prompt(20)
    first = world.ask(prompt)
    finish(world, first)
    again = world.ask(prompt)
    finish(world, again)
    assert (first.is_local, again.is_local) == (False, True)


@pytest.mark.covers("F43", "F110")
@pytest.mark.parametrize("length", [5, 12, 13])
@pytest.mark.parametrize("hit", ["decode", "prefill", "both", "neither"])
def test_a_prefix_hit_on_either_side_moves_only_what_is_missing(hit: str, length: int) -> None:
    # Four combinations.
    world = World(threshold=0)
    prompt = make_prompt(length)
    if hit in ("decode", "both"):
        warm_up_decode(world, prompt)
    if hit in ("prefill", "both"):
        world.ask(prompt, name="warm", max_tokens=1)
        world.settle()
    delivered = world.network.num_delivered
    steps = len(world.p.runner.batches)
    asked = world.ask(prompt, max_tokens=5)
    finish(world, asked)
    assert asked.ticket is not None
    full = (length - 1) // BLOCK_SIZE
    missing = -(-length // BLOCK_SIZE) - (full if hit in ("decode", "both") else 0)
    assert len(asked.ticket.target_block_ids) == missing
    # open, the pieces of two layers, commit, and the answer
    assert world.network.num_delivered - delivered == 2 * missing + 3
    computed = sum(len(s.token_ids) for b in world.p.runner.batches[steps:] for s in b)
    assert computed == length - (full * BLOCK_SIZE if hit in ("prefill", "both") else 0)


def warm_up_decode(world: World, prompt: tuple[int, ...]) -> None:
    """Leave the prompt's full blocks in the decode node's cache, by a handoff."""
    world.ask(prompt, name="warm-d", max_tokens=2)
    world.settle()
    # The prefill node forgets: other prompts push this one out of its cache.
    for seed in range(30, 50):
        world.ask(world.p.runner.max_model_len - 1, name=f"fill{seed}", seed=seed, max_tokens=1)
        world.settle()


def test_many_at_once_are_all_answered_right() -> None:
    world = World(
        prefill=NodeSize(budget=10, seats=3), decode=NodeSize(budget=10, seats=3, num_blocks=24)
    )
    asked = [
        world.ask(5 + 3 * i, seed=i, max_tokens=8, ignore_eos=True, may_wait=True) for i in range(9)
    ]
    finish(world, *asked)


@pytest.mark.covers("F46")
def test_a_decode_node_that_preempts_answers_right() -> None:
    # A victim is recomputed here, and its stream goes on without a gap.
    hasty = SchedulingConfig(reservation_policy="none")
    world = World(
        decode=NodeSize(num_blocks=10, seats=4, scheduling=hasty), prefill=NodeSize(num_blocks=40)
    )
    asked = [world.ask(9, seed=i, max_tokens=16, ignore_eos=True, may_wait=True) for i in range(4)]
    finish(world, *asked)
    assert world.d.scheduler.statistics().counters.num_preemptions > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mixed_node_answers_alone(length: int) -> None:
    world = World(threshold=None, decode=NodeSize(budget=7))
    asked = [world.ask(length, seed=i, max_tokens=5) for i in range(3)]
    finish(world, *asked)
    assert all(one.is_local for one in asked)


@pytest.mark.covers("F82", "S49")
def test_reservations_of_one_turn_are_all_granted_when_there_is_room() -> None:
    # An idle node never refuses what fits.
    world = World()
    asked = [world.ask(9, seed=i) for i in range(3)]
    finish(world, *asked)


@pytest.mark.covers("F109")
def test_a_landed_sequence_is_findable_for_the_next_reservation() -> None:
    world = World()
    asked = world.ask(9, name="first")
    world.step_until(lambda: asked.has_started)
    again = world.ask(9, name="again")
    finish(world, asked, again)
    assert again.ticket is not None
    assert again.ticket.num_cached_tokens == 8
    assert world.d.scheduler.pool.counts().cached >= 2
