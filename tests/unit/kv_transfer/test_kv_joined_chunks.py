"""Chunks that leave in one frame where a frame carries no bytes, and come apart again."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.kv_layout import KVLayout
from kv_transfer.connector import Ticket
from kv_transfer.core import frames
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.effects import Peer, SendChunk, SenderEffect
from kv_transfer.core.limits import MAX_BLOCKS_PER_FRAME, MAX_CHUNKS_PULLED, Limits
from kv_transfer.core.sender import Sender

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
NUM_BLOCKS = 11
ME, DECODE = Incarnation("p", 1), Incarnation("d", 1)
PEER = Peer("there", DECODE)
TICKET = Ticket(
    attempt=AttemptId("r", 0),
    decode_node=DECODE,
    kv_endpoint=PEER.endpoint,
    lease_token=1,
    generation=3,
    target_block_ids=tuple(range(NUM_BLOCKS)),
    num_cached_tokens=0,
    fingerprint=LAYOUT.fingerprint,
    lease_s=30.0,
)


def new_sender(*, window_blocks: int) -> Sender:
    """One block in a chunk, and both layers of a ticket's blocks pushed before anybody answers."""
    limits = Limits(window_bytes=window_blocks * PAIR_BYTES, max_frame_bytes=PAIR_BYTES)
    sender = Sender(ME, LAYOUT, limits)
    sender.on_open(TICKET, 100.0, 0.0)
    for layer in range(LAYOUT.num_layers):
        sender.on_push(1, layer, range(NUM_BLOCKS), range(NUM_BLOCKS))
    return sender


def connect(sender: Sender, lane: str, now_s: float = 0.0) -> list[SenderEffect]:
    sender.hello(PEER, {lane: b""}, "off")
    window_bytes = 1 << 30
    welcome = frames.Welcome(DECODE, lane, b"", window_bytes, "off")
    effects = sender.on_frame(PEER, welcome, now_s)
    return [*effects, *sender.on_frame(PEER, frames.Begun(1, 3), now_s)]


def sizes(effects: list[SenderEffect]) -> list[tuple[int, int]]:
    """(layer, blocks) of each DATA frame."""
    frames_sent = [effect for effect in effects if isinstance(effect, SendChunk)]
    assert all(len(e.target_blocks) == len(e.chunk.ordinals) for e in frames_sent)
    return [(e.chunk.layer, len(e.chunk.ordinals)) for e in frames_sent]


def test_chunks_of_a_layer_are_joined_on_the_lane_that_pulls_and_on_no_other() -> None:
    shm = sizes(connect(new_sender(window_blocks=100), "shm"))
    assert MAX_CHUNKS_PULLED == 4
    assert shm == [(0, 4), (0, 4), (0, 3), (1, 4), (1, 4), (1, 3)]
    zmq = sizes(connect(new_sender(window_blocks=100), "zmq"))
    assert zmq == [(layer, 1) for layer in (0, 1) for _ in range(NUM_BLOCKS)]


def test_a_frame_leaves_half_a_window_to_the_next() -> None:
    sender = new_sender(window_blocks=5)
    assert sizes(connect(sender, "shm")) == [(0, 2), (0, 2), (0, 1)]
    assert sender.in_flight_bytes == {PEER: 5 * PAIR_BYTES}
    assert sizes(sender.on_frame(PEER, frames.Ack(1), 0.0)) == [(0, 2)]
    assert sender.in_flight_bytes == {PEER: 5 * PAIR_BYTES}


def test_what_was_joined_comes_apart_for_another_lane() -> None:
    sender = new_sender(window_blocks=100)
    connect(sender, "shm")
    sender.on_frame(PEER, frames.Ack(2), 0.0)
    sender.on_link_lost(PEER, 1.0)
    sender.on_tick(2.0)
    again = connect(sender, "zmq", 2.0)
    assert sizes(again) == [(0, 1)] * 3 + [(1, 1)] * NUM_BLOCKS
    left = [e.chunk.source_blocks for e in again if isinstance(e, SendChunk)]
    assert left == [(8,), (9,), (10,)] + [(block,) for block in range(NUM_BLOCKS)]


def test_a_frame_holds_one_layer_and_not_too_many_blocks() -> None:
    def chunk(layer: int, first: int, count: int) -> Chunk:
        blocks = tuple(range(first, first + count))
        return Chunk(layer, blocks, blocks)

    half = MAX_BLOCKS_PER_FRAME // 2
    assert chunk(0, 0, half).joined(chunk(0, half, half)) == chunk(0, 0, 2 * half)
    assert chunk(0, 0, half).joined(chunk(0, half, half + 1)) is None
    assert chunk(0, 0, 1).joined(chunk(1, 1, 1)) is None
