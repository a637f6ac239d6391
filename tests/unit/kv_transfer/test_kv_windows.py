"""What may be unacknowledged: per peer, per node, and as the receiver grants it."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from kv_transfer.receiving.effects import OpenLane, SendBack
from kv_transfer.receiving.machine import Receiver
from kv_transfer.receiving.sessions import ACTIVE_S, Session, WindowShares
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.limits import MAX_FRAMES_IN_FLIGHT, Limits
from kv_transfer.wire import frames
from tests.support.kv.many_peers import (
    LAYOUT,
    LIMITS,
    ME,
    NUM_BLOCKS,
    PAIR_BYTES,
    connected,
    frames_in_flight,
    peer,
    push,
    sent_to,
    ticket,
)


def test_peers_share_the_nodes_window() -> None:
    """Each may have as much in flight as is left for all, and two frames in any case."""
    sender = connected(8)
    counts = []
    for number in range(8):
        sent = sent_to(push(sender, number))
        assert set(sent) == {number}
        counts.append(len(sent))
    assert counts == [4, 4, 4, 2, 2, 2, 2, 2]


def test_what_one_peer_gives_back_another_may_take() -> None:
    sender = connected(5)
    for number in range(5):
        push(sender, number)
    assert frames_in_flight(sender) == [4, 4, 4, 2, 2]
    # Peer 0, whose answer it is, goes first: no further than to what is left for all.
    assert sent_to(sender.on_frame(peer(0), frames.Ack(4), 0.1)) == [0, 0]
    assert sent_to(sender.on_frame(peer(1), frames.Ack(4), 0.1)) == [1, 1, 3, 4]
    assert frames_in_flight(sender) == [2, 2, 4, 3, 3]


def test_a_peer_with_nothing_more_to_send_leaves_its_share_to_waiting_peers() -> None:
    sender = connected(5)
    for number in range(4):
        sender.on_push(number, 0, range(4), range(4))
    push(sender, 4)
    assert frames_in_flight(sender) == [4, 4, 4, 2, 2]
    assert sent_to(sender.on_frame(peer(0), frames.Ack(4), 0.1)) == [3, 4]
    assert frames_in_flight(sender) == [0, 4, 4, 3, 3]


@pytest.mark.covers("F27")
@pytest.mark.parametrize("num_slow", [5, 8, 30, 250])
def test_more_slow_peers_than_windows_do_not_use_up_the_nodes_window(num_slow: int) -> None:
    """Nobody but the last peer acknowledges anything, and it keeps its frames coming."""
    limits = Limits(window_bytes=32 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=1)
    sender = connected(num_slow + 1, limits=limits)
    for number in range(num_slow + 1):
        for layer in range(4):
            push(sender, number, layer)
    healthy = num_slow
    assert frames_in_flight(sender)[healthy] >= 2
    for consumed in range(1, 4 * NUM_BLOCKS - 2):
        sender.on_frame(peer(healthy), frames.Ack(consumed), 0.1)
        assert frames_in_flight(sender)[healthy] >= 2
    least = 2 * PAIR_BYTES * (num_slow + 1)
    assert sum(sender.in_flight_bytes.values()) <= limits.node_window_bytes + least


@pytest.mark.covers("F05", "F27")
def test_a_slow_peer_slows_only_its_own_transfers() -> None:
    """Peer 0 acknowledges nothing; 29 more frames go to peer 1 as it takes them."""
    sender = connected(2)
    push(sender, 0)
    push(sender, 1)
    for consumed in range(1, NUM_BLOCKS + 1):
        assert 0 not in sent_to(sender.on_frame(peer(1), frames.Ack(consumed), 0.1))
    assert sender.in_flight_bytes == {peer(0): LIMITS.window_bytes, peer(1): 0}


@pytest.mark.parametrize(
    ("granted", "wanted"), [(0, 1), (PAIR_BYTES, 1), (2 * PAIR_BYTES, 2), (99 * PAIR_BYTES, 4)]
)
def test_the_window_is_what_both_sides_allow(granted: int, wanted: int) -> None:
    """One frame may always go; a receiver that grants more than this side wants changes nothing."""
    sender = connected(1, window_bytes=granted)
    assert sent_to(push(sender, 0)) == [0] * wanted
    assert sent_to(sender.on_frame(peer(0), frames.Ack(1), 0.1)) == [0]


def test_frames_in_flight_are_counted_too() -> None:
    """However small they are: a receiver's queue holds messages, not bytes."""
    limits = Limits(window_bytes=1 << 30, max_frame_bytes=PAIR_BYTES, max_joined=1)
    sender = connected(1, limits=limits)
    effects = [effect for layer in range(4) for effect in push(sender, 0, layer)]
    assert len(sent_to(effects)) == min(4 * NUM_BLOCKS, MAX_FRAMES_IN_FLIGHT)
    assert 4 * NUM_BLOCKS < MAX_FRAMES_IN_FLIGHT
    many = Sender(ME, LAYOUT, limits)
    for token in range(10):
        many.on_open(ticket(0, token), 100.0, 0.0)
    many.hello(peer(0), {"zmq": b""}, "off")
    welcome = frames.Welcome(peer(0).incarnation, "zmq", b"", 1 << 30, "off")
    many.on_frame(peer(0), welcome, 0.0)
    counts = [len(sent_to(push(many, token, layer))) for token in range(10) for layer in range(4)]
    assert sum(counts) == MAX_FRAMES_IN_FLIGHT


