"""Blocks whose landing is over stay out of the pool until nobody can write them any more."""

from __future__ import annotations

from itertools import permutations

import pytest

from engine.core.blocks.block_pool import BlockCounts
from kv_transfer.contract import Commit, Landed, Released
from node.flow.messages import AbortAttempt
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.scripted_wires import Frame
from tests.simulation.world import (
    DECODE,
    PREFILL,
    ROUTER,
    World,
    ask_until_committed,
    ask_until_reserved,
    assert_finished,
)
from tests.support.engine.hash_runner import VOCAB_SIZE

UNKNOWN = 999


def one_sided(num_blocks: int = 24) -> World:
    """A world in which a sender writes by itself. Sequences of up to 16 tokens."""
    world = World(decode=NodeSize(num_blocks=num_blocks, max_model_len=16))
    world.network.is_one_sided = True
    return world


def blocks(world: World) -> BlockCounts:
    return world.d.scheduler.pool.counts()


def begun(world: World, length: int = 12) -> tuple[Asked, list[Frame]]:
    """A request whose landing has heard of its sender; its pieces were taken off the wire."""
    asked = ask_until_committed(world, length)
    world.network.deliver(world.network.frames[0])
    pieces = [frame for frame in world.network.frames if frame.kind == "piece"]
    world.network.frames = []
    return asked, pieces


def given_up(world: World, length: int = 12) -> tuple[Asked, list[Frame]]:
    """Such a request, aborted at the decode node alone: the sender does not know yet."""
    asked, pieces = begun(world, length)
    world.d.inbox.put(AbortAttempt(ROUTER, (asked.request.id,)))
    world.d.turn()
    return asked, pieces


def test_a_late_write_does_not_reach_another_request() -> None:
    # The writer ignores everything, and its source holds something else by now.
    world = one_sided(num_blocks=5)
    asked, pieces = given_up(world)
    world.network.frames = []
    assert asked.ticket is not None
    assert blocks(world).quarantined == 3
    follower = world.ask(12, seed=1, max_tokens=4, ignore_eos=True, may_wait=True)
    world.settle()
    assert follower.ticket is None
    small = world.ask(3, seed=2, max_tokens=5, ignore_eos=True, may_wait=True)
    world.settle()
    assert small.outcomes == ["finished"]
    world.network.frames = pieces
    world.p.runner.kv_bytes[:] = 0xEE
    world.p.connector.transfers[101].pushed.clear()
    world.network.deliver_all()
    before = world.d.runner.kv_bytes[:, :, list(asked.ticket.target_block_ids)]
    assert (before == 0xEE).all()
    world.d.connector.fence(101)
    world.step_until(lambda: bool(world.d.connector.landings))
    (landing,) = world.d.connector.landings.values()
    assert set(asked.ticket.target_block_ids) & set(landing.ticket.target_block_ids)
    world.router.abort(asked)
    assert_finished(world, follower, small)


@pytest.mark.covers("F56")
@pytest.mark.parametrize("is_one_sided", [False, True])
def test_an_abort_frees_the_seat_at_once_and_the_blocks_with_the_senders_word(
    is_one_sided: bool,
) -> None:
    world = one_sided()
    world.network.is_one_sided = is_one_sided
    asked, pieces = given_up(world)
    assert world.d.scheduler.num_free_seats == 4
    assert len(world.d.flow.attempts) == 0
    world.d.turn()
    assert blocks(world).quarantined == (3 if is_one_sided else 0)
    assert [frame.kind for frame in world.network.frames] == ["failed"]
    world.network.frames = pieces + world.network.frames
    world.network.deliver_all()
    world.d.turn()
    assert blocks(world).quarantined == 0
    world.router.abort(asked)
    world.settle()
    world.check_closed()


def test_a_landing_that_nobody_began_is_free_in_the_next_turn() -> None:
    world = one_sided()
    asked = ask_until_reserved(world)
    assert blocks(world).receiving == 3
    world.d.inbox.put(AbortAttempt(ROUTER, (asked.request.id,)))
    world.d.turn()
    assert (blocks(world).receiving, blocks(world).quarantined) == (0, 3)
    world.d.turn()
    assert blocks(world).free == 24
    world.router.abort(asked)
    world.settle()
    world.check_closed()


@pytest.mark.covers("F36")
def test_a_landing_that_fails_ends_its_request_at_once_and_keeps_its_blocks() -> None:
    world = one_sided()
    asked, _ = begun(world)
    world.kill(world.p, is_noticed=False)
    world.d.connector.on_peer_lost(PREFILL)
    world.d.turn()
    world.messages_arrive()
    assert asked.outcomes == ["failed: handoff_failed"]
    assert blocks(world).quarantined == 3
    world.advance(700.0)
    world.settle()
    assert blocks(world).quarantined == 3, "freed by a clock"
    world.d.connector.fence(101)
    world.settle()
    world.check_closed()


