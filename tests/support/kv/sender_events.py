"""A sending machine, and the events of one receiver."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Ticket
from kv_transfer.sending.effects import (
    SendChunk,
    SenderEffect,
    SendToPeer,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=4, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
# One block per frame, four frames in the window.
LIMITS = Limits(
    window_bytes=4 * PAIR_BYTES,
    max_frame_bytes=PAIR_BYTES,
    max_joined=1,
    max_joined_one_sided=1,
    idle_s=10.0,
    peer_timeout_s=2.0,
)
ME, DECODE = Incarnation("p", 1), Incarnation("d", 1)
PEER = Peer("there", DECODE)
WELCOME = frames.Welcome(DECODE, "zmq", b"", LIMITS.window_bytes, "block")


def ticket(token: int = 1, num_blocks: int = 2) -> Ticket:
    return Ticket(
        attempt=AttemptId("r", 0),
        decode_node=DECODE,
        kv_endpoint=PEER.endpoint,
        lease_token=token,
        generation=3,
        target_block_ids=tuple(range(num_blocks)),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=30.0,
    )


def ready(*tickets: Ticket, limits: Limits = LIMITS) -> Sender:
    """Return a machine with these transfers open on a welcomed link, at time 0."""
    sender = Sender(ME, LAYOUT, limits)
    for one in tickets:
        sender.on_open(one, 100.0, 0.0)
    welcome(sender)
    return sender


def welcome(sender: Sender, now_s: float = 0.0) -> list[SenderEffect]:
    """Send HELLO and answer it."""
    sender.hello(PEER, {"zmq": b""}, "auto")
    return sender.on_frame(PEER, WELCOME, now_s)


def push(sender: Sender, token: int, layer: int) -> list[SenderEffect]:
    return sender.on_push(token, layer, [0, 1], [5, 6])


def chunks(effects: list[SenderEffect]) -> list[tuple[int, int, int]]:
    """Return (seq, token, layer) of the DATA frames among `effects`."""
    return [
        (effect.seq, effect.lease_token, effect.chunk.layer)
        for effect in effects
        if isinstance(effect, SendChunk)
    ]


def sent(effects: list[SenderEffect]) -> list[frames.Frame]:
    return [effect.frame for effect in effects if isinstance(effect, SendToPeer)]


def ends(effects: list[SenderEffect]) -> list[object]:
    return [effect.event for effect in effects if isinstance(effect, Emit)]


RDMA = frames.Welcome(DECODE, "rdma", b"keys", LIMITS.window_bytes, "off")


def one_sided(*tickets: Ticket) -> Sender:
    """Return a machine with these transfers open, whose peer chose RDMA."""
    sender = Sender(ME, LAYOUT, LIMITS)
    for one in tickets:
        sender.on_open(one, 100.0, 0.0)
    sender.hello(PEER, {"rdma": b"", "zmq": b""}, "auto")
    sender.on_frame(PEER, RDMA, 0.0)
    return sender
