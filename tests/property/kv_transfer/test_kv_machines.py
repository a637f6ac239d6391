"""A handoff between the two machines: right, or failed typed, whatever the network does."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.contract import Landed, LandingFailed, Released, TransferEnded
from kv_transfer.shared.limits import MAX_REPEATS_PER_PIECE
from kv_transfer.wire import frames
from tests.property.kv_transfer.machine_world import (
    COMMIT,
    NUM_BLOCKS,
    SOURCES,
    TICKET,
    TOKEN,
    World,
)
from tests.support.examples import everyday

PUSHES = st.permutations([(layer, o) for layer in range(3) for o in range(NUM_BLOCKS)])
STEPS = st.lists(
    st.one_of(
        st.sampled_from(["push", "push", "receive", "receive", "answer", "tick", "commit", "nic"]),
        st.sampled_from(["abort", "revoke"]),
        st.tuples(st.just("cut"), st.integers(0, 6)),
    ),
    max_size=80,
)


@pytest.mark.covers("F14", "F16", "F23", "F28", "F37", "F56")
@pytest.mark.parametrize(
    ("lane", "verify"),
    [("zmq", "block"), ("zmq", "commit"), ("zmq", "off"), ("rdma", "off"), ("rdma", "commit")],
)
@settings(max_examples=everyday(25, of=80), deadline=None)
@given(PUSHES, STEPS, st.booleans())
def test_a_handoff_is_right_or_fails_typed_whatever_the_network_does(
    lane: str, verify: str, pushes: list[tuple[int, int]], steps: list[object], may_give_up: bool
) -> None:
    """One outcome on each side, equal bytes, nothing left behind."""
    world = World(lane, verify)
    world.expect()
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    left = list(pushes)
    has_committed = has_given_up = False

    def push() -> None:
        if left and not has_committed:
            layer, ordinal = left.pop()
            world.do(world.sender.on_push(TOKEN, layer, [ordinal], [SOURCES[ordinal]]))

    for step in steps:
        match step:
            case "push":
                push()
            case "receive":
                world.deliver_to_receiver()
            case "answer":
                world.deliver_to_sender()
            case "tick":
                world.tick(0.05)
            case "nic":
                world.nic()
            case "commit" if not left and not has_committed:
                has_committed = True
                world.do(world.sender.on_commit(TOKEN, COMMIT))
            case "abort" if may_give_up:
                has_given_up = True
                world.do(world.sender.on_abort(TOKEN, world.now_s))
            case "revoke" if may_give_up:
                has_given_up = world.is_revoked = True
                world.do(world.receiver.on_revoke(TOKEN))
            case ("cut", int(survivors)):
                # A one-sided writer that lost its connection cannot be followed: typed failure.
                has_given_up |= world.is_one_sided
                world.cut(survivors)
    while left:
        push()
    if not has_committed:
        world.do(world.sender.on_commit(TOKEN, COMMIT))
    world.settle()

    ended = [event for event in world.events if isinstance(event, TransferEnded)]
    landed = [event for event in world.events if isinstance(event, Landed)]
    failed = [event for event in world.events if isinstance(event, LandingFailed)]
    released = [event for event in world.events if isinstance(event, Released)]
    assert len(ended) == 1
    assert len(landed) + len(failed) == 1 or (world.is_revoked and not failed)
    assert len(landed) + len(released) == 1
    if ended[0].error is None or not has_given_up:
        # Cuts alone never cost the handoff: they are shorter than the silence that would.
        assert landed == [Landed(TOKEN, COMMIT)]
        assert ended[0].error is None
    if landed:
        assert world.target == {
            (layer, TICKET.target_block_ids[o]): world.source[layer, SOURCES[o]]
            for layer in range(3)
            for o in range(NUM_BLOCKS)
        }
    assert world.is_over


@pytest.mark.covers("F24")
@pytest.mark.parametrize("lane", ["zmq", "rdma"])
@settings(max_examples=everyday(25, of=80), deadline=None)
@given(PUSHES, STEPS, st.lists(st.integers(0, 4), max_size=30))
def test_damaged_pieces_come_again_and_no_wrong_byte_lands(
    lane: str, pushes: list[tuple[int, int]], steps: list[object], damage: list[int]
) -> None:
    """Few damaged pieces cost nothing, many cost the handoff, and none of them lands."""
    world = World(lane, "block")
    world.damage_next = damage
    num_damaged = len(damage)
    world.expect()
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    has_cut = False
    left = list(pushes)
    for step in [*steps, *["push"] * len(left)]:
        match step:
            case "push" if left:
                layer, ordinal = left.pop()
                world.do(world.sender.on_push(TOKEN, layer, [ordinal], [SOURCES[ordinal]]))
            case "receive":
                world.deliver_to_receiver()
            case "answer":
                world.deliver_to_sender()
            case "nic":
                world.nic()
            case ("cut", int(survivors)):
                has_cut |= world.is_one_sided
                world.cut(survivors)
    while left:
        layer, ordinal = left.pop()
        world.do(world.sender.on_push(TOKEN, layer, [ordinal], [SOURCES[ordinal]]))
    world.do(world.sender.on_commit(TOKEN, COMMIT))
    world.settle()
    landed = [event for event in world.events if isinstance(event, Landed)]
    if num_damaged <= MAX_REPEATS_PER_PIECE and not has_cut:
        assert landed == [Landed(TOKEN, COMMIT)]
    if landed:
        assert world.target == {
            (layer, TICKET.target_block_ids[o]): world.source[layer, SOURCES[o]]
            for layer in range(3)
            for o in range(NUM_BLOCKS)
        }
    assert world.is_over


@settings(max_examples=everyday(20, of=60), deadline=None)
@given(PUSHES, st.integers(0, 30), st.integers(0, 2), st.sampled_from(SOURCES))
def test_a_source_that_changes_under_a_frame_never_lands(
    pushes: list[tuple[int, int]], delivered: int, layer: int, block: int
) -> None:
    """A frame is checked against what was true when it left, so a late read cannot land."""
    world = World()
    world.expect()
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    world.deliver_to_receiver()
    world.deliver_to_sender()
    for layer_pushed, ordinal in pushes:
        world.do(world.sender.on_push(TOKEN, layer_pushed, [ordinal], [SOURCES[ordinal]]))
    world.do(world.sender.on_commit(TOKEN, COMMIT))
    for _ in range(delivered):
        world.deliver_to_receiver()
    in_flight = {
        (message.frame.layer, source)
        for _, message in world.to_receiver
        if isinstance(message.frame, frames.Data)
        for source in message.blocks
    }
    world.source[layer, block] = 777
    world.settle()
    landed = [event for event in world.events if isinstance(event, Landed)]
    if (layer, block) in in_flight:
        assert not landed
    else:
        assert landed


@pytest.mark.covers("F14", "F15")
@settings(max_examples=everyday(30, of=100), deadline=None)
@given(PUSHES, STEPS, st.sampled_from(["abort", "revoke", "cut", "expire"]))
def test_writes_that_come_when_all_is_over_change_nothing(
    pushes: list[tuple[int, int]], steps: list[object], ending: str
) -> None:
    """The network keeps a sender's writes for ever, and lets them go in the end."""
    world = World("rdma", "off")
    world.expect()
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    left = list(pushes)
    for step in steps:
        match step:
            case "push" if left:
                layer, ordinal = left.pop()
                world.do(world.sender.on_push(TOKEN, layer, [ordinal], [SOURCES[ordinal]]))
            case "receive":
                world.deliver_to_receiver()
            case "answer":
                world.deliver_to_sender()
            case "tick":
                world.tick(0.05)
    match ending:
        case "abort":
            world.do(world.sender.on_abort(TOKEN, world.now_s))
        case "revoke":
            world.do(world.receiver.on_revoke(TOKEN))
        case "cut":
            world.cut(0)
        case _:
            world.tick(60.0)
    world.settle(is_nic_stuck=True)
    another = dataclasses.replace(TICKET, lease_token=TOKEN + 1)
    world.expect(another)
    num_posted = len(world.posted)
    target = dict(world.target)
    for _ in range(num_posted):
        world.nic()
    assert world.target == target
    assert not any(isinstance(event, Landed) for event in world.events)
