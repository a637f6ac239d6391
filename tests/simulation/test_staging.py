"""KV that is copied beside the steps: nothing reads it early, nothing reuses its blocks early."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.ids import AttemptId
from common.settings.config import SchedulingConfig
from engine.core.blocks.block_pool import BlockUse
from engine.core.sequences.status import SequenceStatus
from node.flow.messages import AbortAttempt
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, ROUTER, World, ask_until_committed
from tests.support.examples import everyday

NEVER = 1_000_000
SWAPPING = SchedulingConfig(
    preemption_mode="swap",
    reservation_policy="none",
    retract_decode_steps=0,
    min_progress_tokens=0,
)
"""Decodes run out of blocks, and are preempted for it."""


def ask_until_landed(world: World, length: int = 9, **given: object) -> Asked:
    """A request whose KV has landed; its copy ends when `finish_copies` lets it."""
    world.d.runner.num_copy_polls = NEVER
    asked = ask_until_committed(world, length, **given)
    world.step_until(lambda: bool(world.d.runner.copies))
    return asked


def finish_copies(world: World) -> None:
    world.d.runner.num_copy_polls = 0


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
    world.to_the_node(DECODE, AbortAttempt(ROUTER, (asked.request.id,)))
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


@pytest.mark.parametrize("seed", range(everyday(10, of=40)))
def test_copies_that_take_any_time_change_no_answer(seed: int) -> None:
    choose = random.Random(seed)
    world = World(decode=NodeSize(num_blocks=choose.choice([10, 24]), seats=3, max_model_len=32))
    aborted: list[AttemptId] = []
    for number in range(12):
        asked = world.ask(
            choose.randint(2, 20), max_tokens=choose.randint(2, 8), may_wait=True, seed=number
        )
        for _ in range(choose.randint(0, 4)):
            world.d.runner.num_copy_polls = choose.choice([0, 1, 5, 9])
            world.step()
        if choose.random() < 0.3:
            world.router.abort(asked)
            aborted.append(asked.request.id)
    finish_copies(world)
    world.settle()
    world.check_closed()
    assert world.outcomes()["finished"] == 12 - world.outcomes()["aborted"]
    assert world.outcomes()["aborted"] <= len(aborted)


@pytest.mark.parametrize("seed", range(everyday(6, of=20)))
def test_swapped_kv_is_copied_beside_the_steps_and_changes_no_answer(seed: int) -> None:
    """Copies take any time and may fail; requests are aborted meanwhile."""
    choose = random.Random(seed)
    world = World(
        threshold=choose.choice([None, 0]),
        decode=NodeSize(
            num_blocks=choose.randint(8, 11),
            seats=4,
            max_model_len=28,
            caching=choose.random() < 0.5,
            num_host_blocks=choose.choice([5, 40]),
            keeps_prefixes=seed % 3 > 0,
            scheduling=SWAPPING,
        ),
        is_async=bool(seed % 2),
    )
    runner = world.d.runner
    for number in range(10):
        runner.num_copy_polls = choose.choice([0, 1, 4, 9])
        asked = world.ask(
            choose.randint(6, 16), max_tokens=12, ignore_eos=True, may_wait=True, seed=number
        )
        for _ in range(choose.randint(0, 4)):
            world.step()
        runner.fail_next_copy = choose.random() < 0.3
        if choose.random() < 0.2:
            world.router.abort(asked)
    runner.num_copy_polls = 0
    world.settle()
    world.check_closed()
    assert world.d.scheduler.statistics().counters.num_preemptions > 0
    outcomes = world.outcomes()
    assert set(outcomes) <= {"finished", "aborted", "failed: internal_error"}
    assert outcomes["finished"] >= 3


def ask_with_a_cached_prefix(world: World, **given: object) -> Asked:
    """The prefill node has computed the first blocks of the prompt, the decode node has not."""
    world.ask(16, max_tokens=2, ignore_eos=True, name="first")
    world.settle()
    cached = world.d.scheduler.pool
    cached.release(cached.allocate(cached.num_available, BlockUse.RUNNING))
    world.p.runner.num_copy_polls = NEVER
    world.p.runner.kv_bytes[:] = 0
    asked = world.ask(16, max_tokens=4, ignore_eos=True, name="second", **given)
    world.step_until(lambda: 0 in asked.tokens)
    assert len(world.p.runner.copies) == 1
    return asked


def transfer_of(world: World) -> Any:
    [transfer] = world.p.connector.transfers.values()
    return transfer


def test_a_cached_prefix_is_pushed_and_committed_when_it_is_copied_out() -> None:
    world = World()
    asked = ask_with_a_cached_prefix(world)
    for _ in range(5):
        world.step()
    assert {layer for layer, _ in transfer_of(world).pieces} == {0, 1}
    num_pushed = len(transfer_of(world).pieces)
    assert asked.outcomes == []
    world.p.runner.num_copy_polls = 0
    world.p.turn()
    assert len(transfer_of(world).pieces) > num_pushed
    world.settle()
    assert asked.outcomes == ["finished"]
    world.check_closed()


def test_blocks_of_an_aborted_transfer_are_held_until_their_copy_has_ended() -> None:
    world = World()
    asked = ask_with_a_cached_prefix(world)
    world.router.abort(asked)
    for _ in range(5):
        world.step()
    assert not world.p.connector.transfers
    assert world.p.scheduler.exporting
    world.p.runner.num_copy_polls = 0
    world.settle()
    assert not world.p.scheduler.exporting
    assert asked.outcomes == ["aborted"]
    world.check_closed()


def test_a_prefix_that_cannot_be_copied_out_fails_its_request_alone() -> None:
    world = World()
    world.p.runner.fail_next_copy = True
    asked = ask_with_a_cached_prefix(world)
    world.p.runner.num_copy_polls = 0
    world.settle()
    assert asked.outcomes == ["failed: internal_error"]
    world.check_closed()


def test_a_landing_that_cannot_be_copied_in_fails_its_request_alone() -> None:
    world = World()
    asked = ask_until_committed(world, 9)
    world.d.runner.fail_next_copy = True
    world.settle()
    assert asked.outcomes == ["failed: internal_error"]
    assert world.d.scheduler.pool.counts().quarantined == 0
    world.check_closed()


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the stop"])
def test_a_node_that_stops_releases_what_copies_hold(is_late: bool) -> None:
    world = World()
    ask_until_landed(world)
    if not is_late:
        finish_copies(world)
    world.stop(world.d)
    finish_copies(world)
    for _ in range(3):
        world.d.turn()
    assert world.d.flow.is_empty
    assert world.d.scheduler.pool.counts().available == world.d.scheduler.pool.num_blocks
