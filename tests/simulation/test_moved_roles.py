"""Nodes that are asked for other work than before, while what they have goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.flow.messages import AnswerCall, CallRefused, RoleChanged, Submit
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import DECODE, ROUTER, World
from tests.support.engine.build import make_request


def swap(world: World) -> None:
    """Each node is given the role of the other one."""
    world.router.decode, world.router.prefill = world.router.prefill or DECODE, world.router.decode
    for node in world.nodes.values():
        world.to_nodes.append((node.me, RoleChanged()))


@pytest.mark.parametrize("steps_between", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_every_answer_is_right_while_two_nodes_exchange_their_roles(
    steps_between: int, num_drafts: int
) -> None:
    size = NodeSize(num_blocks=24, method="ngram" if num_drafts else "none", num_drafts=num_drafts)
    world = World(prefill=size, decode=size)
    asked = []
    for number in range(12):
        asked.append(world.ask(5 + 3 * number, max_tokens=6, may_wait=True, seed=number))
        for _ in range(steps_between):
            world.step()
        swap(world)
    world.step_until(lambda: all(one.is_done for one in asked))
    world.settle()
    world.check_closed()
    assert world.outcomes() == {"finished": 12}
    for node in world.nodes.values():
        counted = node.scheduler.statistics().counters
        assert counted.num_decode_tokens > 0, "it decoded"
        assert counted.num_chunk_tokens > 0, "it prefilled"


def test_an_attempt_is_not_a_prompt_and_a_reservation_on_one_node() -> None:
    """A router that sends the prompt to the node that holds its reservation is told so."""
    world = World()
    asked = world.ask(9, max_tokens=4)
    world.step_until(lambda: asked.ticket is not None)
    flow = world.d.flow
    message = Submit(
        request=asked.request,
        router=ROUTER,
        reply_to=77,
        received_at_s=0.0,
        is_prompt=True,
        ticket=asked.ticket,
    )
    (answer,) = flow.on_message(message, 0.0)
    assert isinstance(answer, AnswerCall)
    assert isinstance(answer.answer, CallRefused)
    assert "here for something else" in str(answer.answer.error)
    other = replace(message, request=make_request(9, name="other"))
    (answer,) = flow.on_message(other, 0.0)
    assert isinstance(answer, AnswerCall)
    assert isinstance(answer.answer, CallRefused)
    assert "in use by another attempt" in str(answer.answer.error), "its own landing"
    world.step_until(lambda: asked.is_done)
    world.check_closed()
