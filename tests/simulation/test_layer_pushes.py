"""KV leaves while it is computed: which pieces, when, and what a step that fails leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from node.flow.messages import BeginCopy, Effect, PushBlocks
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_wires import Piece
from tests.simulation.world import World, ask_until_committed, assert_finished, right_answer
from tests.support.engine.build import make_prompt
from tests.support.engine.hash_runner import NUM_LAYERS, Parts


def pieces_of(world: World) -> list[Piece]:
    """Layer and ordinal of the pieces on the wire, in the order in which they were pushed."""
    return [frame.piece for frame in world.network.frames if frame.kind == "piece"]


@pytest.mark.covers("F42")
def test_each_chunk_sends_what_it_completes_layer_by_layer() -> None:
    world = World(prefill=NodeSize(budget=6))
    asked = world.ask(15)
    seen = [pieces_of(world)]
    while world.p.num_steps < 3:
        before = world.p.num_steps, len(pieces_of(world))
        world.step(frames=False)
        if world.p.num_steps > before[0]:
            seen.append(pieces_of(world)[before[1] :])
    # Blocks of 4 tokens, after 6, 12 and 15 of them: 1, then 3, then the last one with 3 tokens.
    assert seen == [
        [],
        [(0, 0), (1, 0)],
        [(0, 1), (0, 2), (1, 1), (1, 2)],
        [(0, 3), (1, 3)],
    ]
    assert_finished(world, asked)


def test_a_chunk_that_completes_no_block_sends_nothing() -> None:
    world = World(prefill=NodeSize(budget=3, seats=1))
    asked = world.ask(8)
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    assert pieces_of(world) == []
    assert_finished(world, asked)


def test_a_prefix_that_is_cached_here_and_not_there_leaves_before_the_step() -> None:
    world = World(prefill=NodeSize(budget=20))
    prompt = make_prompt(14)
    assert_finished(world, world.ask(prompt[:9], max_tokens=1))
    asked = world.ask(prompt, max_tokens=3)
    world.step_until(lambda: 0 in asked.tokens, frames=False)
    attempt = world.p.flow.attempts.get(asked.request.id)
    assert attempt is not None
    assert attempt.sequence.num_cached_tokens == 8
    assert pieces_of(world) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert_finished(world, asked)


@pytest.mark.covers("F105")
def test_blocks_that_decode_has_are_not_sent() -> None:
    world = World()
    prompt = make_prompt(14)
    assert_finished(world, world.ask(prompt[:9], max_tokens=2, ignore_eos=True))
    asked = world.ask(prompt, max_tokens=3)
    world.step_until(lambda: 0 in asked.tokens, frames=False)
    assert asked.ticket is not None
    assert asked.ticket.num_cached_tokens == 8
    assert pieces_of(world) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert_finished(world, asked)


def test_prompts_of_one_step_leave_side_by_side() -> None:
    world = World()
    asked = [world.ask(5, seed=1), world.ask(9, seed=2)]
    world.step_until(lambda: all(0 in one.tokens for one in asked), frames=False)
    assert pieces_of(world) == [
        *((0, 0), (0, 1), (0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 0), (1, 1), (1, 2)),
    ]
    assert_finished(world, *asked)


def test_what_a_prompt_without_a_ticket_computes_goes_nowhere() -> None:
    world = World()
    told: list[bool] = []
    parts = world.p.runner.parts

    def watched(batch: Any, *, tells_layers: bool) -> Parts:
        told.append(tells_layers)
        return parts(batch, tells_layers=tells_layers)

    world.p.runner.parts = watched  # type: ignore[method-assign]
    assert_finished(world, world.ask(9, max_tokens=1))
    assert told == [False]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_step_that_fails_in_the_middle_ends_its_transfers(layer: int, chunk: int) -> None:
    world = World(prefill=NodeSize(budget=6))
    asked = world.ask(15)
    world.step_until(lambda: world.p.num_steps == chunk)
    world.p.runner.fail_after_layer = layer
    world.step_until(lambda: world.p.runner.fail_after_layer is None)
    world.settle()
    assert asked.outcomes == ["failed: internal_error"]
    assert asked.answer() == []
    world.check_closed()
    # Its blocks are used again, for other bytes.
    for seed in range(4):
        world.ask(15, seed=seed)
    assert_finished(world, *list(world.router.asked.values())[1:])


def test_frames_of_a_step_that_failed_change_nothing_when_they_come_late() -> None:
    world = World(decode=NodeSize(num_blocks=5, max_model_len=20))
    asked = world.ask(15)
    world.p.runner.fail_after_layer = 0
    world.step_until(lambda: world.p.runner.fail_after_layer is None, frames=False)
    assert pieces_of(world) == [(0, i) for i in range(4)]
    late, world.network.frames = world.network.frames, []
    world.router.abort(asked)
    world.settle()
    follower = world.ask(15, seed=3, may_wait=True)
    world.step_until(lambda: follower.has_started)
    world.network.frames += late
    assert_finished(world, follower)


def test_token_0_that_ends_the_output_takes_back_what_was_pushed() -> None:
    world = World()
    request = world.ask(9, max_tokens=8).request
    first = right_answer(request)[0]
    world.settle()
    asked = world.ask(9, max_tokens=8, stop_token_ids=(first,), seed=0)
    world.step_until(lambda: 0 in asked.tokens, frames=False)
    assert pieces_of(world)
    assert [f.kind for f in world.network.frames][-1] == "abort"
    assert_finished(world, asked)


def test_a_push_names_its_layer_or_all_of_them() -> None:
    world = World(prefill=NodeSize(budget=8))
    asked = ask_until_committed(world, 9)
    effects: list[Effect] = []
    perform = world.p.loop._perform

    def watched(effect: Effect) -> None:
        effects.append(effect)
        perform(effect)

    world.p.loop._perform = watched
    second = world.ask(13, seed=0)
    world.step_until(lambda: 0 in second.tokens, frames=False)
    told = [e.push if isinstance(e, BeginCopy) else e for e in effects]
    pushes = [effect for effect in told if isinstance(effect, PushBlocks)]
    assert [(p.layer, p.ordinals) for p in pushes] == [
        (None, (0, 1)),
        (0, (2, 3)),
        (1, (2, 3)),
    ]
    assert_finished(world, asked, second)
