"""Both nodes of a handoff have its prompt: each evicts first what the other one keeps."""

from __future__ import annotations

from typing import Any

from common.kv.blocks import hash_full_blocks
from tests.simulation.scripted_node import BLOCK_SIZE, Node, NodeSize
from tests.simulation.world import World, assert_finished
from tests.support.engine.build import make_prompt, make_request
from tests.support.engine.hash_runner import expected_tokens

NUM_WHOLE = 2 * BLOCK_SIZE


def world_of(num_blocks: int = 24) -> World:
    """The decode node keeps the prompt of the first handoff, and of every second one after that."""
    size = NodeSize(num_blocks=num_blocks, max_model_len=16)
    world = World(prefill=size, decode=size)
    world.router.may_pull = True
    return world


def prompt_of(family: int) -> tuple[int, ...]:
    """Two whole blocks and a token."""
    return make_prompt(NUM_WHOLE + 1, family)


def ask(world: World, family: int, **given: Any) -> None:
    asked = world.ask(prompt_of(family), may_wait=True, **{"max_tokens": 2, **given})
    assert_finished(world, asked)


def order_of(node: Node, num_families: int) -> list[int]:
    """The families in the order in which a node evicts their prompts."""
    pool, fingerprint = node.scheduler.pool, node.layout.fingerprint
    order = [pool.prefix_cache.hash_of(one) for one in pool.next_evicted(pool.num_blocks)]
    firsts = {
        hash_full_blocks(prompt_of(family), BLOCK_SIZE, fingerprint, "")[0]: family
        for family in range(num_families)
    }
    return [firsts[one] for one in order if one in firsts]


def test_each_node_evicts_first_what_the_other_one_keeps() -> None:
    world = world_of()
    for family in range(4):
        ask(world, family)
    assert order_of(world.p, 4) == [0, 2, 1, 3]
    assert order_of(world.d, 4) == [1, 3, 0, 2]


def test_together_two_pools_hold_more_prompts_than_each_of_them() -> None:
    """By age alone both would evict each prompt before it is asked for again."""
    world, families = world_of(num_blocks=12), range(8)
    for _ in range(2):
        for family in families:
            ask(world, family, ignore_eos=True)
    num_computed = world.p.scheduler.statistics().counters.num_chunk_tokens
    num_found = 2 * len(families) * (NUM_WHOLE + 1) - num_computed
    assert num_found >= 0.8 * len(families) * NUM_WHOLE


def test_what_would_be_computed_sooner_than_pulled_is_not_given_up() -> None:
    world = world_of()
    world.token_s = 0.0
    for family in range(4):
        ask(world, family)
    assert order_of(world.p, 4) == [0, 1, 2, 3]
    assert order_of(world.d, 4) == [1, 3, 0, 2]


def test_a_prompt_that_the_decode_node_did_not_get_is_not_given_up() -> None:
    """Its first token ends the answer, so its transfer is aborted."""
    world = world_of()
    for family in range(2):
        ask(world, family)
    request = make_request(prompt_of(2))
    first, *_ = expected_tokens(request.prompt_token_ids, request.sampling)
    ask(world, 2, stop_token_ids=(first,))
    assert order_of(world.p, 3) == [0, 1, 2]
    assert order_of(world.d, 3) == [1, 0]
