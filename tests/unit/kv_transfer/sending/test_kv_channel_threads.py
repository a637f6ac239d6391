"""The connections of a link on the sender's side: their frames, their greetings, their silence."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import PeerProtocolError
from kv_transfer.sending.channels import Channel, Channels, InFlight
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    SayHello,
    SenderEffect,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer import Source, Transfer
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    LAYOUT,
    LIMITS,
    ME,
    PEER,
    WELCOME,
    chunks,
    push,
    ticket,
)

SECOND = Peer(PEER.endpoint, PEER.incarnation, channel=1)
WITH_TWO = dataclasses.replace(LIMITS, max_channels=2)


def flight(ordinal: int) -> InFlight:
    source = Source(10, LIMITS.blocks_per_chunk(LAYOUT))
    transfer = Transfer(ticket(), source, deadline_at_s=9.0, now_s=0.0)
    blocks = as_blocks([ordinal])
    return InFlight(transfer, LayerChunk(0, blocks, blocks), 10)


def test_frames_are_acknowledged_in_the_order_in_which_they_were_sent() -> None:
    channel = Channel(PEER)
    flights = [flight(ordinal) for ordinal in range(3)]
    assert [channel.launch(one) for one in flights] == [0, 1, 2]
    assert channel.acknowledge(2) == flights[:2]
    assert channel.in_flight_bytes == 10
    assert channel.acknowledge(3) == flights[2:]


@pytest.mark.parametrize("consumed", [1, 4])
def test_credit_that_is_taken_back_or_was_not_sent_breaks_the_protocol(consumed: int) -> None:
    channel = Channel(PEER)
    for ordinal in range(3):
        channel.launch(flight(ordinal))
    channel.acknowledge(2)
    with pytest.raises(PeerProtocolError, match=f"acknowledged {consumed} frames: 3 were sent"):
        channel.acknowledge(consumed)


@pytest.mark.parametrize(
    ("granted", "most", "group", "wanted"),
    [(2, 4, b"g", 1), (4, 2, b"g", 1), (4, 4, b"g", 3), (4, 4, b"", 0), (1, 4, b"g", 0)],
)
def test_as_many_connections_are_opened_as_both_sides_allow(
    granted: int, most: int, group: bytes, wanted: int
) -> None:
    channels = Channels(PEER, dataclasses.replace(LIMITS, max_channels=most))
    effects = channels.open(granted, group, 0.0)
    peers = [Peer(PEER.endpoint, PEER.incarnation, channel=n + 1) for n in range(wanted)]
    assert effects == [effect for peer in peers for effect in (Connect(peer), SayHello(peer))]


def of_two(*, welcomes: int = 1) -> tuple[Sender, list[SenderEffect]]:
    """Return a sender with a second connection, and what the last WELCOME there led to."""
    sender = Sender(ME, LAYOUT, WITH_TWO)
    sender.on_open(ticket(), 100.0, 0.0)
    sender.hello(PEER, {"zmq": b""}, "auto")
    first = dataclasses.replace(WELCOME, num_channels=2, group=b"g")
    opened = sender.on_frame(PEER, first, 0.0)
    assert SayHello(SECOND) in opened
    assert Connect(SECOND) in opened
    effects: list[SenderEffect] = []
    for _ in range(welcomes):
        effects = sender.on_frame(SECOND, WELCOME, 0.0)
    return sender, effects


def test_a_further_connection_is_taken_once_though_its_hello_was_answered_twice() -> None:
    assert of_two()[1] == [TakeLane(SECOND, "zmq", b"")]
    assert of_two(welcomes=2)[1] == []


def carrying() -> Sender:
    """Return a sender with a frame in flight on each of two connections."""
    sender, _ = of_two()
    sender.on_frame(PEER, frames.Begun(1, 3), 0.0)
    assert len(chunks(push(sender, 1, 0))) == 2
    return sender


def test_a_connection_that_answers_is_kept_and_one_that_does_not_is_given_up() -> None:
    for answers in (True, False):
        sender = carrying()
        asked_at_s = LIMITS.ping_interval_s
        assert SendToPeer(SECOND, frames.Ping(())) in sender.on_tick(asked_at_s)
        if answers:
            sender.on_frame(SECOND, frames.Pong(), asked_at_s)
        sender.on_frame(PEER, frames.Pong(), asked_at_s)
        effects: list[SenderEffect] = []
        for tenth in range(1, 15):
            effects += sender.on_tick(asked_at_s + tenth / 10)
            sender.on_frame(PEER, frames.Pong(), asked_at_s + tenth / 10)
        # A later ping asks anew.
        effects += sender.on_tick(asked_at_s + LIMITS.answer_timeout_s)
        assert (Disconnect(SECOND) in effects) is not answers
