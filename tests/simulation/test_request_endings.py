"""Abort, deadline, lost router, node stop and failed steps, in every state on both nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.settings.config import SchedulingConfig
from engine.core.sequences.status import SequenceStatus
from node.flow.messages import AbortAttempt, RouterGone
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, right_answer

DEADLINE_S = 5.0
BY_PRIORITY = SchedulingConfig(enable_priority_scheduling=True)


def make_world() -> World:
    return World(
        threshold=4,
        prefill=NodeSize(budget=8, seats=1),
        decode=NodeSize(budget=8, seats=2, scheduling=BY_PRIORITY),
    )


def ask(world: World, length: int = 20, **given: object) -> Asked:
    return world.ask(
        length, max_tokens=12, ignore_eos=True, deadline_s=DEADLINE_S, may_wait=True, **given
    )


def status(world: World, asked: Asked, node: str) -> SequenceStatus | None:
    flow = world.p.flow if node == "p" else world.d.flow
    attempt = flow.attempts.get(asked.request.id)
    return None if attempt is None else attempt.sequence.status


# --- how far a request got ------------------------------------------------------------------------


def just_sent(world: World) -> Asked:
    return ask(world)


def waiting_for_a_seat_on_decode(world: World) -> Asked:
    for seed in (1, 2):
        world.ask(4, seed=seed, max_tokens=40, ignore_eos=True, name=f"busy{seed}")
    world.step()
    world.step()
    asked = ask(world)
    world.step()
    assert status(world, asked, "d") is SequenceStatus.WAITING
    return asked


def reserved(world: World) -> Asked:
    asked = ask(world)
    world.messages_arrive()
    world.d.turn()
    assert status(world, asked, "d") is SequenceStatus.WAITING_FOR_KV
    return asked


def waiting_on_prefill(world: World) -> Asked:
    world.ask(40, seed=5, max_tokens=1, name="busy")
    asked = ask(world)
    world.step_until(lambda: status(world, asked, "p") is not None, frames=False)
    assert status(world, asked, "p") is SequenceStatus.WAITING
    return asked


def prefilling(world: World) -> Asked:
    asked = ask(world)
    world.step_until(
        lambda: status(world, asked, "p") is SequenceStatus.RUNNING_PREFILL, frames=False
    )
    return asked


def prefilling_with_frames_landed(world: World) -> Asked:
    asked = ask(world)
    world.step_until(lambda: len(world.d.connector.landings) == 1 and world.p.num_steps == 1)
    world.network.deliver_all()
    assert status(world, asked, "p") is SequenceStatus.RUNNING_PREFILL
    return asked


def exporting(world: World) -> Asked:
    asked = ask(world)
    world.step_until(lambda: status(world, asked, "p") is SequenceStatus.EXPORTING, frames=False)
    return asked


def landed_but_not_read(world: World) -> Asked:
    asked = exporting(world)
    world.network.deliver_all()
    assert status(world, asked, "d") is SequenceStatus.WAITING_FOR_KV
    assert not world.d.connector.landings
    return asked


def landed_but_not_staged(world: World) -> Asked:
    world.d.runner.num_copy_polls = 4
    asked = landed_but_not_read(world)
    world.d.turn()
    assert status(world, asked, "d") is SequenceStatus.WAITING_FOR_KV
    assert world.d.runner.copies
    return asked


def decoding(world: World) -> Asked:
    asked = ask(world)
    world.step_until(lambda: len(asked.tokens) == 3)
    assert status(world, asked, "d") is SequenceStatus.RUNNING_DECODE
    return asked


def computing_locally(world: World) -> Asked:
    world.router.prefill = None
    asked = ask(world)
    world.step_until(lambda: world.d.num_steps == 1)
    assert status(world, asked, "d") is SequenceStatus.RUNNING_PREFILL
    return asked


def preempted(world: World) -> Asked:
    asked = decoding(world)
    for seed in (1, 2):
        name = f"important{seed}"
        world.ask(4, seed=seed, max_tokens=16, ignore_eos=True, priority=5, name=name)
    world.step_until(lambda: status(world, asked, "d") is SequenceStatus.PREEMPTED)
    assert world.d.scheduler.statistics().counters.preemptions["priority"] == 1
    return asked


def finished_but_not_told(world: World) -> Asked:
    asked = ask(world)
    world.step_until(lambda: len(asked.tokens) >= 2)
    while status(world, asked, "d") is not None:
        world.d.turn()
    assert not asked.is_done
    return asked


def finished(world: World) -> Asked:
    asked = ask(world)
    world.settle()
    assert asked.outcomes == ["finished"]
    return asked


STATES = [
    just_sent,
    waiting_for_a_seat_on_decode,
    reserved,
    waiting_on_prefill,
    prefilling,
    prefilling_with_frames_landed,
    exporting,
    landed_but_not_read,
    landed_but_not_staged,
    decoding,
    computing_locally,
    preempted,
    finished_but_not_told,
    finished,
]
Reach = Callable[[World], Asked]
each_state = pytest.mark.parametrize("reach", STATES)


@each_state
def test_nothing_at_all_goes_wrong_from_there(reach: Reach) -> None:
    # The negative control of this file: in each of these states a request is on its way.
    world = make_world()
    asked = reach(world)
    world.settle()
    world.check_closed()
    assert asked.outcomes == ["finished"]
    assert asked.answer() == right_answer(asked.request)


@pytest.mark.covers("F55", "F56", "F58", "F59")
@each_state
def test_an_abort_ends_it_on_both_nodes(reach: Reach) -> None:
    world = make_world()
    asked = reach(world)
    was_done = asked.is_done
    world.router.abort(asked)
    world.settle()
    world.check_closed()
    assert asked.outcomes == (["finished"] if was_done else ["aborted"])


@pytest.mark.covers("F55")
@each_state
def test_an_abort_is_done_within_one_turn(reach: Reach) -> None:
    # No seat and no target block is held for it any more once the node has read the abort.
    world = make_world()
    asked = reach(world)
    attempts = {
        node: world.nodes[node].flow.attempts.get(asked.request.id) for node in (PREFILL, DECODE)
    }
    for node in (PREFILL, DECODE):
        world.to_the_node(node, AbortAttempt(ROUTER, (asked.request.id,)))
        world.nodes[node].turn()
    p, d = attempts[PREFILL], attempts[DECODE]
    assert world.d.flow.attempts.get(asked.request.id) is None
    if d is not None:
        assert d.sequence.status is SequenceStatus.FINISHED
    if p is not None:
        assert p.sequence.status in (SequenceStatus.EXPORTING, SequenceStatus.FINISHED)
    asked.outcomes = asked.outcomes or ["aborted"]
    world.settle()
    world.check_closed()


@pytest.mark.covers("F57")
@each_state
@pytest.mark.parametrize("first", ["p", "d"])
def test_an_abort_that_reaches_one_node_alone_ends_both(reach: Reach, first: str) -> None:
    # Each end of a handoff tells the other.
    world = make_world()
    asked = reach(world)
    node = PREFILL if first == "p" else DECODE
    world.to_the_node(node, AbortAttempt(ROUTER, (asked.request.id,)))
    world.settle()
    if not asked.is_done:
        # The other leg may run on, or had not been asked yet: the deadline ends what is left.
        world.advance(DEADLINE_S + 1)
        world.settle()
        if not asked.is_done:
            world.router.abort(asked)
            world.settle()
    world.check_closed()


@pytest.mark.covers("F06", "F83")
@each_state
def test_a_lost_router_ends_everything_it_asked_for(reach: Reach) -> None:
    world = make_world()
    asked = reach(world)
    was_done = asked.is_done
    world.to_nodes = []
    for node in (PREFILL, DECODE):
        world.to_the_node(node, RouterGone(ROUTER))
    world.to_router = []
    for one in world.router.asked.values():
        one.outcomes = one.outcomes or ["the router is gone"]
    world.settle()
    world.check_closed()
    assert asked.outcomes == (["finished"] if was_done else ["the router is gone"])


@each_state
def test_a_passed_deadline_is_a_typed_end_on_both_nodes(reach: Reach) -> None:
    world = make_world()
    asked = reach(world)
    was_told = asked.is_done or reach is finished_but_not_told
    world.messages_arrive()
    # The nodes look at the clock first; the connectors, with deadlines of their own, come later.
    world.clock.advance(DEADLINE_S)
    world.step(frames=False)
    for node in world.nodes.values():
        attempt = node.flow.attempts.get(asked.request.id)
        assert attempt is None or attempt.is_over or attempt.deadline_at_s > world.clock.now_s()
    world.settle()
    if reach is just_sent:
        # Its deadline begins where it arrives; nothing was late there.
        assert asked.outcomes == ["finished"]
    elif was_told:
        assert asked.outcomes == ["finished"]
    else:
        assert asked.outcomes[0] in ("failed: deadline_exceeded", "refused: deadline_exceeded")
    world.check_closed()


@each_state
@pytest.mark.parametrize("which", ["p", "d"])
def test_a_node_that_stops_tells_everybody(reach: Reach, which: str) -> None:
    world = make_world()
    asked = reach(world)
    node = world.p if which == "p" else world.d
    world.stop(node)
    world.settle()
    if not asked.is_done:
        world.router.abort(asked)
    for other in world.router.asked.values():
        world.router.abort(other)
    world.settle()
    world.check_closed()
    assert asked.outcomes[0].split(":")[0] in ("finished", "failed", "refused", "aborted")


def test_a_stopping_decode_node_says_so_in_the_stream() -> None:
    world = make_world()
    asked = decoding(world)
    world.stop(world.d)
    world.settle()
    assert asked.outcomes == ["failed: node_lost"]
    world.check_closed()


@pytest.mark.covers("F36")
@each_state
@pytest.mark.parametrize("which", ["p", "d"])
def test_a_failing_step_ends_only_what_was_in_it(reach: Reach, which: str) -> None:
    world = make_world()
    asked = reach(world)
    node = world.p if which == "p" else world.d
    node.runner.fail_next_step = True
    world.settle()
    world.check_closed()
    failures = [o for o in world.outcomes().elements() if o != "finished"]
    assert all(failure == "failed: internal_error" for failure in failures)
    assert bool(failures) is not node.runner.fail_next_step
    assert asked.is_done


# --- orders of abort and others -------------------------------------------------------------------


@pytest.mark.covers("F12", "F59")
@pytest.mark.parametrize("node", [PREFILL, DECODE])
def test_an_abort_that_overtakes_its_request_refuses_it(node: object) -> None:
    # A tombstone, so that nothing is held for somebody who left.
    world = make_world()
    asked = reserved(world) if node == PREFILL else just_sent(world)
    world.messages_arrive()
    world.router.abort(asked)
    world.to_nodes.reverse()
    world.settle()
    world.check_closed()


@pytest.mark.covers("F12")
def test_a_request_that_arrives_after_its_abort_is_refused_by_name() -> None:
    world = make_world()
    asked = just_sent(world)
    world.to_the_node(DECODE, AbortAttempt(ROUTER, (asked.request.id,)))
    world.settle()
    assert asked.outcomes == ["refused: invalid_request"]
    assert "is over" in str(asked.error)
    world.check_closed()


@pytest.mark.covers("F53", "F60")
@pytest.mark.parametrize("is_abort_first", [True, False])
def test_abort_and_the_last_step_in_both_orders(is_abort_first: bool) -> None:
    # Blocks are freed once.
    world = make_world()
    asked = ask(world)
    attempt = None
    while attempt is None or attempt.sequence.num_output < attempt.sequence.max_new_tokens - 1:
        world.step()
        attempt = world.d.flow.attempts.get(asked.request.id)
    abort = AbortAttempt(ROUTER, (asked.request.id,))
    if is_abort_first:
        world.to_the_node(DECODE, abort)
        world.d.turn()
    else:
        world.d.turn()
        world.to_the_node(DECODE, abort)
    world.to_the_node(DECODE, abort)
    world.settle()
    assert world.d.flow.attempts.get(asked.request.id) is None
    if is_abort_first:
        world.router.abort(asked)
        world.settle()
    else:
        assert asked.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.covers("F56")
@pytest.mark.parametrize("is_abort_first", [True, False])
def test_abort_and_landing_in_both_orders(is_abort_first: bool) -> None:
    world = make_world()
    asked = exporting(world)
    abort = AbortAttempt(ROUTER, (asked.request.id,))
    if is_abort_first:
        world.to_the_node(DECODE, abort)
        world.network.deliver_all()
    else:
        world.network.deliver_all()
        world.to_the_node(DECODE, abort)
    world.router.abort(asked)
    world.settle()
    world.check_closed()


def test_an_abort_by_another_router_changes_nothing() -> None:
    world = make_world()
    asked = decoding(world)
    other = type(ROUTER)("another", 1)
    world.to_the_node(DECODE, AbortAttempt(other, (asked.request.id,)))
    world.to_the_node(DECODE, RouterGone(other))
    world.settle()
    assert asked.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.covers("F61")
def test_the_next_request_on_the_blocks_of_an_aborted_one_is_answered_right() -> None:
    world = World(prefill=NodeSize(num_blocks=6, budget=8), decode=NodeSize(num_blocks=8))
    asked = world.ask(20, seed=1, max_tokens=6)
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    world.router.abort(asked)
    follower = world.ask(20, seed=2, max_tokens=6, may_wait=True)
    world.settle()
    world.check_closed()
    assert follower.outcomes == ["finished"]
