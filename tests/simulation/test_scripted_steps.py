"""Steps beside the turns of a node go on when a test says so, so that a seed is one history."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.simulation.storm import FAULTS, Storm, run_to_the_end
from tests.simulation.world import World
from tests.support.engine.hash_runner import NUM_LAYERS

MASKS = "pdserve-masks"
"""Threads whose results a step waits for."""


def computing(**given: object) -> World:
    """Return a world of one mixed node whose first step is under way."""
    world = World(threshold=None, is_async=True)
    world.ask(9, max_tokens=3, ignore_eos=True, **given)
    world.messages_arrive()
    world.d.turn()
    return world


def test_a_step_computes_on_when_it_is_told_to_and_the_rest_when_it_is_waited_for() -> None:
    world = computing()
    cache = world.d.runner.cache
    assert not cache.any(), "it is queued"
    world.d.turn()
    assert cache.any(axis=(1, 2, 3)).all()
    before = cache.copy()
    world.d.compute_on()
    assert not np.array_equal(cache, before)
    world.settle()
    world.check_closed()
    assert world.outcomes()["finished"] == 1


def test_layers_that_were_computed_before_are_sent_when_the_node_waits() -> None:
    world = World(is_async=True)
    asked = world.ask(9, max_tokens=3, ignore_eos=True)
    world.step_until(lambda: len(world.p.runner.batches) == 1)
    kinds = [frame.kind for frame in world.network.frames]
    for layer in range(NUM_LAYERS):
        world.p.compute_on()
        assert world.p.runner.kv_bytes[layer].any()
        assert [frame.kind for frame in world.network.frames] == kinds
    world.p.turn()
    assert [frame.kind for frame in world.network.frames].count("piece") > 0
    world.settle()
    world.check_closed()
    assert asked.outcomes == ["finished"]


@pytest.mark.parametrize("num_parts", [0, 9])
def test_a_step_takes_as_long_as_it_computes(num_parts: int) -> None:
    world = computing()
    for _ in range(num_parts):
        world.d.compute_on()
    world.advance(2.0)
    world.d.turn()
    took_s = world.d.scheduler.statistics().counters.prompt_steps_s
    assert took_s == (0.0 if num_parts else 2.0)


@pytest.mark.parametrize("fails", ["at once", "after a layer"])
@pytest.mark.parametrize("num_parts", [0, 9])
def test_a_step_that_fails_ends_its_requests(num_parts: int, fails: str) -> None:
    world = World(threshold=None, is_async=True)
    world.d.runner.fail_next_step = fails == "at once"
    world.d.runner.fail_after_layer = 0 if fails == "after a layer" else None
    asked = world.ask(9, max_tokens=3)
    world.messages_arrive()
    world.d.turn()
    for _ in range(num_parts):
        world.d.compute_on()
    assert asked.outcomes == []
    world.settle()
    world.check_closed()
    assert asked.outcomes == ["failed: internal_error"]


def record(seed: int) -> list[object]:
    """Run a storm, and return what has happened in it."""
    storm = Storm(seed, FAULTS, is_async=True)
    run_to_the_end(storm, seed)
    world = storm.world
    asked = [(one.outcomes, one.tokens) for one in world.router.asked.values()]
    steps = [(node.runner.batches, node.num_steps) for node in world.nodes.values()]
    counted = [node.scheduler.statistics().counters for node in world.nodes.values()]
    return [storm.happened, asked, steps, counted, world.network.num_delivered]


@pytest.mark.parametrize("seed", [3, 5])
def test_a_seed_is_one_history_and_its_steps_have_no_thread(seed: int) -> None:
    before = {one.ident for one in threading.enumerate()}
    first, second = record(seed), record(seed)
    assert first == second
    begun = {one.name for one in threading.enumerate() if one.ident not in before}
    assert {name for name in begun if not name.startswith(MASKS)} == set()
