"""What goes wrong with reservations, tickets and the nodes that hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.contract import Ticket
from tests.simulation.scripted_node import LEASE_S, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import (
    PREFILL,
    World,
    ask_until_committed,
    ask_until_reserved,
    assert_finished,
)
from tests.support.engine.build import make_request

# --- reservation ----------------------------------------------------------------------------------


@pytest.mark.covers("F02", "S45")
@pytest.mark.parametrize("moment", ["at once", "reserved", "landed"])
def test_asking_twice_is_the_same_reservation(moment: str) -> None:
    world = World()
    asked = world.ask(9, max_tokens=8, ignore_eos=True)
    if moment == "at once":
        world.router.send_reserve(asked)
    elif moment == "reserved":
        world.messages_arrive()
        world.d.turn()
        world.router.send_reserve(asked)
    else:
        world.step_until(lambda: asked.has_started)
        world.router.send_reserve(asked)
    world.messages_arrive()
    world.d.turn()
    assert world.d.flow.attempts.num_leases == (0 if moment == "landed" else 1)
    assert len(world.d.flow.attempts) == 1
    assert_finished(world, asked)
    assert world.router.num_unanswered == 0, "every call is answered"


@pytest.mark.covers("F02")
def test_a_question_that_comes_again_after_the_end_is_refused() -> None:
    world = World()
    asked = world.ask(9)
    assert_finished(world, asked)
    world.router.send_reserve(asked)
    world.router.send_prefill(asked)
    world.settle()
    world.check_closed()
    assert world.d.flow.attempts.num_leases == 0


def test_a_prompt_that_is_sent_twice_is_computed_once() -> None:
    world = World(prefill=NodeSize(budget=4))
    asked = ask_until_reserved(world)
    world.messages_arrive()
    world.router.send_prefill(asked)
    world.messages_arrive()
    world.p.turn()
    assert len(world.p.flow.attempts) == 1
    assert_finished(world, asked)
    assert world.p.num_steps == 3


@pytest.mark.covers("F03")
@pytest.mark.parametrize("is_noticed", [True, False])
def test_prefill_dies_before_its_first_chunk(is_noticed: bool) -> None:
    world = World()
    asked = ask_until_reserved(world, deadline_s=600.0)
    assert world.d.scheduler.pool.counts().receiving > 0
    world.kill(world.p, is_noticed=is_noticed)
    world.settle()
    if not is_noticed:
        assert not asked.is_done
        world.advance(LEASE_S)
        world.settle()
        assert asked.outcomes == ["failed: handoff_failed"]
    world.check_closed()


@pytest.mark.covers("F03")
@pytest.mark.parametrize("num_delivered", range(8))
@pytest.mark.parametrize("is_noticed", [True, False])
def test_prefill_dies_in_the_middle(is_noticed: bool, num_delivered: int) -> None:
    world = World()
    asked = ask_until_committed(world)
    for frame in world.network.frames[:num_delivered]:
        world.network.deliver(frame)
    world.kill(world.p, is_noticed=is_noticed)
    world.settle()
    world.advance(LEASE_S)
    world.settle()
    assert asked.is_done
    world.check_closed()


@pytest.mark.parametrize("num_delivered", [0, 1, 4, 7])
@pytest.mark.parametrize("is_noticed", [True, False])
def test_decode_dies_in_the_middle(is_noticed: bool, num_delivered: int) -> None:
    world = World()
    asked = ask_until_committed(world, deadline_s=5.0)
    for frame in world.network.frames[:num_delivered]:
        world.network.deliver(frame)
    world.kill(world.d, is_noticed=is_noticed)
    world.settle()
    assert world.p.scheduler.exporting or is_noticed
    world.advance(5.0)
    world.settle()
    assert asked.is_done
    world.check_closed()


@pytest.mark.covers("F11")
def test_a_reservation_without_a_seat_takes_no_block() -> None:
    world = World(decode=NodeSize(seats=1, num_blocks=100))
    first = world.ask(9, max_tokens=8, ignore_eos=True)
    world.step_until(lambda: first.has_started)
    held = world.d.scheduler.pool.counts()
    second = world.ask(9, seed=1)
    world.messages_arrive()
    world.d.flow.on_time(0.0)
    world.settle()
    assert second.outcomes == ["refused: overloaded"]
    assert held.receiving + held.reserved == 0
    assert_finished(world, first)


@pytest.mark.covers("F04", "F94", "F96")
def test_a_full_node_refuses_at_once_and_says_what_room_it_has() -> None:
    world = World(decode=NodeSize(num_blocks=6))
    first = world.ask(12, max_tokens=8, ignore_eos=True)
    world.step_until(lambda: first.has_started)
    steps = world.d.num_steps
    second = world.ask(12, seed=1)
    world.messages_arrive()
    world.d.turn()
    world.messages_arrive()
    assert second.outcomes == ["refused: overloaded"]
    assert "3 seats and 2 blocks are free, 0 wait" in str(second.error)
    assert world.d.num_steps <= steps + 1
    assert_finished(world, first)


@pytest.mark.covers("F96")
@pytest.mark.parametrize(
    ("size", "num_granted"),
    [(NodeSize(seats=4, num_blocks=100), 4), (NodeSize(seats=50, num_blocks=24), 5)],
)
def test_an_empty_node_grants_a_burst_only_what_it_has_room_for(
    size: NodeSize, num_granted: int
) -> None:
    """A node that joins is empty, so all routers choose it; no transfer queues for it."""
    world = World(decode=size)
    asked = [world.ask(9, seed=seed, max_tokens=8, ignore_eos=True) for seed in range(50)]
    world.messages_arrive()
    world.d.turn()
    world.messages_arrive()
    assert sum(one.ticket is not None for one in asked) == num_granted
    assert world.d.flow.attempts.num_leases == num_granted
    assert not world.d.scheduler.waiting
    world.settle()
    assert world.outcomes() == {"finished": num_granted, "refused: overloaded": 50 - num_granted}
    world.check_closed()


def test_requests_that_may_wait_are_answered_in_order_when_a_seat_frees() -> None:
    world = World(decode=NodeSize(seats=1))
    asked = [world.ask(5, seed=i, max_tokens=6, ignore_eos=True, may_wait=True) for i in range(4)]
    order: list[int] = []
    for _ in range(100):
        world.step()
        order += [i for i, one in enumerate(asked) if one.ticket is not None and i not in order]
        assert sum(one.ticket is not None and not one.is_done for one in asked) <= 1
    assert order == [0, 1, 2, 3]
    assert_finished(world, *asked)


@pytest.mark.covers("F94")
def test_the_queue_of_requests_that_may_wait_is_bounded() -> None:
    world = World(decode=NodeSize(seats=1, max_queued=2))
    asked = [world.ask(5, seed=i, max_tokens=6, ignore_eos=True, may_wait=True) for i in range(5)]
    world.settle()
    world.check_closed()
    refused = [one for one in asked if one.outcomes == ["refused: overloaded"]]
    # They come in one turn, so two find room in the queue.
    assert len(refused) == 3
    assert "requests wait on this node" in str(refused[0].error)


def test_a_waiting_reservation_is_refused_when_its_deadline_passes() -> None:
    world = World(decode=NodeSize(seats=1))
    first = world.ask(5, max_tokens=30, ignore_eos=True)
    world.step_until(lambda: first.has_started)
    second = world.ask(5, seed=1, may_wait=True, deadline_s=2.0)
    world.step()
    world.clock.advance(2.0)
    world.step()
    world.messages_arrive()
    assert second.outcomes == ["refused: deadline_exceeded"]
    assert_finished(world, first)


@pytest.mark.covers("F12")
@pytest.mark.parametrize("is_abort_first", [True, False])
def test_a_grant_that_arrives_after_the_request_was_given_up(is_abort_first: bool) -> None:
    world = World()
    asked = world.ask(9)
    world.messages_arrive()
    if is_abort_first:
        world.router.abort(asked)
    world.d.turn()
    assert world.d.connector.landings, "the reservation is held"
    if not is_abort_first:
        world.router.abort(asked)
    world.settle()
    assert asked.outcomes == ["aborted"]
    assert PREFILL not in asked.legs
    world.check_closed()


@pytest.mark.covers("F06", "S45")
def test_a_reservation_nobody_uses_expires() -> None:
    world = World()
    asked = ask_until_reserved(world)
    world.to_router.clear()
    world.advance(LEASE_S - 0.5)
    world.settle()
    assert world.d.connector.landings
    world.advance(0.5)
    world.settle()
    assert asked.outcomes == ["failed: handoff_failed"]
    world.check_closed()


@pytest.mark.covers("F84")
def test_a_lease_is_never_longer_than_the_request() -> None:
    world = World()
    asked = ask_until_reserved(world, deadline_s=3.0)
    world.messages_arrive()
    assert asked.ticket is not None
    assert asked.ticket.lease_s == 3.0
    assert_finished(world, asked)


# --- tickets --------------------------------------------------------------------------------------


def another_generation(ticket: Ticket) -> Ticket:
    return replace(ticket, generation=ticket.generation + 1)


def another_lease(ticket: Ticket) -> Ticket:
    return replace(ticket, lease_token=ticket.lease_token + 1000)


@pytest.mark.covers("F34")
@pytest.mark.parametrize("change", [another_generation, another_lease])
def test_frames_of_another_generation_or_lease_write_nothing(change: object) -> None:
    world = World()
    world.router.change_ticket = change  # type: ignore[assignment]
    asked = ask_until_committed(world)
    before = world.d.runner.kv_bytes.copy()
    world.network.deliver_all()
    assert (world.d.runner.kv_bytes == before).all()
    world.settle()
    assert asked.outcomes == ["failed: handoff_failed"]
    world.check_closed()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fingerprint": "another"}, "layout_mismatch"),
        ({"target_block_ids": (1, 2)}, "invalid_request"),
        ({"target_block_ids": (1, 2, 3, 4)}, "invalid_request"),
        ({"num_cached_tokens": 3}, "invalid_request"),
        ({"num_cached_tokens": 4}, "invalid_request"),
        ({"num_cached_tokens": 400}, "invalid_request"),
    ],
)
def test_prefill_refuses_a_ticket_that_does_not_fit_its_prompt(
    change: dict[str, object], code: str
) -> None:
    world = World()
    world.router.change_ticket = lambda ticket: replace(ticket, **change)  # type: ignore[arg-type]
    asked = world.ask(9)
    world.settle()
    assert asked.outcomes == [f"refused: {code}"]
    world.check_closed()
    assert world.p.num_steps == 0


def test_prefill_refuses_a_lease_that_another_attempt_uses() -> None:
    world = World(prefill=NodeSize(budget=4))
    first = world.ask(40)
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    world.router.change_ticket = lambda ticket: replace(ticket, lease_token=101)
    second = world.ask(12, seed=1)
    world.settle()
    assert second.outcomes == ["refused: invalid_request"]
    assert "0x65 is in use" in str(second.error)
    assert_finished(world, first)


@pytest.mark.covers("F52")
def test_an_acknowledgement_before_the_commit_fails_that_request_alone() -> None:
    # A lease that was landed on before, used again; decode says "landed" at once.
    world = World(prefill=NodeSize(budget=4))
    first = world.ask(5)
    world.settle()
    neighbour = world.ask(40, seed=2)
    world.step_until(lambda: world.p.num_steps == 3, frames=False)
    world.router.change_ticket = lambda ticket: replace(ticket, lease_token=101)
    second = world.ask(12, seed=1)
    world.settle()
    assert second.outcomes[0].startswith("failed: ")
    assert_finished(world, first, neighbour)


def test_prefill_refuses_to_draw_more_than_one_token_alone() -> None:
    world = World()
    asked = Asked(make_request(9, max_tokens=2))
    world.router.asked[asked.request.id] = asked
    world.router.send_prefill(asked)
    world.settle()
    assert asked.outcomes == ["refused: invalid_request"]
    world.check_closed()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (tuple(range(16)), "the prompt has 16 tokens: this node takes at most 15"),
        ((1, 997), "token id 997 is not in the vocabulary of 997"),
    ],
)
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_both_nodes_refuse_what_they_cannot_run(
    prompt: tuple[int, ...], words: str, max_tokens: int
) -> None:
    size = NodeSize(num_blocks=4)
    world = World(prefill=size, decode=size)
    asked = world.ask(prompt, max_tokens=max_tokens)
    world.settle()
    assert asked.outcomes == ["refused: invalid_request"]
    assert words in str(asked.error)
    world.check_closed()
