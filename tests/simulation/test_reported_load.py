"""The load that nodes report: what runs, what is received, what waits, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

from common.nodes import NodeLoad
from node.flow.messages import PullRefused
from tests.simulation.scripted_node import NodeSize
from tests.simulation.three_nodes import OTHER, Three
from tests.simulation.world import World, assert_finished
from tests.support.engine.build import make_prompt


def seats_and_queue(load: NodeLoad) -> tuple[int, int, int]:
    return load.free_seats, load.num_running, load.num_waiting


def test_a_seat_is_taken_by_what_decodes_and_by_what_is_received() -> None:
    world = World(decode=NodeSize(seats=2))
    assert seats_and_queue(world.d.flow.load()) == (2, 0, 0)
    decoding = world.ask(9, max_tokens=30, ignore_eos=True)
    world.step_until(lambda: len(decoding.tokens) == 3)
    assert seats_and_queue(world.d.flow.load()) == (1, 1, 0)
    received = world.ask(make_prompt(9, 1), max_tokens=6, ignore_eos=True)
    world.messages_arrive()
    world.d.turn()
    load = world.d.flow.load()
    assert seats_and_queue(load) == (0, 2, 0)
    assert load.num_receiving_blocks == 3, "9 tokens"
    waiting = world.ask(make_prompt(9, 2), max_tokens=6, ignore_eos=True, may_wait=True)
    world.messages_arrive()
    world.d.turn()
    load = world.d.flow.load()
    assert seats_and_queue(load) == (0, 2, 1)
    assert load.free_blocks == 24 - 4 - 3, "12 tokens and a next one, and 9 tokens"
    assert_finished(world, decoding, received, waiting)
    load = world.d.flow.load()
    assert seats_and_queue(load) == (2, 0, 0)
    assert (load.free_blocks, load.num_receiving_blocks) == (24, 0)


def test_a_prompt_counts_as_waiting_until_it_is_computed() -> None:
    world = World(prefill=NodeSize(budget=4))
    asked = [world.ask(8, max_tokens=1), world.ask(make_prompt(9, 1), max_tokens=1)]
    world.messages_arrive()
    world.p.turn()
    load = world.p.flow.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.queued_tokens == 8 + 9 - 4
    assert_finished(world, *asked)


def test_a_prompt_that_waits_for_a_pull_counts_as_waiting() -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1)
    pull = world.step_until_asked()
    assert seats_and_queue(world.q.flow.load()) == (4, 0, 1)
    world.lose(pull)
    world.to_nodes.append((OTHER, PullRefused(pull.ticket.lease_token)))
    world.step_until(lambda: len(world.q.flow.pulls) == 0)
    assert seats_and_queue(world.q.flow.load())[2] == 0, "it is computed"
    assert_finished(world, asked)


def with_steps_that_take(world: World, *spans_s: float) -> NodeLoad:
    """Let a node compute prompts of 8 tokens in steps that take so long; return what it reports."""
    execute, left_s = world.d.runner.execute, list(spans_s)

    def timed(*given: Any) -> Any:
        world.advance(left_s.pop(0))
        return execute(*given)

    world.d.runner.execute = timed  # type: ignore[assignment,method-assign]
    for seed in range(len(spans_s)):
        assert_finished(world, world.ask(make_prompt(8, seed), max_tokens=1))
    assert not left_s
    return world.d.flow.load()


@pytest.mark.parametrize(
    ("token_s", "stood_s", "counted_ms"),
    [
        (0.01, 20.0, 800),
        (0.01, 1.5, 800),
        (0.01, 0.9, 1700),
        pytest.param(0.3, 20.0, 20_800, id="its step may be slow"),
    ],
)
def test_a_step_in_which_a_node_stood_still_says_nothing_of_its_speed(
    token_s: float, stood_s: float, counted_ms: int
) -> None:
    """Roles that follow the load are given by what nodes say that their steps take."""
    world = World(threshold=None)
    world.token_s = token_s
    load = with_steps_that_take(world, *[0.1] * 4, stood_s, *[0.1] * 4)
    assert load.num_prompt_tokens == 9 * 8
    assert load.prompt_steps_ms == counted_ms


def test_steps_that_have_become_long_count_again_soon() -> None:
    """As with long texts, of which a step takes longer than its tokens explain."""
    world = World(threshold=None)
    world.token_s = 0.01
    load = with_steps_that_take(world, *[0.1] * 4, *[6.0] * 8)
    assert load.prompt_steps_ms >= 400 + 5 * 6000
