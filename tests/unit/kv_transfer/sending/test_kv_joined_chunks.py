"""Chunks of a layer that leave in one frame, and come apart again."""

from __future__ import annotations

import dataclasses

import msgpack  # type: ignore[import-untyped]
import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout, LayerShape
from kv_transfer.contract import Ticket
from kv_transfer.sending.effects import SendChunk, SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import LEAST_BLOCKS_PER_FRAME, MAX_BLOCKS_PER_FRAME, Limits
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import SEAL_BYTES, seal

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
    limits = Limits(
        window_bytes=window_blocks * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=4
    )
    sender = Sender(ME, LAYOUT, limits)
    sender.on_open(TICKET, 100.0, 0.0)
    for layer in range(LAYOUT.num_layers):
        sender.on_push(1, layer, range(NUM_BLOCKS), range(NUM_BLOCKS))
    return sender


def connect(
    sender: Sender,
    lane: str,
    now_s: float = 0.0,
    frame_blocks: int = LEAST_BLOCKS_PER_FRAME,
    verify: str = "off",
) -> list[SenderEffect]:
    sender.hello(PEER, {lane: b""}, verify)
    window_bytes = 1 << 30
    welcome = frames.Welcome(DECODE, lane, b"", window_bytes, verify, frame_blocks=frame_blocks)
    effects = sender.on_frame(PEER, welcome, now_s)
    return [*effects, *sender.on_frame(PEER, frames.Begun(1, 3), now_s)]


def sizes(effects: list[SenderEffect]) -> list[tuple[int, int]]:
    """(layer, blocks) of each DATA frame."""
    frames_sent = [effect for effect in effects if isinstance(effect, SendChunk)]
    assert all(len(e.target_blocks) == len(e.chunk.ordinals) for e in frames_sent)
    return [(e.chunk.layer, len(e.chunk.ordinals)) for e in frames_sent]


@pytest.mark.covers("F33")
@pytest.mark.parametrize(
    ("lane", "verify", "first_layer", "second_layer"),
    [
        ("zmq", "off", [1, 1, 2, 4, 3], [4, 4, 3]),
        ("loopback", "off", [1, 1, 2, 4, 3], [4, 4, 3]),
        ("rdma", "commit", [1, 1, 2, 4, 3], [11]),
        ("rdma", "block", [1, 1, 2, 4, 3], [11]),
        ("shm", "off", [1, 1, 2, 4, 3], [8, 3]),
    ],
)
def test_frames_grow_with_what_is_under_way(
    lane: str, verify: str, first_layer: list[int], second_layer: list[int]
) -> None:
    """The first are small, so that the other end has work at once; none spans two layers."""
    sender = new_sender(window_blocks=100)
    wanted = [(0, size) for size in first_layer] + [(1, size) for size in second_layer]
    assert sizes(connect(sender, lane, verify=verify)) == wanted


def test_frames_are_large_at_once_where_the_other_end_has_no_work() -> None:
    sender = new_sender(window_blocks=100)
    assert sizes(connect(sender, "rdma")) == [(0, 11), (1, 11)]


@pytest.mark.parametrize(
    ("pushed", "wanted"),
    [
        ([11, 11, 11, 11], [[6, 5], [6], [1, 1], [1, 1]]),  # The second one waits for room.
        ([11, 5, 5, 11], [[6, 5], [5], [5], [1, 1]]),  # Nobody waits, and there is no room.
    ],
)
def test_frames_stay_small_where_others_have_the_room(
    pushed: list[int], wanted: list[list[int]]
) -> None:
    """The window of all nodes is 24 blocks, that of one on this lane 12."""
    limits = Limits(window_bytes=6 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES, max_joined=4)
    sender = Sender(ME, LAYOUT, limits)
    sent = []
    for number, count in enumerate(pushed):
        node = Incarnation(f"d{number}", 1)
        ticket = dataclasses.replace(
            TICKET, decode_node=node, kv_endpoint=f"at{number}", lease_token=number
        )
        peer = Peer(ticket.kv_endpoint, node)
        sender.on_open(ticket, 100.0, 0.0)
        sender.on_push(number, 0, range(count), range(count))
        sender.hello(peer, {"rdma": b""}, "off")
        welcome = frames.Welcome(node, "rdma", b"", 1 << 30, "off")
        sender.on_frame(peer, welcome, 0.0)
        effects = sender.on_frame(peer, frames.Begun(number, 3), 0.0)
        sent.append([size for _, size in sizes(effects)])
    assert sent == wanted


@pytest.mark.parametrize(("lane", "window_blocks"), [("shm", 4), ("zmq", 8)])
def test_a_frame_waits_until_all_of_it_has_room(lane: str, window_blocks: int) -> None:
    """So later frames do not become small again: space for one block is not used."""
    sender = new_sender(window_blocks=window_blocks)
    assert sizes(connect(sender, lane)) == [(0, 1), (0, 1), (0, 2), (0, 4)]
    assert sender.in_flight_bytes == {PEER: 8 * PAIR_BYTES}
    all_left = [[], [], [(0, 3)], [(1, 3)], [(1, 3)], [(1, 3), (1, 2)], []]
    for consumed, left in enumerate(all_left, start=1):
        assert sizes(sender.on_frame(PEER, frames.Ack(consumed), 0.0)) == left, consumed
        assert sender.in_flight_bytes[PEER] <= 8 * PAIR_BYTES


def test_half_a_window_bounds_a_frame() -> None:
    sender = new_sender(window_blocks=5)
    assert sizes(connect(sender, "zmq")) == [(0, 1), (0, 1), (0, 2)]
    assert sizes(sender.on_frame(PEER, frames.Ack(3), 0.0))[0] == (0, 1)


