"""Nodes with pools too small for the prompts that come back: host memory has their prefixes."""

from __future__ import annotations

import random

import pytest

from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

NUM_FAMILIES = 3


def keeping(num_blocks: int = 9, num_host_blocks: int = 24, **given: object) -> NodeSize:
    return NodeSize(
        num_blocks=num_blocks,
        max_model_len=28,
        num_host_blocks=num_host_blocks,
        keeps_prefixes=True,
        **given,  # type: ignore[arg-type]
    )


def ask(world: World, family: int, last: int) -> None:
    """Answer a prompt of one beginning, four blocks long, and a token of its own."""
    prompt = (*make_prompt(16, family), last)
    assert_finished(world, world.ask(prompt, max_tokens=3, ignore_eos=True, may_wait=True))


@pytest.mark.parametrize("threshold", [0, None], ids=["handoff", "mixed"])
@pytest.mark.parametrize("num_copy_polls", [0, 3])
def test_every_prompt_that_comes_back_a_third_time_finds_its_prefix(
    threshold: int | None, num_copy_polls: int
) -> None:
    world = World(threshold=threshold, prefill=keeping(), decode=keeping())
    for node in world.nodes.values():
        node.runner.num_copy_polls = num_copy_polls
    # Twice in a row, so that each is used twice while the pool has it.
    for family in range(NUM_FAMILIES):
        for last in (1, 2):
            ask(world, family, last)
    for last in (3, 4, 5):
        for family in range(NUM_FAMILIES):
            ask(world, family, last)
    for node in world.nodes.values():
        counters = node.scheduler.statistics().counters
        assert counters.prefix_blocks_found["host"] >= 4 * NUM_FAMILIES
        assert node.flow.snapshot().load.num_prefix_host_blocks > 0


@pytest.mark.covers("F129")
@pytest.mark.parametrize("seed", range(everyday(6, of=20)))
def test_random_orders_aborts_and_failures_change_no_answer(seed: int) -> None:
    choose = random.Random(seed)
    world = World(
        threshold=choose.choice([None, 0, 6]),
        prefill=keeping(choose.randint(8, 10), choose.choice([2, 6, 24])),
        decode=keeping(choose.randint(8, 12), choose.choice([2, 6, 24])),
        is_async=bool(seed % 2),
        goes_on=("", "early", "late")[seed // 2 % 3] if seed % 2 else "",
    )
    nodes = list(world.nodes.values())
    for number in range(30):
        prompt = (*make_prompt(choose.choice([8, 12, 16]), choose.randrange(NUM_FAMILIES)), number)
        asked = world.ask(
            prompt, max_tokens=choose.randint(1, 8), ignore_eos=True, may_wait=True, seed=number
        )
        for _ in range(choose.randint(0, 12)):
            world.step()
        node = choose.choice(nodes)
        node.runner.num_copy_polls = choose.choice([0, 1, 4])
        node.runner.fail_next_copy = choose.random() < 0.1
        node.runner.fail_next_step = choose.random() < 0.05
        if choose.random() < 0.15:
            world.router.abort(asked)
    for node in nodes:
        node.runner.num_copy_polls = 0
        node.runner.fail_next_copy = node.runner.fail_next_step = False
    world.settle()
    world.check_closed()
    counters = [node.scheduler.statistics().counters for node in nodes]
    assert sum(one.num_prefix_blocks_out for one in counters) > 0
    assert world.outcomes()["finished"] >= 15
