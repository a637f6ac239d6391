"""Decode nodes that do not answer: one transfer waits, the next ones are refused at once."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from common.nodes import MAX_KV_UNREACHABLE
from kv_transfer.contract import TransferEnded
from kv_transfer.sending.effects import Connect, Disconnect, PeerAnswers, PeerSilent, SayHello
from kv_transfer.sending.link import RECONNECT_AFTER_S
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.sending.unreachable import (
    FIRST_PAUSE_S,
    MAX_OWN_TRIES,
    MOST_PAUSE_S,
    UnreachablePeers,
)
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import MAX_REMEMBERED_PEERS
from kv_transfer.wire import frames
from tests.support.clocks.lines_run import lines_run
from tests.support.kv.sender_events import (
    LAYOUT,
    LIMITS,
    ME,
    PEER,
    ends,
    ticket,
    welcome,
)


def silent_sender() -> tuple[Sender, float]:
    """Return a machine whose peer has just failed to answer, and the time."""
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    now_s = LIMITS.answer_timeout_s
    (ended,) = ends(sender.on_tick(now_s))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, PeerUnreachable)
    return sender, now_s


def test_one_transfer_waits_and_the_next_are_refused_at_once() -> None:
    sender, now_s = silent_sender()
    for token in range(2, 30):
        (ended,) = ends(sender.on_open(ticket(token), 100.0, now_s))
        assert isinstance(ended, TransferEnded)
        assert isinstance(ended.error, PeerUnreachable)
        assert "did not answer once" in str(ended.error)
        assert ended.error.code == "handoff_failed"
    assert sender.num_transfers == 0


def test_one_where_nobody_listens_fails_its_transfers_at_once() -> None:
    """As one that was silent it is told, and tried again without a transfer."""
    sender = Sender(ME, LAYOUT, LIMITS)
    for token in (1, 2):
        sender.on_open(ticket(token), 100.0, 0.0)
    effects = sender.on_refused(PEER, 0.0)
    assert effects[0] == PeerSilent(PEER, 1, FIRST_PAUSE_S)
    ended = ends(effects)
    assert [type(one) for one in ended] == [TransferEnded] * 2
    assert all(isinstance(one.error, PeerUnreachable) for one in ended)  # type: ignore[attr-defined]
    assert effects[-1] == Disconnect(PEER)
    assert sender.on_refused(PEER, 0.0) == [], "its connection is closed"
    assert len(ends(sender.on_open(ticket(3), 100.0, 0.0))) == 1
    assert list(sender.unreachable) == [PEER.incarnation]
    assert sender.on_tick(FIRST_PAUSE_S) == [Connect(PEER), SayHello(PEER)]
    (told,) = (e for e in sender.on_refused(PEER, FIRST_PAUSE_S) if isinstance(e, PeerSilent))
    assert (told.num_failures, told.pause_s) == (2, 2 * FIRST_PAUSE_S)


def test_one_that_has_answered_before_may_listen_again() -> None:
    """Its connection broke, and is opened again: its transfers go on if that works in time."""
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    welcome(sender)
    sender.on_link_lost(PEER, 0.1)
    assert sender.on_tick(0.1 + RECONNECT_AFTER_S) == [Connect(PEER), SayHello(PEER)]
    assert sender.on_refused(PEER, 0.2) == []
    assert sender.num_transfers == 1
    (ended,) = ends(sender.on_tick(0.1 + LIMITS.answer_timeout_s))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, PeerUnreachable)


def test_it_is_tried_again_without_a_transfer_and_used_when_it_answers() -> None:
    sender, now_s = silent_sender()
    assert sender.next_deadline_s() == now_s + FIRST_PAUSE_S
    assert sender.on_tick(now_s + FIRST_PAUSE_S / 2) == []
    now_s += FIRST_PAUSE_S
    assert sender.on_tick(now_s) == [Connect(PEER), SayHello(PEER)]
    (refused,) = ends(sender.on_open(ticket(2), 100.0, now_s))
    assert isinstance(refused, TransferEnded)
    assert PeerAnswers(PEER) in welcome(sender, now_s)
    assert ends(sender.on_open(ticket(3), 100.0, now_s)) == []
    assert sender.num_transfers == 1


def test_one_that_refuses_the_connection_has_answered() -> None:
    """Transfers to it end with what it says, not with its silence of before."""
    sender, now_s = silent_sender()
    now_s += FIRST_PAUSE_S
    sender.on_tick(now_s)
    sender.hello(PEER, {"zmq": b""}, "auto")
    refused = frames.Rejected("overloaded", "too many senders")
    assert sender.on_frame(PEER, refused, now_s) == [PeerAnswers(PEER), Disconnect(PEER)]
    assert sender.next_deadline_s() is None
    assert ends(sender.on_open(ticket(2), 100.0, now_s)) == []
    sender.hello(PEER, {"zmq": b""}, "auto")
    (ended,) = ends(sender.on_frame(PEER, refused, now_s))
    assert isinstance(ended, TransferEnded)
    assert "too many senders" in str(ended.error)


def test_the_pauses_grow_and_every_try_is_reported() -> None:
    sender, now_s = silent_sender()
    pauses = []
    for number in range(2, MAX_OWN_TRIES + 2):
        due_s = sender.next_deadline_s()
        assert due_s is not None
        assert sender.on_tick(due_s) == [Connect(PEER), SayHello(PEER)]
        now_s = due_s + LIMITS.answer_timeout_s
        (report,) = (e for e in sender.on_tick(now_s) if isinstance(e, PeerSilent))
        assert report.num_failures == number
        pauses.append(report.pause_s)
    assert pauses == sorted(pauses)
    assert pauses[0] == 2 * FIRST_PAUSE_S
    assert pauses[-1] == MOST_PAUSE_S


def test_nobody_asks_for_ever_for_a_peer_that_nobody_wants() -> None:
    peers = UnreachablePeers()
    now_s = 0.0
    for _ in range(MAX_OWN_TRIES + 1):
        _, pause_s = peers.failed(PEER, now_s)
        now_s += pause_s
    assert peers.take_due(now_s) == []
    assert peers.next_deadline_s() is None, "a time that has passed keeps the thread awake"
    assert peers.refusal(PEER) is not None
    assert peers.next_deadline_s() == now_s
    assert peers.take_due(now_s) == [PEER]
    assert peers.take_due(now_s) == []
    assert peers.next_deadline_s() is None


def test_routers_are_told_what_is_tried_again() -> None:
    sender, now_s = silent_sender()
    assert list(sender.unreachable) == [PEER.incarnation]
    now_s += FIRST_PAUSE_S
    sender.on_tick(now_s)
    assert list(sender.unreachable) == [PEER.incarnation], "it has not answered yet"
    welcome(sender, now_s)
    assert list(sender.unreachable) == []


def test_what_waits_for_a_transfer_is_not_told() -> None:
    """Routers that avoid the pair would place none, so it would never be tried."""
    peers = UnreachablePeers()
    for _ in range(MAX_OWN_TRIES):
        peers.failed(PEER, 0.0)
    assert list(peers.tried_again) == [PEER.incarnation]
    peers.failed(PEER, 0.0)
    assert list(peers.tried_again) == []
    peers.refusal(PEER)
    assert list(peers.tried_again) == [PEER.incarnation]


def test_the_latest_are_told_first_and_not_all() -> None:
    peers = UnreachablePeers()
    nodes = [Incarnation(f"d{number}", 1) for number in range(MAX_KV_UNREACHABLE + 2)]
    for node in nodes:
        peers.failed(Peer("tcp://127.0.0.1:1", node), 0.0)
    assert peers.tried_again == tuple(reversed(nodes[2:]))


def test_a_peer_that_fell_silent_in_the_middle_is_refused_too() -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    welcome(sender)
    sender.on_tick(LIMITS.ping_interval_s)
    (ended,) = ends(sender.on_tick(LIMITS.ping_interval_s + LIMITS.answer_timeout_s))
    assert isinstance(ended, TransferEnded)
    assert len(ends(sender.on_open(ticket(2), 100.0, 3.0))) == 1


def test_time_in_which_this_process_stood_still_is_no_silence() -> None:
    """HELLO was sent before; the answer may lie in a socket, or have been lost meanwhile."""
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    sender.on_tick(0.1)
    assert ends(sender.on_tick(60.0)) == []
    assert ends(sender.on_tick(60.0 + LIMITS.answer_timeout_s / 2)) == []
    (ended,) = ends(sender.on_tick(60.0 + LIMITS.answer_timeout_s))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, PeerUnreachable)


def test_another_life_of_the_node_is_not_refused() -> None:
    peers = UnreachablePeers()
    peers.failed(PEER, 0.0)
    assert peers.refusal(Peer(PEER.endpoint, Incarnation("d", 2))) is None


def test_what_is_remembered_is_bounded() -> None:
    peers = UnreachablePeers()
    for number in range(MAX_REMEMBERED_PEERS + 1):
        peers.failed(Peer("there", Incarnation("d", number)), 0.0)
    assert peers.refusal(Peer("there", Incarnation("d", 0))) is None
    assert peers.refusal(Peer("there", Incarnation("d", 1))) is not None


@pytest.mark.covers("F120")
def test_a_turn_does_not_visit_every_peer_that_is_silent() -> None:

    def cost(num_peers: int) -> int:
        peers = UnreachablePeers()
        for number in range(num_peers):
            peers.failed(Peer(f"there{number}", Incarnation(f"d{number}", 1)), 0.0)
        return lines_run(lambda: (peers.take_due(0.1), peers.next_deadline_s()))

    assert cost(800) == cost(8)
