"""Room in the window that all links share goes to those that wait for it, in turn."""

from __future__ import annotations

import math

import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Commit
from kv_transfer.sending.effects import SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames
from tests.support.kv.many_peers import (
    NUM_BLOCKS,
    PAIR_BYTES,
    connected,
    frames_in_flight,
    peer,
    push,
    sent_to,
    ticket,
)

LIMITS = Limits(window_bytes=32 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=1)
NEW = 6


def with_room() -> Sender:
    """Return a sender with much room that links 3, 4 and 5 wait for, because two others ended."""
    sender = connected(NEW, limits=LIMITS)
    for number in range(NEW):
        for layer in range(4):
            push(sender, number, layer)
    assert frames_in_flight(sender) == [32, 32, 32, 16, 2, 2]
    for number in (0, 1):
        sender.on_peer_failed(peer(number), HandoffFailed("gone"), 0.1)
    return sender


def welcome(sender: Sender) -> list[SenderEffect]:
    sender.hello(peer(NEW), {"zmq": b""}, "off")
    to = peer(NEW)
    granted = LIMITS.window_bytes
    return sender.on_frame(to, frames.Welcome(to.incarnation, "zmq", b"", granted, "off"), 0.2)


def test_a_new_link_takes_two_frames_and_waits_behind_the_others() -> None:
    sender = with_room()
    sender.on_open(ticket(NEW, NEW), 100.0, 0.2)
    welcome(sender)
    assert sent_to(push(sender, NEW)) == [NEW, NEW]
    assert sent_to(push(sender, NEW, 1)) == []
    assert sent_to(sender.on_frame(peer(2), frames.Ack(1), 0.3)) == [2, 3, 4, 5]
    assert sent_to(sender.on_frame(peer(2), frames.Ack(2), 0.3)) == [2, NEW, 3, 4]


def test_a_welcome_sends_two_frames_while_others_wait() -> None:
    sender = with_room()
    sender.on_open(ticket(NEW, NEW), 100.0, 0.2)
    push(sender, NEW)
    assert sent_to(welcome(sender)) == [NEW, NEW]


def test_a_commit_sends_no_pieces_out_of_turn_and_its_link_keeps_its_place() -> None:
    sender = with_room()
    done = Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1)
    assert sent_to(sender.on_commit(3, done)) == []
    assert sent_to(sender.on_frame(peer(2), frames.Ack(1), 0.3)) == [2, 3, 4, 5]


def test_a_repeated_piece_waits_for_its_turn() -> None:
    sender = with_room()
    assert sent_to(sender.on_frame(peer(5), frames.Repeat(5, 3, 0, (0,)), 0.2)) == []
    assert sent_to(sender.on_frame(peer(2), frames.Ack(1), 0.3)) == [2, 3, 4, 5]


@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_link_that_waits_alone_needs_no_turn(number: int) -> None:
    sender = with_room()
    for other in {3, 4, 5} - {number}:
        sender.on_peer_failed(peer(other), HandoffFailed("gone"), 0.2)
    before = sender.in_flight_bytes[peer(number)] // PAIR_BYTES
    sent = sent_to(sender.on_frame(peer(number), frames.Repeat(number, 3, 0, (0,)), 0.2))
    assert len(sent) == 32 - before


def test_a_link_that_sent_out_of_turn_keeps_nothing_of_that_bound() -> None:
    """Its next turn is bounded only if others wait then."""
    sender = with_room()
    sender.on_open(ticket(NEW, NEW), 100.0, 0.2)
    welcome(sender)
    assert sent_to(push(sender, NEW)) == [NEW, NEW]
    assert {link.budget_bytes for link in sender.links.all()} == {math.inf}