@pytest.mark.parametrize(
    ("num_active", "wanted"), [(1, 100), (4, 100), (5, 80), (16, 25), (20, 20), (500, 20)]
)
def test_the_share_of_a_sender_shrinks_to_two_frames(num_active: int, wanted: int) -> None:
    shares = WindowShares(Limits(window_bytes=100, max_frame_bytes=10))
    for number in range(1, num_active):
        shares.sent(b"%d" % number, 0.0)
    # The same before its first frame and after it.
    assert shares.share_bytes(b"0", 0.1) == wanted
    shares.sent(b"0", 0.1)
    assert shares.share_bytes(b"0", 0.1) == wanted


def test_a_sender_that_stopped_leaves_its_share_to_the_others() -> None:
    shares = WindowShares(Limits(window_bytes=100, max_frame_bytes=10))
    for number in range(8):
        shares.sent(b"%d" % number, 0.0)
    for number in range(6):
        shares.sent(b"%d" % number, 0.5)
    assert shares.share_bytes(b"0", ACTIVE_S) == 50
    assert shares.share_bytes(b"0", ACTIVE_S + 0.1) == 66
    shares.drop(b"1")
    assert shares.share_bytes(b"0", ACTIVE_S + 0.1) == 80
    assert shares.share_bytes(b"0", ACTIVE_S + 0.6) == 100


def test_a_window_smaller_than_two_frames_is_granted_whole() -> None:
    shares = WindowShares(Limits(window_bytes=15, max_frame_bytes=10))
    for number in range(99):
        shares.sent(b"%d" % number, 0.0)
    assert shares.share_bytes(b"0", 0.0) == 15


def test_an_acknowledgement_changes_the_window_while_the_connection_lives() -> None:
    sender = connected(1)
    assert sent_to(push(sender, 0)) == [0] * 4
    assert sent_to(sender.on_frame(peer(0), frames.Ack(1, PAIR_BYTES), 0.1)) == []
    assert sent_to(sender.on_frame(peer(0), frames.Ack(3, PAIR_BYTES), 0.1)) == []
    assert sent_to(sender.on_frame(peer(0), frames.Ack(4, PAIR_BYTES), 0.1)) == [0]
    # An earlier release says nothing of windows; more than this side wants changes nothing.
    assert sent_to(sender.on_frame(peer(0), frames.Ack(5), 0.1)) == [0]
    assert sent_to(sender.on_frame(peer(0), frames.Ack(6, 99 * PAIR_BYTES), 0.1)) == [0] * 4


