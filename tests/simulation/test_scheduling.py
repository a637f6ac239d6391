"""Preemption, priority and full pools on a decode node: nobody fails, nobody is kept waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import Overloaded
from common.ids import Incarnation
from common.settings.config import SchedulingConfig
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.sequences.waiting_queue import WaitingQueue
from kv_transfer.contract import Ticket
from node.flow.messages import CallRefused, NodeStatistics, RoleChanged
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, World, assert_finished
from tests.support.engine.choices import MODES, ORDERS, REQUEUES

MANY = NodeSize(num_blocks=60, seats=8)
METHODS = ["none", "mtp"]


def scheduling(**knobs: Any) -> SchedulingConfig:
    """Without reservation, so that blocks run out."""
    return SchedulingConfig(**{"reservation_policy": "none", "retract_decode_steps": 0, **knobs})


def status(world: World, asked: Asked) -> SequenceStatus | None:
    attempt = world.d.flow.attempts.get(asked.request.id)
    return None if attempt is None else attempt.sequence.status


def ask(world: World, length: int = 9, **given: Any) -> Asked:
    return world.ask(length, **{"max_tokens": 16, "ignore_eos": True, "may_wait": True, **given})


@pytest.mark.covers("S39")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("requeue", REQUEUES)
def test_a_pool_too_small_changes_no_answer(
    method: str, mode: str, policy: str, requeue: str
) -> None:
    knobs = scheduling(preemption_policy=policy, preemption_mode=mode, requeue=requeue)
    decode = NodeSize(
        num_blocks=12, method=method, num_host_blocks=30, scheduling=knobs, caching=False
    )
    prefill = NodeSize(num_blocks=60, seats=8, method=method)
    world = World(prefill=prefill, decode=decode)
    asked = [ask(world, 5 + i, seed=i, priority=i % 3) for i in range(5)]
    assert_finished(world, *asked)
    statistics = world.d.scheduler.statistics()
    assert statistics.counters.preemptions["blocks"] > 0
    assert (statistics.counters.num_swapped_out > 0) is (mode == "swap")
    if mode == "recompute":
        assert statistics.counters.num_recomputed_tokens > 0
    assert world.d.flow.snapshot().load.num_preemptions == statistics.counters.num_preemptions


def test_a_more_important_request_takes_the_seat_of_a_decoding_one() -> None:
    knobs = scheduling(enable_priority_scheduling=True)
    world = World(prefill=MANY, decode=NodeSize(seats=2, scheduling=knobs))
    low = [ask(world, seed=i, max_tokens=40, priority=-5) for i in range(2)]
    world.step_until(lambda: all(len(a.tokens) > 4 for a in low))
    high = ask(world, seed=9, max_tokens=4, priority=5)
    world.step_until(lambda: high.is_done)
    assert high.outcomes == ["finished"]
    assert not any(a.is_done for a in low)
    assert world.d.scheduler.statistics().counters.preemptions["priority"] == 1
    assert_finished(world, high, *low)


def test_without_priority_scheduling_a_priority_changes_nothing() -> None:
    world = World(prefill=MANY, decode=NodeSize(seats=2, scheduling=scheduling()))
    low = [ask(world, seed=i, priority=-5) for i in range(2)]
    world.step_until(lambda: all(len(a.tokens) > 4 for a in low))
    high = ask(world, seed=9, max_tokens=4, priority=5)
    world.step_until(lambda: any(a.is_done for a in low))
    assert not high.tokens
    assert world.d.scheduler.statistics().counters.num_preemptions == 0
    assert_finished(world, high, *low)


@pytest.mark.parametrize(("is_enabled", "wanted"), [(True, [5, -5]), (False, [0, 0])])
def test_a_transfer_has_the_priority_of_its_request_where_priorities_count(
    is_enabled: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = scheduling(enable_priority_scheduling=is_enabled)
    world = World(prefill=NodeSize(num_blocks=60, seats=8, scheduling=knobs), decode=MANY)
    asked = [
        ask(world, seed=i, max_tokens=4, priority=priority) for i, priority in ((1, 5), (2, -5))
    ]
    priorities: list[int] = []
    open_transfer = world.p.connector.open

    def noted(ticket: Ticket, *, deadline_s: float, priority: int) -> None:
        priorities.append(priority)
        open_transfer(ticket, deadline_s=deadline_s)

    monkeypatch.setattr(world.p.connector, "open", noted)
    assert_finished(world, *asked)
    assert priorities == wanted


@pytest.mark.covers("F48", "F49", "S44")
def test_transfers_land_while_a_preempted_sequence_waits() -> None:
    world = World(prefill=MANY, decode=NodeSize(num_blocks=14, scheduling=scheduling()))
    early = [ask(world, seed=i, max_tokens=24) for i in range(2)]
    world.step_until(lambda: all(a.has_started for a in early))
    late = ask(world, seed=7, max_tokens=3)
    world.step_until(lambda: 0 in late.tokens, frames=False)
    assert status(world, late) is SequenceStatus.WAITING_FOR_KV
    world.step_until(
        lambda: any(status(world, a) is SequenceStatus.PREEMPTED for a in early), frames=False
    )
    world.network.deliver_all()
    world.d.turn()  # its KV is staged
    world.d.turn()
    assert status(world, late) is SequenceStatus.RUNNING_DECODE
    assert any(status(world, a) is SequenceStatus.PREEMPTED for a in early)
    assert_finished(world, late, *early)


@pytest.mark.covers("S49")
def test_a_full_node_refuses_at_once_and_says_what_is_free() -> None:
    # One turn, one answer; an idle node never refuses what fits its pool.
    world = World(prefill=MANY, decode=NodeSize(seats=1, num_blocks=24))
    first = ask(world, 80, max_tokens=8, may_wait=False)
    world.step_until(lambda: first.has_started)
    second = ask(world, 9, seed=1, may_wait=False)
    world.messages_arrive()
    world.d.turn()
    (answer,) = [answer for said in world.to_router for _, answer in said.answers]
    assert isinstance(answer, CallRefused)
    assert isinstance(answer.error, Overloaded)
    assert answer.free_seats == 0
    assert answer.free_blocks == world.d.scheduler.pool.num_available
    world.settle()
    assert second.outcomes == ["refused: overloaded"]
    assert first.outcomes == ["finished"]
    world.check_closed()


def test_what_would_end_too_late_is_refused_where_it_is_asked_for() -> None:
    # One seat, and a second for each step: five have left, and as many answers of eight tokens wait
    # for 40 s.
    outcomes = {}
    for sheds in (False, True):
        knobs = scheduling(shed=sheds)
        world = World(threshold=None, decode=NodeSize(seats=1, num_blocks=24, scheduling=knobs))
        early = [ask(world, seed=i, max_tokens=8, deadline_s=600.0) for i in range(10)]
        world.messages_arrive()
        for _ in range(36):
            world.d.turn()
            world.clock.advance(1.0)
        hasty = ask(world, seed=10, max_tokens=8, deadline_s=20.0)
        patient = ask(world, seed=11, max_tokens=8, deadline_s=600.0)
        world.messages_arrive()
        world.settle()
        assert all(one.outcomes == ["finished"] for one in (*early, patient))
        outcomes[sheds] = hasty.outcomes
        world.check_closed()
    assert outcomes == {False: ["finished"], True: ["refused: deadline_unreachable"]}


def test_how_fast_the_queue_of_an_earlier_role_was_says_nothing() -> None:
    size = NodeSize(seats=1, num_blocks=24, scheduling=scheduling(shed=True))
    world = World(threshold=None, decode=size)
    for i in range(10):
        ask(world, seed=i, max_tokens=8, deadline_s=600.0)
    world.messages_arrive()
    for _ in range(36):
        world.d.turn()
        world.clock.advance(1.0)
    world.to_nodes.append((DECODE, RoleChanged()))
    hasty = ask(world, seed=10, max_tokens=8, deadline_s=20.0)
    world.messages_arrive()
    world.settle()
    assert hasty.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.covers("F50", "S34")
def test_the_last_one_that_cannot_grow_ends_typed_and_the_node_goes_on() -> None:
    # 4 blocks of 4 hold 16 tokens. Nobody has to ask anything for the next one to be seated.
    size = NodeSize(num_blocks=4, seats=1, max_model_len=64, scheduling=scheduling())
    world = World(threshold=None, decode=size)
    long = ask(world, 9, max_tokens=30)
    short = ask(world, 5, seed=1, max_tokens=3)
    world.messages_arrive()
    while world.turn(world.d):
        pass
    assert not world.d.scheduler.waiting
    world.settle()
    assert long.outcomes == ["failed: pool_exhausted"]
    assert len(long.answer()) == 16 - 9 + 1
    assert short.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.covers("E65", "F99", "S25")
@pytest.mark.parametrize(("length", "is_taken"), [(15, True), (16, False), (30, False)])
def test_a_prompt_that_no_pool_state_can_seat_is_refused_at_arrival(
    length: int, is_taken: bool
) -> None:
    # 4 blocks of 4 hold 16 tokens, and the first token needs a slot behind the prompt.
    world = World(threshold=None, decode=NodeSize(num_blocks=4, max_model_len=64))
    asked = ask(world, length, max_tokens=1)
    world.settle()
    assert asked.outcomes == ["finished" if is_taken else "refused: invalid_request"]
    if not is_taken:
        assert f"the prompt has {length} tokens" in str(asked.error)
        assert "this node has 4" in str(asked.error)
    world.check_closed()


def test_a_node_that_comes_to_rest_leaves_the_last_numbers() -> None:
    # No time passes on this clock: what is shown is never the state before the last step.
    world = World(prefill=MANY, decode=MANY)
    published: dict[Incarnation, NodeStatistics] = {}
    for node in (world.p, world.d):
        show = lambda node=node: published.update({node.me: node.flow.snapshot().statistics})  # noqa: E731
        node.on_publish = show
    asked = [ask(world, seed=i) for i in range(3)]
    assert_finished(world, *asked)
    for node in (world.p, world.d):
        shown = published[node.me]
        assert shown.scheduler == node.scheduler.statistics()
        assert (shown.scheduler.num_running, shown.num_transfers) == (0, 0)
        assert shown.scheduler.counters.num_steps == node.num_steps > 0


def test_the_load_is_known_without_a_look_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten thousand who wait must not cost more than a hundred.
    world = World(threshold=None, decode=NodeSize(seats=1))
    for i in range(20):
        ask(world, 5 + i, name=f"r{i}")
    world.messages_arrive()
    world.d.turn()

    def look(queue: WaitingQueue) -> Iterator[Sequence]:
        raise AssertionError("somebody looks at everyone who waits")

    with monkeypatch.context() as patched:
        patched.setattr(WaitingQueue, "__iter__", look)
        load = world.d.flow.snapshot().load
    # The first one has its first token: one is left to compute. It takes the only seat.
    assert (load.num_running, load.num_waiting, load.free_seats) == (1, 19, 0)
    assert load.queued_tokens == 1 + sum(range(6, 25))
    world.settle()
    assert world.d.flow.snapshot().load.queued_tokens == 0
    world.check_closed()


def test_a_prefill_node_keeps_nothing_back_for_outputs() -> None:
    # Its sequences leave after token 0: three prompts of 3 blocks fit 9 blocks, all at once.
    roomy = NodeSize(num_blocks=600, seats=8)
    world = World(prefill=NodeSize(num_blocks=9, seats=3), decode=roomy)
    asked = [world.ask(11, seed=i, max_tokens=200, ignore_eos=True) for i in range(3)]
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    assert len(world.p.runner.batches[0]) == 3
    for one in asked:
        world.router.abort(one)
    world.settle()
    world.check_closed()
