"""Landed KV that is copied to a device: nothing reads it early, nothing reuses its blocks early."""

from __future__ import annotations

import random

import pytest

from common.ids import AttemptId
from engine.core.status import SequenceStatus
from node.messages import Abort
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, ROUTER, NodeSize, World, ask_until_committed

NEVER = 1_000_000


def ask_until_landed(world: World, length: int = 9, **given: object) -> Asked:
    """A request whose KV has landed; its copy ends when `finish_copies` lets it."""
    world.d.runner.num_staging_polls = NEVER
    asked = ask_until_committed(world, length, **given)
    world.step_until(lambda: world.d.runner.num_staging > 0)
    return asked


def finish_copies(world: World) -> None:
    world.d.runner.num_staging_polls = 0


def test_a_sequence_starts_when_its_kv_is_staged_and_others_go_on() -> None:
    world = World()
    running = world.ask(8, max_tokens=30, name="running")
    world.step_until(lambda: 3 in running.tokens)
    asked = ask_until_landed(world, max_tokens=6, name="landed")
    [waiting] = world.d.scheduler.receiving.values()
    before = len(running.tokens)
    for _ in range(5):
        world.step()
    assert waiting.status is SequenceStatus.WAITING_FOR_KV
    assert len(running.tokens) == before + 5
    assert list(asked.tokens) == [0]
    finish_copies(world)
    world.settle()
    assert world.outcomes() == {"finished": 2}
    world.check_closed()


def test_an_idle_node_looks_again_soon() -> None:
    world = World()
    ask_until_landed(world)
    world.d.turn()
    deadline_s = world.d.flow.next_deadline_s()
    assert deadline_s is not None
    assert deadline_s - world.clock.now_s() == pytest.approx(0.001)
    finish_copies(world)
    world.settle()
    world.check_closed()
    assert world.d.flow.next_deadline_s() is None


def test_blocks_of_an_aborted_sequence_are_not_reused_before_their_copy_is_done() -> None:
    world = World(decode=NodeSize(num_blocks=6, max_model_len=24))
    asked = ask_until_landed(world, length=16, max_tokens=3)
    world.router.abort(asked)
    world.to_the_node(DECODE, Abort(ROUTER, (asked.request.id,)))
    for _ in range(3):
        world.step()
    assert not world.d.scheduler.receiving
    assert world.d.scheduler.pool.counts().quarantined == 4
    later = world.ask(16, max_tokens=3, may_wait=True, seed=7)
    for _ in range(5):
        world.step()
    assert not later.tokens
    finish_copies(world)
    world.settle()
    assert later.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.parametrize("seed", range(40))
def test_copies_that_take_any_time_change_no_answer(seed: int) -> None:
    choose = random.Random(seed)
    world = World(decode=NodeSize(num_blocks=choose.choice([10, 24]), seats=3, max_model_len=32))
    aborted: list[AttemptId] = []
    for number in range(12):
        asked = world.ask(
            choose.randint(2, 20), max_tokens=choose.randint(2, 8), may_wait=True, seed=number
        )
        for _ in range(choose.randint(0, 4)):
            world.d.runner.num_staging_polls = choose.choice([0, 1, 5, 9])
            world.step()
        if choose.random() < 0.3:
            world.router.abort(asked)
            aborted.append(asked.request.id)
    finish_copies(world)
    world.settle()
    world.check_closed()
    assert world.outcomes()["finished"] == 12 - world.outcomes()["aborted"]
    assert world.outcomes()["aborted"] <= len(aborted)
