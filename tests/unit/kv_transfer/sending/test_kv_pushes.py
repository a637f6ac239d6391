"""Pushes of any size: prepared in parts, as they are sent; and what is wrong with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Commit, TransferEnded
from kv_transfer.sending.effects import SendChunk, SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer import Transfer
from kv_transfer.shared.limits import MAX_BLOCKS_PER_PART, Limits
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    DECODE,
    LAYOUT,
    ME,
    PAIR_BYTES,
    PEER,
    chunks,
    ends,
    sent,
    ticket,
)

NUM_BLOCKS = 2 * MAX_BLOCKS_PER_PART + 7
WINDOW_BLOCKS = 64
LIMITS = Limits(window_bytes=WINDOW_BLOCKS * PAIR_BYTES, max_frame_bytes=16 * PAIR_BYTES)
COMMIT = Commit(num_tokens=NUM_BLOCKS * LAYOUT.block_size, first_token_id=7)


class Sending:
    """A sender on a welcomed link whose peer acknowledges when it is told to."""

    def __init__(self, *, num_source_blocks: int = NUM_BLOCKS) -> None:
        self.sender = Sender(ME, LAYOUT, LIMITS, num_source_blocks)
        for token in (1, 2):
            self.sender.on_open(ticket(token, NUM_BLOCKS), 100.0, 0.0)
        self.sender.hello(PEER, {"zmq": b""}, "off")
        welcome = frames.Welcome(DECODE, "zmq", b"", LIMITS.window_bytes, "off")
        self.sender.on_frame(PEER, welcome, 0.0)
        self.num_sent = 0

    def transfer(self, token: int) -> Transfer:
        return self.sender.link_of[token].transfers[token]

    def push(self, token: int, layer: int = 0) -> list[SenderEffect]:
        return self.counted(self.sender.on_push(token, layer, range(NUM_BLOCKS), range(NUM_BLOCKS)))

    def acknowledge(self) -> list[SenderEffect]:
        return self.counted(self.sender.on_frame(PEER, frames.Ack(self.num_sent), 0.1))

    def counted(self, effects: list[SenderEffect]) -> list[SenderEffect]:
        self.num_sent += len(chunks(effects))
        return effects


def pieces(effects: list[SenderEffect]) -> list[tuple[int, int, int]]:
    """Return (layer, ordinal, source block) of what is sent, in order."""
    found = [effect.chunk for effect in effects if isinstance(effect, SendChunk)]
    return [
        (chunk.layer, ordinal, block)
        for chunk in found
        for ordinal, block in zip(chunk.ordinals, chunk.source_blocks, strict=True)
    ]


def test_a_large_push_is_prepared_little_further_than_the_window() -> None:
    sending = Sending()
    for layer in range(LAYOUT.num_layers):
        sending.push(1, layer)
    assert sending.transfer(1).num_pushed == MAX_BLOCKS_PER_PART
    assert sending.transfer(1).num_remaining == LAYOUT.num_layers * NUM_BLOCKS


def test_the_other_transfers_of_a_peer_have_their_turns_beside_a_large_push() -> None:
    sending = Sending()
    sending.push(1)
    sending.counted(sending.sender.on_push(2, 0, [0], [7]))
    assert 2 in [token for _, token, _ in chunks(sending.acknowledge())]


@pytest.mark.covers("F23")
def test_all_parts_are_sent_once_and_the_commit_behind_the_last() -> None:
    """A piece that is pushed again is not sent again, in whichever part it is."""
    sending = Sending()
    found = pieces(sending.push(1))
    found += pieces(sending.push(1))
    sending.sender.on_commit(1, COMMIT)
    effects: list[SenderEffect] = []
    for _ in range(NUM_BLOCKS):
        if any(isinstance(frame, frames.CommitFrame) for frame in sent(effects)):
            break
        effects = sending.acknowledge()
        found += pieces(effects)
    assert found == [(0, block, block) for block in range(NUM_BLOCKS)]
    [commit] = [frame for frame in sent(effects) if isinstance(frame, frames.CommitFrame)]
    assert commit.num_pieces == NUM_BLOCKS
    assert not chunks(effects)
    assert sending.transfer(1).num_remaining == 0


def test_nothing_of_a_large_push_is_sent_behind_an_abort() -> None:
    sending = Sending()
    sending.push(1)
    assert sent(sending.sender.on_abort(1, 0.0)) == [frames.Abort(1, 3)]
    sending.push(1, 1)
    assert not chunks(sending.acknowledge())
    assert not sending.transfer(1).has_pieces
    assert sending.transfer(1).num_remaining <= MAX_BLOCKS_PER_PART


@pytest.mark.parametrize("has_broken", [False, True])
def test_a_wrong_block_in_a_later_part_ends_the_transfer_there(has_broken: bool) -> None:
    """Nothing is sent any more, on no connection; the next tick tells of it."""
    bad = NUM_BLOCKS - 1
    sending = Sending(num_source_blocks=bad)
    found = pieces(sending.push(1))
    while (transfer := sending.transfer(1)).misuse is None:
        assert len(found) < NUM_BLOCKS
        found += pieces(sending.acknowledge())
    assert bad not in [block for _, _, block in found]
    assert not sending.sender.is_sending(1)
    assert sending.sender.next_deadline_s() == 0.0
    if has_broken:
        sending.sender.on_link_lost(PEER, 0.2)
        assert not transfer.has_pieces
    effects = sending.sender.on_tick(0.2)
    [ended] = ends(effects)
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, HandoffFailed)
    assert f"source block {bad}: wanted 0 to {bad - 1}" in str(ended.error)
    assert sending.sender.num_transfers == 1
    assert sent(effects) == ([] if has_broken else [frames.Abort(1, 3)])


@pytest.mark.parametrize(
    "blocks",
    [(1.5,), (None,), ("a",), (1 << 40,), np.array([-1]), np.array([-1], np.int8), np.array([0.5])],
)
def test_what_is_no_block_ends_the_transfer_and_not_the_thread(blocks: Any) -> None:
    sending = Sending()
    sending.sender.on_push(1, 0, (0,), blocks)
    assert "source block" in str(sending.transfer(1).misuse)
    [ended] = ends(sending.sender.on_tick(0.1))
    assert isinstance(ended, TransferEnded)


def test_misuse_is_told_of_before_the_peer_answers() -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 100.0, 0.0)
    assert sender.on_tick(0.0) == []
    assert sender.on_push(1, 0, [0], []) == []
    assert sender.next_deadline_s() == 0.0
    [ended] = ends(sender.on_tick(0.1))
    assert "1 ordinals for 0 source blocks" in str(getattr(ended, "error", ""))


def test_chunks_are_whole_across_parts() -> None:
    """A part holds no remainder that would leave in a frame of its own."""
    in_chunk = 7
    limits = Limits(window_bytes=1 << 30, max_frame_bytes=in_chunk * PAIR_BYTES, max_joined=1)
    sender = Sender(ME, LAYOUT, limits)
    sender.on_open(ticket(1, NUM_BLOCKS), 100.0, 0.0)
    sender.on_push(1, 0, range(NUM_BLOCKS), range(NUM_BLOCKS))
    sender.hello(PEER, {"zmq": b""}, "off")
    effects = sender.on_frame(PEER, frames.Welcome(DECODE, "zmq", b"", 1 << 30, "off"), 0.0)
    sizes = [len(one.chunk.ordinals) for one in effects if isinstance(one, SendChunk)]
    assert set(sizes) == {in_chunk}
    assert len(sizes) * in_chunk > MAX_BLOCKS_PER_PART


def test_as_many_chunks_are_prepared_as_a_frame_may_join() -> None:
    joined = 40
    limits = Limits(window_bytes=1 << 30, max_frame_bytes=PAIR_BYTES, max_joined=joined)
    sender = Sender(ME, LAYOUT, limits)
    sender.on_open(ticket(1, 8 * joined), 100.0, 0.0)
    for first in range(0, 8 * joined, 2):
        sender.on_push(1, 0, [first, first + 1], [first, first + 1])
    sender.hello(PEER, {"zmq": b""}, "off")
    effects = sender.on_frame(PEER, frames.Welcome(DECODE, "zmq", b"", 1 << 30, "off"), 0.0)
    sizes = [len(one.chunk.ordinals) for one in effects if isinstance(one, SendChunk)]
    assert sizes == [1, 1, 2, 4, 8, 16, 32, *6 * [joined], 16]


def test_pieces_that_were_not_sent_are_not_repeated_after_misuse() -> None:
    sending = Sending()
    sending.push(1)
    sending.sender.on_push(1, LAYOUT.num_layers, [0], [0])
    assert sending.sender.on_frame(PEER, frames.Repeat(1, 3, 0, (0,)), 0.1) == []
    assert not chunks(sending.acknowledge())
    [ended] = ends(sending.sender.on_tick(0.2))
    assert "layer 4: wanted 0 to 3" in str(getattr(ended, "error", ""))
