"""What goes wrong between two nodes. Each fault is seen to have happened, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.ids import Incarnation
from engine.core.sequences.status import SequenceStatus
from node.flow.messages import AbortAttempt, Drain
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import (
    DECODE,
    PREFILL,
    ROUTER,
    World,
    ask_until_committed,
    assert_finished,
    right_answer,
)

# --- transfer -------------------------------------------------------------------------------------


@pytest.mark.covers("F14", "F56")
def test_a_late_frame_does_not_reach_the_next_owner_of_its_block() -> None:
    world = World(decode=NodeSize(num_blocks=4, max_model_len=16))
    asked = ask_until_committed(world, 12)
    held, world.network.frames = world.network.frames, []
    world.router.abort(asked)
    world.messages_arrive()
    world.turn()
    follower = world.ask(12, seed=1, name="follower", max_tokens=3, ignore_eos=True)
    world.step_until(lambda: follower.ticket is not None, frames=False)
    assert asked.ticket is not None
    assert follower.ticket is not None
    assert set(asked.ticket.target_block_ids) & set(follower.ticket.target_block_ids)
    world.step_until(lambda: follower.has_started)
    world.network.frames += held
    assert_finished(world, follower)


@pytest.mark.covers("F38")
def test_decode_runs_ahead_of_the_first_token() -> None:
    world = World()
    asked = world.ask(9)
    world.step_until(lambda: asked.ticket is not None)
    late = []
    for _ in range(30):
        late += [item for item in world.to_router if item.node == PREFILL]
        world.to_router = [item for item in world.to_router if item.node != PREFILL]
        world.step()
    assert asked.tokens
    assert 0 not in asked.tokens
    world.to_router += late
    assert_finished(world, asked)


@pytest.mark.covers("F37")
@pytest.mark.parametrize("num_delivered", [1, 4, 7, 8])
def test_a_network_that_is_cut_ends_a_handoff_in_time_on_both_sides(num_delivered: int) -> None:
    world = World()
    asked = ask_until_committed(world, deadline_s=30.0, max_tokens=8, ignore_eos=True)
    for frame in world.network.frames[:num_delivered]:
        world.network.deliver(frame)
    world.network.cut(PREFILL, DECODE)
    for _ in range(30):
        world.step()
        world.advance(1.0)
    world.settle()
    world.check_closed()
    if num_delivered == 8:
        # Decode has the KV: prefill alone waits for a word, and not for ever.
        assert asked.outcomes == ["finished"]
    else:
        assert asked.outcomes[0] in ("failed: handoff_failed", "failed: deadline_exceeded")
        assert asked.answer() == right_answer(asked.request)[:1]


def test_prefill_that_hears_of_a_failure_after_decode_has_started_is_not_asked() -> None:
    world = World()
    asked = ask_until_committed(world, max_tokens=20, ignore_eos=True)
    while not any(f.kind == "landed" for f in world.network.frames):
        world.network.deliver(world.network.frames[0])
    world.step_until(lambda: asked.has_started, frames=False)
    world.p.connector.on_peer_lost(DECODE)
    assert_finished(world, asked)


def test_a_transfer_that_fails_after_token_0_is_a_typed_end() -> None:
    world = World()
    asked = ask_until_committed(world)
    world.p.connector.on_peer_lost(DECODE)
    world.network.deliver_all()
    world.p.turn()
    world.messages_arrive()
    assert asked.outcomes == ["failed: handoff_failed"]
    assert asked.answer() == right_answer(asked.request)[:1]
    world.settle()
    world.check_closed()


@pytest.mark.parametrize("leaving", [PREFILL, DECODE], ids=str)
def test_one_end_of_a_handoff_tells_the_router_and_the_other_does_not(
    leaving: Incarnation,
) -> None:
    world = World(prefill=NodeSize(budget=4))
    asked = world.ask(12)
    world.step_until(lambda: world.p.num_steps == 1)
    world.to_the_node(leaving, Drain(0.0))
    held = []
    for _ in range(20):
        held += [said for said in world.to_router if said.node == leaving]
        world.to_router = [said for said in world.to_router if said.node != leaving]
        world.step()
    assert [len(node.flow.attempts) for node in world.nodes.values()] == [0, 0]
    assert asked.outcomes == [], "the other end was heard first"
    world.to_router += held
    world.settle()
    assert asked.outcomes == ["failed: draining"]
    world.check_closed()


def test_a_transfer_that_fails_before_token_0_is_a_typed_end() -> None:
    world = World(prefill=NodeSize(budget=4))
    asked = world.ask(12)
    world.step_until(lambda: world.p.num_steps == 1, frames=False)
    world.network.deliver_all()
    world.p.connector.on_peer_lost(DECODE)
    world.settle()
    assert asked.outcomes == ["failed: handoff_failed"]
    assert asked.answer() == []
    world.check_closed()


@pytest.mark.covers("F04")
def test_a_landing_that_fails_is_a_typed_end_and_prefill_lets_go() -> None:
    world = World()
    asked = ask_until_committed(world)
    world.network.deliver(world.network.frames[0])
    world.d.connector.on_peer_lost(PREFILL)
    world.d.turn()
    world.settle()
    assert asked.outcomes == ["failed: handoff_failed"]
    world.advance(1.0)  # prefill connects again, and hears of it
    world.settle()
    world.check_closed()


# --- commit ---------------------------------------------------------------------------------------


@pytest.mark.covers("F34")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": 8}, "a prompt of 8 tokens has 2 blocks: the ticket has 3"),
        ({"num_tokens": 10}, "the commit is for 10 tokens, the reservation for 9"),
        ({"first_token_id": 997}, "first token is 997: the vocabulary has 997"),
        ({"first_token_id": -1}, "first token is -1"),
    ],
)
def test_a_commit_that_does_not_fit_the_reservation_fails_the_handoff(
    change: dict[str, int], words: str
) -> None:
    world = World()
    neighbour = world.ask(5, seed=3, max_tokens=40, ignore_eos=True)
    world.step_until(lambda: neighbour.has_started)
    asked = world.ask(9, max_tokens=8, ignore_eos=True)
    world.step_until(lambda: 0 in asked.tokens, frames=False)
    (frame,) = [f for f in world.network.frames if f.kind == "commit"]
    assert frame.commit is not None
    frame.commit = replace(frame.commit, **change)  # type: ignore[arg-type]
    outputs = []
    for _ in range(4):
        world.network.deliver_all()
        world.turn()
        outputs += [str(said.outputs) for said in world.to_router]
        world.messages_arrive()
    assert asked.outcomes == ["failed: handoff_failed"]
    assert any(words in output for output in outputs)
    assert asked.answer() == right_answer(asked.request)[:1]
    assert_finished(world, neighbour)


def test_a_commit_whose_token_ends_the_output_ends_it_on_decode_too() -> None:
    # The nodes may disagree on what ends an output: a client never waits for what will not come.
    world = World()
    asked = ask_until_committed(world)
    (frame,) = [f for f in world.network.frames if f.kind == "commit"]
    assert frame.commit is not None
    first = right_answer(asked.request)[0]
    asked_there = world.d.flow.attempts.get(asked.request.id)
    assert asked_there is not None
    asked_there.sequence.end_token_ids = frozenset((first,))
    world.settle()
    assert asked.outcomes == ["finished"]
    assert asked.answer() == [first]
    for node in world.nodes.values():
        assert len(node.flow.attempts) == 0


@pytest.mark.covers("F45")
def test_of_two_attempts_only_the_second_commits() -> None:
    world = World()
    first = ask_until_committed(world, name="same", attempt=1)
    held, world.network.frames = world.network.frames, []
    world.router.abort(first)
    second = world.ask(9, name="same", attempt=2)
    world.step_until(lambda: second.ticket is not None, frames=False)
    assert first.ticket is not None
    assert second.ticket is not None
    assert second.ticket.generation > first.ticket.generation
    world.network.frames = [*held, *world.network.frames]
    assert_finished(world, second)
    assert first.outcomes == ["aborted"]


@pytest.mark.covers("F45", "F86")
@pytest.mark.parametrize("is_first_faster", [True, False])
def test_two_attempts_alive_at_once_do_not_disturb_each_other(is_first_faster: bool) -> None:
    world = World()
    asked = [world.ask(9, name="same", attempt=n) for n in (1, 2)]
    world.step_until(lambda: all(0 in one.tokens for one in asked), frames=False)
    tokens = [one.ticket.lease_token for one in asked if one.ticket]
    world.network.frames.sort(
        key=lambda f: tokens.index(f.lease_token), reverse=not is_first_faster
    )
    assert_finished(world, *asked)


@pytest.mark.covers("F62")
def test_an_abort_is_legal_at_every_frame_of_a_transfer() -> None:
    reference = World()
    ask_until_committed(reference)
    num_frames = len(reference.network.frames)
    assert num_frames == 8
    for node in (PREFILL, DECODE):
        for delivered in range(num_frames + 1):
            world = World()
            asked = ask_until_committed(world)
            for frame in world.network.frames[:delivered]:
                world.network.deliver(frame)
            world.to_the_node(node, AbortAttempt(ROUTER, (asked.request.id,)))
            world.turn()
            attempt = world.p.flow.attempts.get(asked.request.id)
            assert attempt is None or attempt.sequence.status is SequenceStatus.EXPORTING
            world.settle()
            world.router.abort(asked)
            world.settle()
            world.check_closed()
