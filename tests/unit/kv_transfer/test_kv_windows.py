"""What may be unacknowledged: per peer, per node, and as the receiver grants it."""

from __future__ import annotations

import pytest

from common.ids import AttemptId, Incarnation
from common.kv_layout import KVLayout
from kv_transfer.connector import Ticket
from kv_transfer.core import frames
from kv_transfer.core.effects import OpenLane, Peer, Reply, SendChunk, SenderEffect
from kv_transfer.core.limits import MAX_FRAMES_IN_FLIGHT, Limits
from kv_transfer.core.receiver import Receiver
from kv_transfer.core.sender import Sender

LAYOUT = KVLayout(
    model_digest="m", num_layers=4, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
# One block per frame, four frames in the window of a peer, sixteen in all.
LIMITS = Limits(window_bytes=4 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=1)
ME = Incarnation("p", 1)
NUM_BLOCKS = 30


def peer(number: int) -> Peer:
    return Peer(f"there{number}", Incarnation(f"d{number}", 1))


def ticket(number: int, token: int) -> Ticket:
    to = peer(number)
    return Ticket(
        attempt=AttemptId("r", 0),
        decode_node=to.incarnation,
        kv_endpoint=to.endpoint,
        lease_token=token,
        generation=3,
        target_block_ids=tuple(range(NUM_BLOCKS)),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=30.0,
    )


def connected(
    num_peers: int, *, window_bytes: int | None = None, limits: Limits = LIMITS
) -> Sender:
    """A sender with one open transfer to each of so many peers, whose tokens are their numbers."""
    sender = Sender(ME, LAYOUT, limits)
    for number in range(num_peers):
        sender.on_open(ticket(number, number), 100.0, 0.0)
        sender.hello(peer(number), {"zmq": b""}, "off")
        granted = limits.window_bytes if window_bytes is None else window_bytes
        to = peer(number)
        sender.on_frame(to, frames.Welcome(to.incarnation, "zmq", b"", granted, "off"), 0.0)
    return sender


def push(sender: Sender, token: int, layer: int = 0) -> list[SenderEffect]:
    return sender.on_push(token, layer, range(NUM_BLOCKS), range(NUM_BLOCKS))


def sent_to(effects: list[SenderEffect]) -> list[int]:
    """The number of the peer of each DATA frame."""
    return [int(e.peer.endpoint[5:]) for e in effects if isinstance(e, SendChunk)]


def frames_in_flight(sender: Sender) -> list[int]:
    """By the number of the peer."""
    return [num_bytes // PAIR_BYTES for num_bytes in sender.in_flight_bytes.values()]


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


def test_a_peer_with_nothing_more_to_send_leaves_its_share_to_those_who_wait() -> None:
    sender = connected(5)
    for number in range(4):
        sender.on_push(number, 0, range(4), range(4))
    push(sender, 4)
    assert frames_in_flight(sender) == [4, 4, 4, 2, 2]
    assert sent_to(sender.on_frame(peer(0), frames.Ack(4), 0.1)) == [3, 4]
    assert frames_in_flight(sender) == [0, 4, 4, 3, 3]


@pytest.mark.parametrize("num_slow", [5, 8, 30, 250])
def test_more_slow_peers_than_windows_do_not_use_up_the_nodes_window(num_slow: int) -> None:
    """F27: nobody but the last peer acknowledges anything, and it keeps its frames coming."""
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


def test_a_slow_peer_slows_only_its_own_transfers() -> None:
    """F05, F27: peer 0 acknowledges nothing; 29 more frames go to peer 1 as it takes them."""
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
    ("num_granted", "wanted"),
    [(0, 100), (300, 100), (301, 99), (380, 20), (381, 20), (100_000, 20)],
)
def test_what_a_receiver_grants_shrinks_to_two_frames(num_granted: int, wanted: int) -> None:
    limits = Limits(window_bytes=100, max_frame_bytes=10)
    assert limits.granted_bytes(num_granted) == wanted


def test_a_window_smaller_than_two_frames_is_granted_whole() -> None:
    assert Limits(window_bytes=15, max_frame_bytes=10).granted_bytes(10**9) == 15


def test_windows_of_sessions_that_ended_are_granted_again() -> None:
    me = Incarnation("d", 1)
    limits = Limits(window_bytes=8 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=1)
    receiver = Receiver(me, LAYOUT, limits, num_blocks=4)

    def granted(number: int) -> int:
        session = b"%d" % number
        hello = frames.Hello(Incarnation(f"p{number}", 1), me, LAYOUT, {"zmq": b""}, "auto")
        (opened,) = receiver.on_frame(session, hello, [], 0.0)
        assert isinstance(opened, OpenLane)
        (reply,) = receiver.on_lane(session, "zmq", b"")
        assert isinstance(reply, Reply)
        assert isinstance(reply.frame, frames.Welcome)
        return reply.frame.window_bytes // PAIR_BYTES

    assert [granted(number) for number in range(6)] == [8, 8, 8, 8, 2, 2]
    for number in range(4):
        receiver.on_malformed(b"%d" % number, frames.UnknownVersion("bye"))
    assert [granted(number) for number in range(6, 10)] == [8, 8, 8, 4]