def test_a_deadline_ends_the_request_and_not_the_quarantine() -> None:
    world = one_sided()
    asked, _ = begun(world)
    world.clock.advance(601.0)
    world.d.turn()
    assert blocks(world).quarantined == 3
    world.d.connector.fence(101)
    world.advance(0.0)
    world.settle()
    assert asked.outcomes == ["failed: deadline_exceeded"]
    world.check_closed()


@pytest.mark.parametrize("order", list(permutations(("abort", "failed", "released"))))
def test_an_abort_may_cross_the_end_of_a_landing_in_any_order(order: tuple[str, ...]) -> None:
    world = one_sided()
    asked, _ = begun(world)
    world.d.connector.lose_sender(PREFILL)
    world.d.connector.fence(101)
    failed, released = world.d.inbox.take_all()
    abort = AbortAttempt(ROUTER, (asked.request.id,))
    for what in order:
        world.d.inbox.put({"abort": abort, "failed": failed, "released": released}[what])
    world.d.turn()
    assert (blocks(world).quarantined, blocks(world).receiving) == (0, 0)
    assert blocks(world).available == 24
    world.router.abort(asked)
    world.settle()
    world.check_closed()


def test_kv_that_landed_while_it_was_given_up_comes_free() -> None:
    world = one_sided()
    asked = ask_until_committed(world)
    while world.d.connector.landings:
        world.network.deliver(world.network.frames[0])
    (landed,) = world.d.inbox.take_all()
    assert isinstance(landed, Landed)
    for message in (AbortAttempt(ROUTER, (asked.request.id,)), landed):
        world.d.inbox.put(message)
    world.d.turn()
    assert (blocks(world).quarantined, blocks(world).available) == (0, 24)
    world.router.abort(asked)
    world.settle()
    world.check_closed()


def test_a_commit_that_does_not_fit_is_closed_and_needs_no_quarantine() -> None:
    world = one_sided()
    asked = ask_until_committed(world)
    commit = world.network.frames[-1]
    commit.commit = Commit(num_tokens=9, first_token_id=VOCAB_SIZE)
    while world.d.connector.landings:
        world.network.deliver(world.network.frames[0])
    world.d.turn()
    assert (blocks(world).quarantined, blocks(world).available) == (0, 24)
    world.messages_arrive()
    assert asked.outcomes == ["failed: handoff_failed"]


@pytest.mark.parametrize("node", [PREFILL, DECODE])
def test_a_release_of_nothing_changes_nothing(node: object) -> None:
    world = one_sided()
    finished = world.ask(9, max_tokens=6, ignore_eos=True)
    assert_finished(world, finished)
    asked, _ = given_up(world)
    running = world.ask(5, seed=2, max_tokens=8, ignore_eos=True)
    world.step_until(lambda: running.has_started, frames=True)
    assert blocks(world).quarantined == 0  # the sender has heard of it meanwhile
    target = world.p if node == PREFILL else world.d
    before = target.scheduler.pool.counts()
    for token in (UNKNOWN, 101, 102, 103):
        for _ in range(2):
            target.inbox.put(Released(token))
    for message in list(target.inbox.take_all()):
        assert list(target.flow.on_message(message, 0.0)) == []
    assert target.scheduler.pool.counts() == before
    world.router.abort(asked)
    assert_finished(world, running)


def test_a_second_release_does_not_free_the_next_owners_blocks() -> None:
    world = one_sided(num_blocks=5)
    asked, _ = given_up(world)
    world.d.connector.fence(101)
    follower = world.ask(12, seed=1, max_tokens=4, ignore_eos=True, may_wait=True)
    world.step_until(lambda: follower.ticket is not None, frames=False)
    world.d.inbox.put(Released(101))
    world.d.turn()
    assert blocks(world).receiving == 3
    world.router.abort(asked)
    assert_finished(world, follower)


def test_statistics_and_load_count_them_and_a_stop_does_not_wait_for_them() -> None:
    world = one_sided()
    asked, _ = given_up(world)
    assert world.d.flow.snapshot().statistics.scheduler.blocks.quarantined == 3
    assert world.d.flow.snapshot().load.num_quarantined_blocks == 3
    world.stop(world.d)
    world.router.abort(asked)
    world.settle()
    world.check_closed()


def test_a_node_whose_every_block_is_quarantined_serves_again_when_they_are_released() -> None:
    world = one_sided(num_blocks=4)
    asked, _ = given_up(world, 13)
    assert blocks(world).available == 0
    refused = world.ask(5, seed=1)
    waits = world.ask(5, seed=2, may_wait=True)
    world.network.frames = []
    world.settle()
    assert refused.outcomes == ["refused: overloaded"]
    assert waits.outcomes == []
    world.d.connector.fence(101)
    world.router.abort(asked)
    assert_finished(world, waits)
