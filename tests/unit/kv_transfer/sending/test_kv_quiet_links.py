"""Links without a transfer: nothing is sent on them where the peer expects nothing."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.contract import TransferEnded
from kv_transfer.sending.effects import Disconnect, SendToPeer
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    LAYOUT,
    LIMITS,
    ME,
    PEER,
    WELCOME,
    ends,
    sent,
    ticket,
)

QUIET = dataclasses.replace(WELCOME, quiet_s=LIMITS.quiet_s)


def idle(welcome: frames.Welcome = QUIET) -> Sender:
    """Return a machine whose only transfer has ended at time 0."""
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    sender.hello(PEER, {"zmq": b""}, "auto")
    sender.on_frame(PEER, welcome, 0.0)
    sender.on_abort(1, 0.0)
    assert len(ends(sender.on_frame(PEER, frames.Aborted(1, 3), 0.0))) == 1
    return sender


def test_an_idle_link_sends_nothing_until_it_is_closed() -> None:
    sender = idle()
    for tenth in range(1, 100):
        assert sender.on_tick(tenth / 10) == []
    assert sender.next_deadline_s() == LIMITS.idle_s
    assert sender.on_tick(LIMITS.idle_s) == [Disconnect(PEER)]
    assert sender.next_deadline_s() is None


@pytest.mark.parametrize("quiet_s", [0, int(LIMITS.idle_s)])
def test_a_peer_that_expects_pings_gets_them(quiet_s: int) -> None:
    """An earlier release, one with a shorter time, or a lane that keeps memory for its sender."""
    sender = idle(dataclasses.replace(WELCOME, quiet_s=quiet_s))
    assert sent(sender.on_tick(LIMITS.ping_interval_s)) == [frames.Ping(())]


def test_the_first_transfer_after_a_pause_asks_at_once_whether_the_peer_lives() -> None:
    sender = idle()
    for second in range(1, 5):
        sender.on_tick(second)
    assert sender.next_deadline_s() == LIMITS.idle_s
    assert sent(sender.on_open(ticket(2), 100.0, 5.0)) == [frames.Begin(2, 3)]
    assert (sender.next_deadline_s() or 9.0) <= 5.0
    assert sender.on_tick(5.0) == [SendToPeer(PEER, frames.Ping((2,)))]
    assert ends(sender.on_tick(5.0 + LIMITS.answer_timeout_s - 0.01)) == []
    (ended,) = ends(sender.on_tick(5.0 + LIMITS.answer_timeout_s))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, PeerUnreachable)


def test_a_peer_that_answers_after_a_pause_is_pinged_as_ever() -> None:
    sender = idle()
    sender.on_open(ticket(2), 100.0, 5.0)
    sender.on_tick(5.0)
    sender.on_frame(PEER, frames.Pong(), 5.1)
    assert sender.on_tick(5.0 + LIMITS.ping_interval_s - 0.01) == []
    assert sent(sender.on_tick(5.0 + LIMITS.ping_interval_s)) == [frames.Ping((2,))]
