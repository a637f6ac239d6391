"""A turn of a node is checked where anything was done, or where what is counted has changed."""

from __future__ import annotations

import pytest

from engine.core.blocks.block_pool import BlockUse
from tests.simulation import scripted_node
from tests.simulation.world import World, assert_finished


def test_a_lost_block_is_noticed_in_a_turn_that_does_nothing() -> None:
    world = World()
    world.turn()
    world.d.scheduler.pool.allocate(1, BlockUse.RUNNING)
    with pytest.raises(AssertionError, match="held by nobody"):
        world.turn(world.d)


def test_books_are_checked_wherever_anything_was_done_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(scripted_node, "check_books", checked.append)
    world = World()
    world.ask(9)
    world.messages_arrive()
    world.turn(world.d)
    assert checked == [world.d.scheduler], "a message was read"
    world.turn(world.d)
    assert len(checked) == 1, "nothing was done"
    world.turn(world.p)
    assert len(checked) == 2, "a node that was never looked at"
    monkeypatch.undo()
    world.settle()
    assert_finished(world, *world.router.asked.values())
