"""What nodes say of a prompt with its token 0: how long it waited, and how long it was computed."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import RequestOutput
from simulator.node import NodeSaid
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.world import DECODE, PREFILL, World
from tests.support.engine.hash_runner import Parts

STEP_S = 2.0


def slow_world(**given: Any) -> tuple[World, list[tuple[Node, RequestOutput]]]:
    """Every step takes 2 s; the outputs of the nodes are noted."""
    world = World(**given)
    heard: list[tuple[Node, RequestOutput]] = []
    for node in world.nodes.values():
        _slow_down(world, node)
    to_the_router = world.to_the_router

    def note(said: NodeSaid) -> None:
        heard.extend((world.nodes[said.node], output) for output in said.outputs)
        to_the_router(said)

    world.to_the_router = note  # type: ignore[method-assign]
    return world, heard


def _slow_down(world: World, node: Node) -> None:
    parts = node.runner.parts

    def slow_parts(batch: Any, *, tells_layers: bool) -> Parts:
        world.clock.advance(STEP_S)
        return (yield from parts(batch, tells_layers=tells_layers))

    node.runner.parts = slow_parts  # type: ignore[method-assign]


def spans(said: list[tuple[Node, RequestOutput]]) -> list[tuple[object, int, float, float]]:
    return [
        (node.me, output.first_index, output.details.queue_s, output.details.compute_s)
        for node, output in said
        if output.token_ids
    ]


def test_a_prompt_that_is_handed_off() -> None:
    world, said = slow_world(prefill=NodeSize(budget=6))
    asked = world.ask(12, max_tokens=2)
    world.step_until(lambda: asked.ticket is not None, frames=False)
    sent_at_s = world.clock.now_s()
    world.clock.advance(3.0)  # the node reads its inbox late
    world.settle()
    world.check_closed()
    assert world.clock.now_s() > sent_at_s
    # Two chunks; what the decode node adds has no spans.
    assert spans(said) == [(PREFILL, 0, 3.0, 2 * STEP_S), (DECODE, 1, 0.0, 0.0)]


@pytest.mark.parametrize("size", [NodeSize(budget=6), NodeSize()])
def test_chunks_are_the_steps_of_a_prompt_on_the_node_that_computes_it(size: NodeSize) -> None:
    world = World(prefill=size)
    world.ask(12, max_tokens=5, ignore_eos=True)
    world.settle()
    ended = {
        node.me: [attempt.num_chunks for attempt in node.flow.attempts.take_ended()]
        for node in world.nodes.values()
    }
    assert ended == {PREFILL: [2 if size.budget == 6 else 1], DECODE: [0]}


@pytest.mark.parametrize("threshold", [64, None])
def test_a_prompt_that_is_computed_where_it_is_decoded(threshold: int | None) -> None:
    world, said = slow_world(threshold=threshold, decode=NodeSize(budget=6))
    world.ask(12, max_tokens=3)
    world.clock.advance(1.5)
    world.settle()
    world.check_closed()
    assert spans(said) == [
        (DECODE, 0, 1.5, 2 * STEP_S),
        (DECODE, 1, 0.0, 0.0),
        (DECODE, 2, 0.0, 0.0),
    ]


def test_time_without_a_seat_is_time_in_the_queue() -> None:
    world, said = slow_world(threshold=None, decode=NodeSize(budget=6, seats=1))
    world.ask(6, max_tokens=2)
    world.ask(6, max_tokens=1)
    world.settle()
    world.check_closed()
    # The first one's prompt and its second token come before.
    assert spans(said)[-1] == (DECODE, 0, 2 * STEP_S, STEP_S)
