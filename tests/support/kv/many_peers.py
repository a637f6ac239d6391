"""A sending machine with many receivers."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Ticket
from kv_transfer.sending.effects import SendChunk, SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

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