class Receiving:
    """A receiver that prefill nodes connect to, each with a landing of its own."""

    def __init__(self) -> None:
        self.me = Incarnation("d", 1)
        limits = Limits(window_bytes=8 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=1)
        self.machine = Receiver(self.me, LAYOUT, limits, num_blocks=40)
        self._seqs: dict[int, int] = {}

    def welcomed(self, number: int, now_s: float = 0.0) -> int:
        """Return the window of WELCOME, in frames."""
        session = b"%d" % number
        hello = frames.Hello(Incarnation(f"p{number}", 1), self.me, LAYOUT, {"zmq": b""}, "off")
        *_, opened = self.machine.on_frame(session, hello, [], now_s)
        assert isinstance(opened, OpenLane)
        (reply,) = self.machine.on_lane(session, "zmq", b"")
        assert isinstance(reply, SendBack)
        assert isinstance(reply.frame, frames.Welcome)
        self._seqs[number] = 0
        return reply.frame.window_bytes // PAIR_BYTES

    def acknowledged(self, number: int, now_s: float) -> int:
        """Return the window of the answer to a DATA frame, in frames."""
        seq = self._seqs[number]
        self._seqs[number] += 1
        data = frames.Data(seq, number + 1, 1, 0, (0,), (1,), (), b"", wants_ack=True)
        part_sizes = [LAYOUT.piece_bytes] * 2
        *_, reply = self.machine.on_frame(b"%d" % number, data, part_sizes, now_s)
        assert isinstance(reply, SendBack)
        assert isinstance(reply.frame, frames.Ack)
        return reply.frame.window_bytes // PAIR_BYTES


def test_active_senders_share_the_receivers_bound() -> None:
    """Those that are connected and send nothing take no share of it."""
    receiving = Receiving()
    assert [receiving.welcomed(number) for number in range(20)] == [8] * 20
    assert [receiving.acknowledged(number, 0.1) for number in range(6)] == [8, 8, 8, 8, 6, 5]
    assert receiving.acknowledged(0, 0.2) == 5
    assert receiving.welcomed(20, 0.2) == 4
    # Two of them go on for a while.
    for tenth in range(3, 15):
        receiving.acknowledged(0, tenth / 10)
        receiving.acknowledged(1, tenth / 10)
    assert receiving.acknowledged(0, 1.5) == 8
    # A connection that ended takes no share either.
    for number in range(2, 8):
        receiving.acknowledged(number, 1.5)
    assert receiving.acknowledged(0, 1.5) == 4
    for number in range(2, 8):
        receiving.machine.on_malformed(b"%d" % number, frames.UnknownVersion("bye"))
    assert receiving.acknowledged(0, 1.5) == 8


def test_a_ping_tells_the_window_again() -> None:
    """The acknowledgement that changed it may have been lost."""
    receiving = Receiving()
    for number in range(8):
        receiving.welcomed(number)
        receiving.acknowledged(number, 0.1)
    ping = frames.Ping(())
    _, reply = receiving.machine.on_frame(b"0", ping, [], 0.2)
    assert reply == SendBack(b"0", frames.Ack(1, 4 * PAIR_BYTES))


def test_credit_follows_the_smaller_of_the_first_window_and_the_present_one() -> None:
    """A sender of an earlier release keeps its first window, so the present one is not its."""
    session = Session(b"a", Incarnation("p", 1), 0.0, "off", can_repeat=True)
    session.welcome_bytes, session.window_bytes = 80, 800
    owed = []
    for seq, num_bytes in enumerate((9, 1)):
        session.consume(seq, num_bytes, wants_ack=False)
        session.finish(seq)
        owed.append(session.is_ack_due)
    session.welcome_bytes, session.window_bytes = 800, 88
    assert [*owed, session.is_ack_due] == [False, True, False]