def test_what_is_alone_under_way_is_one_chunk() -> None:
    """No byte has to wait for later bytes when nothing is in flight before it."""
    sender = new_sender(window_blocks=100)
    connect(sender, "zmq")
    sender.on_frame(PEER, frames.Ack(8), 0.0)
    assert sender.in_flight_bytes == {PEER: 0}
    sender.on_open(dataclasses.replace(TICKET, lease_token=2), 100.0, 0.0)
    assert sizes(sender.on_push(2, 0, range(NUM_BLOCKS), range(NUM_BLOCKS)))[:2] == [(0, 1), (0, 1)]


def test_what_was_joined_comes_apart_for_another_lane() -> None:
    sender = new_sender(window_blocks=100)
    connect(sender, "shm")
    sender.on_frame(PEER, frames.Ack(4), 0.0)
    sender.on_link_lost(PEER, 1.0)
    sender.on_tick(2.0)
    again = connect(sender, "rdma", 2.0)
    assert sizes(again) == [(0, 3), (1, 11)]
    left = [e.chunk.source_blocks.tolist() for e in again if isinstance(e, SendChunk)]
    assert [block for blocks in left for block in blocks] == [8, 9, 10, *range(NUM_BLOCKS)]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (LEAST_BLOCKS_PER_FRAME, [1, 1, 2] + 12 * [3]),
        (0, [1, 1, 2] + 12 * [3]),
        (4 * LEAST_BLOCKS_PER_FRAME // 3, [1, 1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        (1024, [1, 1, 2, 4, 8, 12, 12]),
        (MAX_BLOCKS_PER_FRAME, [1, 1, 2, 4, 8, 16, 8]),
        (1 << 30, [1, 1, 2, 4, 8, 16, 8]),
    ],
)
@pytest.mark.parametrize("lane", ["zmq", "rdma"])
def test_a_frame_holds_as_many_blocks_as_its_receiver_takes(
    lane: str, said: int, wanted: list[int]
) -> None:
    third = LEAST_BLOCKS_PER_FRAME // 3
    count = 40 * third
    limits = Limits(
        window_bytes=1 << 30,
        max_frame_bytes=third * PAIR_BYTES,
        max_joined=40,
        max_joined_one_sided=40,
    )
    sender = Sender(ME, LAYOUT, limits)
    sender.on_open(dataclasses.replace(TICKET, target_block_ids=tuple(range(count))), 100.0, 0.0)
    sender.on_push(1, 0, range(count), range(count))
    effects = connect(sender, lane, frame_blocks=said, verify="commit")
    assert [blocks / third for _, blocks in sizes(effects)] == wanted
    # Another connection may be to a release that takes fewer.
    sender.on_link_lost(PEER, 1.0)
    sender.on_tick(2.0)
    again = sizes(connect(sender, lane, 2.0))
    assert max(blocks for _, blocks in again) <= LEAST_BLOCKS_PER_FRAME
    assert sum(blocks for _, blocks in again) == count


def test_a_receiver_that_does_not_say_takes_what_each_release_takes() -> None:
    welcome = frames.Welcome(DECODE, "zmq", b"", 1, "off", frame_blocks=MAX_BLOCKS_PER_FRAME)
    assert frames.decode(frames.encode(welcome)) == welcome
    body = msgpack.unpackb(frames.encode(welcome)[:-SEAL_BYTES])
    assert body.pop("frame_blocks") == MAX_BLOCKS_PER_FRAME
    earlier = frames.decode(seal(msgpack.packb(body)))
    assert earlier == dataclasses.replace(welcome, frame_blocks=LEAST_BLOCKS_PER_FRAME)


def test_a_block_of_a_larger_layer_takes_more_of_the_window() -> None:
    """A block is 128 bytes in the first layer, and 1024 in the second."""
    layout = KVLayout.of_layers(
        (LayerShape(2, 1, 8), LayerShape(1, 1, 128)),
        model_digest="m",
        block_size=4,
        dtype="float16",
    )
    limits = Limits(window_bytes=2560, max_frame_bytes=256)
    sender = Sender(ME, layout, limits)
    ticket = dataclasses.replace(TICKET, fingerprint=layout.fingerprint)
    sender.on_open(ticket, 100.0, 0.0)
    for layer in range(2):
        sender.on_push(1, layer, range(4), range(4))
    sent = connect(sender, "zmq")
    assert sizes(sent) == [(0, 2), (0, 2), (1, 1), (1, 1)]
    assert sender.in_flight_bytes == {PEER: 2 * 256 + 2 * 1024}
    # One frame of each layer makes room for a larger one.
    sent = sender.on_frame(PEER, frames.Ack(2), 0.0)
    assert sizes(sent) == []
    sent = sender.on_frame(PEER, frames.Ack(3), 0.0)
    assert sizes(sent) == [(1, 1)]
    assert sender.in_flight_bytes == {PEER: 2 * 1024}


def test_chunks_of_a_larger_layer_are_joined_by_their_bytes() -> None:
    layout = KVLayout.of_layers(
        (LayerShape(1, 1, 8), LayerShape(1, 1, 128)),
        model_digest="m",
        block_size=4,
        dtype="float16",
    )
    limits = Limits(window_bytes=8192, max_frame_bytes=1024, max_joined=4)
    sender = Sender(ME, layout, limits)
    sender.on_open(dataclasses.replace(TICKET, fingerprint=layout.fingerprint), 100.0, 0.0)
    sender.on_push(1, 1, range(8), range(8))
    # As large as what is in flight before it: 1024, 1024, 2048, 4096 bytes.
    assert sizes(connect(sender, "zmq")) == [(1, 1), (1, 1), (1, 2), (1, 4)]
