"""The sending machine: window, turns, liveness and reconnects, with time controlled by the test."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import HandoffFailed
from common.ids import Incarnation
from kv_transfer.contract import Commit, Ticket, TransferEnded
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    SayHello,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer_errors import TransferAborted
from kv_transfer.sending.unreachable import FIRST_PAUSE_S
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import MAX_TRANSFERS_PER_LINK
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    DECODE,
    LAYOUT,
    LIMITS,
    ME,
    PAIR_BYTES,
    PEER,
    RDMA,
    WELCOME,
    chunks,
    ends,
    one_sided,
    push,
    ready,
    sent,
    ticket,
    welcome,
)

TAKE_LANE = TakeLane(PEER, "zmq", b"")


@pytest.mark.covers("F120")
def test_open_says_hello_and_nothing_more_until_welcomed() -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    assert sender.on_open(ticket(), 5.0, 0.0) == [Connect(PEER), SayHello(PEER)]
    hello = frames.Hello(ME, DECODE, LAYOUT, {"zmq": b"x"}, "commit", can_repeat=True, number=1)
    assert sender.hello(PEER, {"zmq": b"x"}, "commit") == hello
    assert push(sender, 1, 0) == []
    effects = welcome(sender, 0.1)
    assert sent(effects) == [frames.Begin(1, 3)]
    assert chunks(effects) == [(0, 1, 0), (1, 1, 0)]


@pytest.mark.covers("F20")
def test_the_window_fills_stops_and_opens_by_what_was_acknowledged() -> None:
    sender = ready(ticket())
    assert chunks(push(sender, 1, 0) + push(sender, 1, 1)) == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 1),
    ]
    assert sender.in_flight_bytes == {PEER: LIMITS.window_bytes}
    assert chunks(push(sender, 1, 2)) == []
    assert chunks(sender.on_frame(PEER, frames.Ack(1), 0.1)) == [(4, 1, 2)]
    assert chunks(sender.on_frame(PEER, frames.Ack(1), 0.1)) == []
    assert chunks(sender.on_frame(PEER, frames.Ack(5), 0.1)) == [(5, 1, 2)]
    assert sender.in_flight_bytes == {PEER: PAIR_BYTES}


@pytest.mark.covers("F27")
def test_transfers_take_turns() -> None:
    """A long one does not hold up a short one."""
    sender = ready(ticket(1), ticket(2))
    for layer in range(4):
        push(sender, 1, layer)
    push(sender, 2, 0)
    tokens = [token for _, token, _ in chunks(sender.on_frame(PEER, frames.Ack(4), 0.1))]
    assert tokens == [1, 2, 1, 2]


def test_bytes_of_an_ended_transfer_stay_in_the_window_until_acknowledged() -> None:
    sender = ready(ticket(1), ticket(2))
    push(sender, 1, 0)
    push(sender, 1, 1)
    sender.on_frame(PEER, frames.Failed(1, 3, "handoff_failed", "no"), 0.1)
    assert sender.in_flight_bytes == {PEER: LIMITS.window_bytes}
    assert chunks(push(sender, 2, 0)) == []
    assert chunks(sender.on_frame(PEER, frames.Ack(4), 0.1)) == [(4, 2, 0), (5, 2, 0)]


@pytest.mark.parametrize("consumed", [0, 3])
def test_an_acknowledgement_that_cannot_be_fails_the_peer(consumed: int) -> None:
    """It acknowledges more than was sent, or less than before."""
    sender = ready(ticket())
    push(sender, 1, 0)
    assert ends(sender.on_frame(PEER, frames.Ack(1), 0.1)) == []
    (ended,) = ends(sender.on_frame(PEER, frames.Ack(consumed), 0.1))
    assert isinstance(ended, TransferEnded)
    assert ended.error is not None
    assert ended.error.code == "peer_protocol_error"


def test_answers_of_another_generation_are_not_for_this_transfer() -> None:
    sender = ready(ticket())
    assert sender.on_frame(PEER, frames.Committed(1, 2), 0.1) == []
    assert sender.on_frame(PEER, frames.Failed(1, 4, "c", "m"), 0.1) == []
    assert sender.num_transfers == 1


def test_pings_name_the_open_leases_and_silence_ends_them() -> None:
    sender = ready(ticket(1), ticket(2))
    assert sender.next_deadline_s() == LIMITS.ping_interval_s
    assert sent(sender.on_tick(0.49)) == []
    assert sent(sender.on_tick(0.5)) == [frames.Ping((1, 2))]
    assert sent(sender.on_tick(1.0)) == [frames.Ping((1, 2))]
    assert ends(sender.on_tick(1.99)) == []
    effects = sender.on_tick(2.0)
    assert [end.lease_token for end in ends(effects)] == [1, 2]  # type: ignore[attr-defined]
    assert Disconnect(PEER) in effects
    assert sender.next_deadline_s() == 2.0 + FIRST_PAUSE_S


def test_any_answer_ends_the_silence() -> None:
    sender = ready(ticket())
    for step in range(1, 40):
        sender.on_tick(0.5 * step)
        assert ends(sender.on_frame(PEER, frames.Pong(), 0.5 * step + 0.3)) == []
    assert sender.num_transfers == 1


def test_a_process_that_slept_blames_nobody() -> None:
    sender = ready(ticket())
    assert ends(sender.on_tick(50.0)) == []
    assert ends(sender.on_tick(51.49)) == []
    assert len(ends(sender.on_tick(51.5))) == 1


def test_a_deadline_tells_the_peer() -> None:
    sender = ready(ticket())
    sender.on_frame(PEER, frames.Pong(), 99.9)
    sender.on_tick(99.9)
    effects = sender.on_tick(100.0)
    assert frames.Abort(1, 3) in sent(effects)
    assert len(ends(effects)) == 1


def test_a_broken_link_starts_again_with_what_was_not_acknowledged() -> None:
    sender = ready(ticket())
    push(sender, 1, 0)
    push(sender, 1, 1)
    sender.on_frame(PEER, frames.Ack(1), 0.1)
    sender.on_commit(1, Commit(num_tokens=8, first_token_id=7))
    assert sender.on_link_lost(PEER, 1.0) == [Disconnect(PEER)]
    assert sender.in_flight_bytes == {PEER: 0}
    assert sender.on_tick(1.04) == []
    assert sender.on_tick(1.05) == [Connect(PEER), SayHello(PEER)]
    effects = welcome(sender, 1.1)
    assert chunks(effects) == [(0, 1, 0), (1, 1, 1), (2, 1, 1)]
    assert sent(effects) == [frames.Begin(1, 3)]
    effects = sender.on_frame(PEER, frames.Ack(3), 1.2)
    assert sent(effects) == [frames.CommitFrame(1, 3, 4, 0, 8, 7, ())]


def test_a_receiver_that_forgot_the_session_is_greeted_again() -> None:
    sender = ready(ticket())
    refused = frames.Rejected(frames.NO_SESSION, "say HELLO first")
    assert sender.on_frame(PEER, refused, 1.0) == [Disconnect(PEER)]
    assert Connect(PEER) in sender.on_tick(1.05)


def test_hello_is_repeated_until_answered_and_two_answers_are_one() -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 5.0, 0.0)
    assert sender.next_deadline_s() == LIMITS.ping_interval_s
    assert sender.on_tick(0.5) == [SayHello(PEER)]
    assert sent(welcome(sender, 0.6)) == [frames.Begin(1, 3)]
    assert welcome(sender, 0.6) == []


@pytest.mark.covers("F32")
def test_reconnecting_in_vain_is_silence() -> None:
    sender = ready(ticket())
    sender.on_link_lost(PEER, 1.0)
    now_s = 1.0
    while not ends(sender.on_tick(now_s)):
        sender.on_link_lost(PEER, now_s)
        now_s += 0.05
    assert 2.4 < now_s < 2.6


def test_an_abort_while_disconnected_is_told_after_the_reconnect() -> None:
    sender = ready(ticket())
    push(sender, 1, 0)
    sender.on_link_lost(PEER, 1.0)
    assert sender.on_abort(1, 1.0) == []
    sender.on_tick(1.05)
    effects = welcome(sender, 1.1)
    assert effects == [TAKE_LANE, SendToPeer(PEER, frames.Abort(1, 3), is_behind_writes=True)]
    (ended,) = ends(sender.on_frame(PEER, frames.Aborted(1, 3), 1.2))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, HandoffFailed)


def not_begun(*tickets: Ticket) -> Sender:
    """Return a machine with these transfers open, whose peer has not answered yet."""
    sender = Sender(ME, LAYOUT, LIMITS)
    for one in tickets:
        sender.on_open(one, 100.0, 0.0)
        push(sender, one.lease_token, 0)
    return sender


def test_a_transfer_aborted_before_its_peer_answers_ends_at_once() -> None:
    """Nothing was sent, so there is nothing that the peer would have to confirm."""
    sender = not_begun(ticket(1), ticket(2))
    (ended,) = ends(sender.on_abort(1, 0.1))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, TransferAborted)
    assert sender.num_transfers == 1
    assert sender.on_abort(1, 0.1) == []


def test_a_peer_that_answers_later_hears_of_an_abort_before_it_once() -> None:
    sender = not_begun(ticket(1), ticket(2))
    sender.on_abort(1, 0.1)
    abort = SendToPeer(PEER, frames.Abort(1, 3), is_behind_writes=True)
    effects = welcome(sender, 0.2)
    assert effects[:3] == [TAKE_LANE, abort, SendToPeer(PEER, frames.Begin(2, 3))]
    assert sender.on_frame(PEER, frames.Aborted(1, 3), 0.3) == []
    sender.on_link_lost(PEER, 0.4)
    sender.on_tick(0.5)
    assert frames.Abort(1, 3) not in sent(welcome(sender, 0.6))


def test_an_abort_is_told_though_the_first_connection_broke() -> None:
    sender = not_begun(ticket(1))
    sender.on_abort(1, 0.1)
    assert sender.on_link_lost(PEER, 0.2) == [Disconnect(PEER)]
    assert Connect(PEER) in sender.on_tick(0.3)
    assert frames.Abort(1, 3) in sent(welcome(sender, 0.4))
    assert sender.on_link_lost(PEER, 0.5) == [Disconnect(PEER)]
    assert sender.next_deadline_s() is None, "nothing is left to tell"


def test_a_transfer_aborted_after_a_connection_was_lost_waits_for_its_peer() -> None:
    """Pieces of it may be on their way, and a commit may have come first."""
    sender = ready(ticket(1))
    sender.on_link_lost(PEER, 1.0)
    assert sender.on_abort(1, 1.1) == []
    assert sender.num_transfers == 1


@pytest.mark.covers("F120")
def test_an_idle_link_is_closed_and_a_busy_one_is_not() -> None:
    sender = ready(ticket())
    sender.on_abort(1, 0.0)
    sender.on_frame(PEER, frames.Aborted(1, 3), 1.0)
    for step in range(1, 20):
        sender.on_tick(1.0 + 0.5 * step - 0.1)
        sender.on_frame(PEER, frames.Pong(), 1.0 + 0.5 * step - 0.1)
    assert sender.on_tick(11.0) == [Disconnect(PEER)]
    assert sender.next_deadline_s() is None


def test_an_idle_link_that_breaks_is_forgotten() -> None:
    sender = ready(ticket())
    sender.on_abort(1, 0.0)
    sender.on_frame(PEER, frames.Aborted(1, 3), 1.0)
    assert sender.on_link_lost(PEER, 2.0) == [Disconnect(PEER)]
    assert Connect(PEER) in sender.on_open(ticket(2), 5.0, 3.0)


@pytest.mark.covers("F63")
def test_another_life_of_a_peer_is_another_link() -> None:
    """The address is the same."""
    sender = ready(ticket(1))
    later = Incarnation(DECODE.node_id, 2)
    effects = sender.on_open(dataclasses.replace(ticket(2), decode_node=later), 5.0, 0.0)
    assert Connect(Peer(PEER.endpoint, later)) in effects


def test_transfers_per_peer_are_bounded() -> None:
    sender = ready()
    for token in range(1, MAX_TRANSFERS_PER_LINK + 1):
        assert ends(sender.on_open(ticket(token), 5.0, 0.0)) == []
    (ended,) = ends(sender.on_open(ticket(9999), 5.0, 0.0))
    assert isinstance(ended, TransferEnded)
    assert sender.num_transfers == MAX_TRANSFERS_PER_LINK


@pytest.mark.covers("F14")
def test_one_sided_writes_wait_for_the_answer_to_begin() -> None:
    """Before it the receiver would release the blocks without asking."""
    sender = one_sided(ticket(1), ticket(2))
    assert push(sender, 1, 0) == push(sender, 2, 0) == []
    assert chunks(sender.on_frame(PEER, frames.Ack(0), 0.1)) == []
    assert chunks(sender.on_frame(PEER, frames.Begun(1, 4), 0.1)) == []
    assert chunks(sender.on_frame(PEER, frames.Begun(2, 3), 0.1)) == [(0, 2, 0), (1, 2, 0)]
    assert chunks(sender.on_frame(PEER, frames.Begun(1, 3), 0.1)) == [(2, 1, 0), (3, 1, 0)]
    assert chunks(sender.on_frame(PEER, frames.Begun(1, 3), 0.1)) == []


@pytest.mark.covers("F68")
def test_begun_on_a_connection_that_broke_counts_no_more() -> None:
    sender = one_sided(ticket(1))
    sender.on_frame(PEER, frames.Begun(1, 3), 0.1)
    sender.on_link_lost(PEER, 1.0)
    sender.on_tick(1.05)
    sender.hello(PEER, {"rdma": b""}, "auto")
    sender.on_frame(PEER, RDMA, 1.1)
    assert push(sender, 1, 0) == []
    assert len(chunks(sender.on_frame(PEER, frames.Begun(1, 3), 1.2))) == 2


def test_where_the_receiver_writes_nobody_waits_for_begun() -> None:
    sender = ready(ticket(1))
    assert len(chunks(push(sender, 1, 0))) == 2


def test_a_failure_is_answered_behind_the_writes() -> None:
    """Only then does the receiver know that its blocks are not written any more."""
    sender = one_sided(ticket(1))
    behind = SendToPeer(PEER, frames.Abort(1, 3), is_behind_writes=True)
    failed = frames.Failed(1, 3, "handoff_failed", "revoked")
    effects = sender.on_frame(PEER, failed, 0.1)
    assert effects[0] == behind
    assert len(ends(effects)) == 1
    assert sender.on_frame(PEER, failed, 0.1) == [behind]
    two_sided = ready(ticket(1))
    assert sent(two_sided.on_frame(PEER, failed, 0.1)) == []


def test_a_failure_is_not_answered_on_a_connection_that_is_not_welcomed() -> None:
    """The receiver has no session there; writes of the connection before end with that one."""
    failed = frames.Failed(1, 3, "handoff_failed", "revoked")
    sender = one_sided(ticket(1), ticket(2))
    sender.on_link_lost(PEER, 1.0)
    effects = sender.on_frame(PEER, failed, 1.01)
    assert sent(effects) == []
    assert len(ends(effects)) == 1
    sender.on_tick(1.05)
    assert sent(sender.on_frame(PEER, failed, 1.06)) == []
    sender.hello(PEER, {"rdma": b""}, "auto")
    sender.on_frame(PEER, RDMA, 1.1)
    assert sent(sender.on_frame(PEER, failed, 1.2)) == [frames.Abort(1, 3)]


def test_what_is_sent_of_a_transfer_is_wanted_until_it_is_given_up() -> None:
    sender = ready(ticket(1), ticket(2))
    assert sender.is_sending(1)
    assert not sender.is_sending(3)
    sender.on_abort(1, 0.0)
    assert not sender.is_sending(1)
    assert sender.is_sending(2)
    sender.on_frame(PEER, frames.Failed(2, 3, "handoff_failed", "revoked"), 0.1)
    assert not sender.is_sending(2)


def test_every_abort_travels_behind_the_writes() -> None:
    sender = one_sided(ticket(1), ticket(2), ticket(3))
    aborts = sender.on_abort(1, 0.0)
    sender.on_frame(PEER, frames.Pong(), 99.9)
    sender.on_tick(99.9)
    aborts += [effect for effect in sender.on_tick(100.0) if isinstance(effect, SendToPeer)]
    assert len(aborts) == 4
    assert all(isinstance(one, SendToPeer) and one.is_behind_writes for one in aborts)


def test_a_welcome_must_fit_the_hello() -> None:
    for lane, verify in [("shm", "block"), ("zmq", "commit"), ("zmq", "off")]:
        sender = Sender(ME, LAYOUT, LIMITS)
        sender.on_open(ticket(), 5.0, 0.0)
        sender.hello(PEER, {"zmq": b""}, "block")
        answer = dataclasses.replace(WELCOME, lane=lane, verify=verify)
        (ended,) = ends(sender.on_frame(PEER, answer, 0.1))
        assert isinstance(ended, TransferEnded)
        assert ended.error is not None
        assert ended.error.code == "peer_protocol_error"


def test_of_two_hellos_on_a_connection_either_may_be_answered() -> None:
    """A lane that is not offered any more by the second was offered by the first."""
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 5.0, 0.0)
    sender.hello(PEER, {"rdma": b"", "zmq": b""}, "auto")
    sender.hello(PEER, {"zmq": b""}, "auto")
    assert ends(sender.on_frame(PEER, RDMA, 0.1)) == []
    sender.on_link_lost(PEER, 0.2)
    sender.on_tick(0.3)
    sender.hello(PEER, {"zmq": b""}, "auto")
    assert len(ends(sender.on_frame(PEER, RDMA, 0.4))) == 1
