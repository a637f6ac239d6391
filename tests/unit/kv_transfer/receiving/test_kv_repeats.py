"""Pieces with a wrong checksum: asked for again within bounds, never counted before they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgpack  # type: ignore[import-untyped]
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Commit, Landed, LandingFailed, Released, TransferEnded
from kv_transfer.receiving.damaged import DamagedPieces
from kv_transfer.receiving.effects import Dropped, DropReason, ReceiverEffect, SendBack, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending.effects import SendChunk
from kv_transfer.shared.limits import (
    LEAST_BLOCKS_PER_FRAME,
    MAX_DAMAGED_HEADERS,
    MAX_REPEATS_PER_LANDING,
    MAX_REPEATS_PER_PIECE,
    MAX_REPEATS_PER_TRANSFER,
)
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import SEAL_BYTES, DamagedHeader, seal
from tests.support.kv import sender_events as sending
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    P,
    events,
    hello,
    receiver,
    replies,
    ticket,
)

LAYERS = dataclasses.replace(LAYOUT, num_layers=2)
SUMS = bytes(range(32))
BOTH = frames.Data(0, 1, 3, 0, (0, 1), (2,), (), SUMS)


def begun(*, can_repeat: bool = True, session: bytes = b"a") -> Receiver:
    """Return a machine whose landing of two blocks in one layer has begun."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    greet(machine, session, can_repeat=can_repeat)
    return machine


def greet(machine: Receiver, session: bytes, *, can_repeat: bool = True) -> None:
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto", can_repeat)
    machine.on_frame(session, greeting, [], 0.0)
    machine.on_lane(session, "zmq", b"")
    machine.on_frame(session, BEGIN, [], 0.0)


def write_of(machine: Receiver, frame: frames.Data, session: bytes = b"a") -> Write:
    sizes = [count * P for count in frame.runs for _ in "kv"]
    (write,) = (
        effect
        for effect in machine.on_frame(session, frame, sizes, 0.0)
        if isinstance(effect, Write)
    )
    return write


def repeats(effects: Iterable[ReceiverEffect]) -> list[frames.Repeat]:
    return [frame for frame in replies(list(effects)) if isinstance(frame, frames.Repeat)]


def one(seq: int, ordinal: int, sums: bytes) -> frames.Data:
    return frames.Data(seq, 1, 3, 0, (ordinal,), (1,), (), sums)


# The sums of each block in `SUMS`: its keys' and its values'.
SUM_0 = SUMS[0:8] + SUMS[16:24]
SUM_1 = SUMS[8:16] + SUMS[24:32]


def test_a_damaged_piece_is_asked_for_and_the_others_count() -> None:
    machine = begun()
    effects = machine.on_corrupt(write_of(machine, BOTH), {1}, "here")
    assert effects[:2] == [
        Dropped(DropReason.DAMAGED, "here"),
        SendBack(b"a", frames.Repeat(1, 3, 0, (1,))),
    ]
    assert not events(machine.on_written(write_of(machine, one(1, 1, SUM_1))))
    assert isinstance(events(machine.on_frame(b"a", COMMIT, [], 0.0))[0], Landed)


def test_it_does_not_land_without_the_piece() -> None:
    machine = begun()
    machine.on_corrupt(write_of(machine, BOTH), {1}, "here")
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    landed, *_ = events(machine.on_written(write_of(machine, one(1, 1, SUM_1))))
    assert isinstance(landed, Landed)


def test_a_commit_asks_again_for_what_did_not_come() -> None:
    """COMMIT follows the last acknowledgement, so the first REPEAT was lost."""
    machine = begun()
    machine.on_corrupt(write_of(machine, BOTH), {0, 1}, "here")
    asked = frames.Repeat(1, 3, 0, (0, 1))
    assert repeats(machine.on_frame(b"a", COMMIT, [], 0.0)) == [asked]
    machine.on_written(write_of(machine, dataclasses.replace(BOTH, seq=1)))
    assert machine.num_landings == 0


def test_a_piece_that_had_arrived_is_lost_when_a_damaged_frame_overwrites_it() -> None:
    """After a reconnect frames may be gathered otherwise, and bring a piece once more."""
    machine = begun()
    machine.on_written(write_of(machine, one(0, 1, SUM_1)))
    machine.on_corrupt(write_of(machine, dataclasses.replace(BOTH, seq=1)), {1}, "here")
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    landed, *_ = events(machine.on_written(write_of(machine, one(2, 1, SUM_1))))
    assert isinstance(landed, Landed)


def test_a_good_copy_that_a_damaged_one_overlapped_does_not_count() -> None:
    """A frame of a connection that broke was sent again: either copy may have written last."""
    machine = begun()
    good = write_of(machine, BOTH)
    damaged = write_of(machine, dataclasses.replace(BOTH, seq=1))
    assert repeats(machine.on_corrupt(damaged, {1}, "here")) == [frames.Repeat(1, 3, 0, (1,))]
    machine.on_written(good)
    again = write_of(machine, one(2, 1, SUM_1))
    # The COMMIT asks once more: it does not know that the piece is on its way.
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    landed, *_ = events(machine.on_written(again))
    assert isinstance(landed, Landed)


def test_a_repeated_piece_counts_while_the_overlapped_copy_runs_on() -> None:
    machine = begun()
    good = write_of(machine, BOTH)
    machine.on_corrupt(write_of(machine, dataclasses.replace(BOTH, seq=1)), {0}, "here")
    machine.on_written(write_of(machine, one(2, 0, SUM_0)))
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    assert isinstance(events(machine.on_written(good))[0], Landed)


def test_two_damaged_copies_that_overlap_spoil_each_other() -> None:
    machine = begun()
    writes = [write_of(machine, dataclasses.replace(BOTH, seq=seq)) for seq in range(2)]
    for ordinal, write in enumerate(writes):
        machine.on_corrupt(write, {ordinal}, "here")
    asked = frames.Repeat(1, 3, 0, (0, 1))
    assert repeats(machine.on_frame(b"a", COMMIT, [], 0.0)) == [asked]


def test_a_damaged_copy_spoils_no_other_layer() -> None:
    machine = Receiver(ME, LAYERS, LIMITS, num_blocks=4)
    machine.on_expect(dataclasses.replace(ticket(), fingerprint=LAYERS.fingerprint), 100.0, 0.0)
    greeting = frames.Hello(SENDER, ME, LAYERS, {"zmq": b""}, "auto", can_repeat=True)
    machine.on_frame(b"a", greeting, [], 0.0)
    machine.on_lane(b"a", "zmq", b"")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    frames_of = [dataclasses.replace(BOTH, seq=layer, layer=layer) for layer in range(2)]
    writes = [write_of(machine, frame) for frame in frames_of]
    machine.on_corrupt(writes[1], {0, 1}, "here")
    machine.on_written(writes[0])
    commit = dataclasses.replace(COMMIT, num_pieces=4)
    asked = frames.Repeat(1, 3, 1, (0, 1))
    assert repeats(machine.on_frame(b"a", commit, [], 0.0)) == [asked]
    write = write_of(machine, dataclasses.replace(BOTH, seq=2, layer=1))
    assert isinstance(events(machine.on_written(write))[0], Landed)


def test_a_sender_that_does_not_understand_it_fails_at_once() -> None:
    """A release before REPEAT sends no such field in its HELLO."""
    machine = begun(can_repeat=False)
    failed, released = events(machine.on_corrupt(write_of(machine, BOTH), {1}, "here"))
    assert isinstance(failed, LandingFailed)
    assert str(failed.error) == "bad checksum: here"
    assert released == Released(1)


def test_a_hello_of_an_earlier_release_is_understood() -> None:
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto")
    packed = msgpack.unpackb(frames.encode(greeting)[:-SEAL_BYTES])
    del packed["can_repeat"]
    assert frames.decode(seal(msgpack.packb(packed))) == greeting


def test_no_repeat_asks_for_more_than_every_release_takes() -> None:
    damaged, count = DamagedPieces(), 2 * LEAST_BLOCKS_PER_FRAME + 1
    for first in range(0, count, LEAST_BLOCKS_PER_FRAME):
        ordinals = tuple(range(first, min(count, first + LEAST_BLOCKS_PER_FRAME)))
        sums = bytes(16 * len(ordinals))
        damaged.ask(frames.Data(0, 1, 3, 0, ordinals, (len(ordinals),), (), sums), ordinals)
    asked = [ordinals for layer, ordinals in damaged.missing()]
    assert [len(ordinals) for ordinals in asked] == 2 * [LEAST_BLOCKS_PER_FRAME] + [1]
    assert [one for ordinals in asked for one in ordinals] == list(range(count))


def test_a_piece_is_asked_for_a_few_times() -> None:
    machine = begun()
    for seq in range(MAX_REPEATS_PER_PIECE):
        write = write_of(machine, one(seq, 1, SUM_1))
        assert len(repeats(machine.on_corrupt(write, {1}, "here"))) == 1
    write = write_of(machine, one(MAX_REPEATS_PER_PIECE, 1, SUM_1))
    assert isinstance(events(machine.on_corrupt(write, {1}, "here"))[0], LandingFailed)


def test_a_landing_asks_a_few_times_in_all() -> None:
    damaged = DamagedPieces()
    for ordinal in range(MAX_REPEATS_PER_LANDING):
        assert damaged.may_ask(0, [ordinal])
        damaged.ask(one(0, ordinal, SUM_1), [ordinal])
    assert not damaged.may_ask(0, [MAX_REPEATS_PER_LANDING])


@pytest.mark.parametrize("at", [0, 8])
def test_a_piece_that_comes_with_another_sum_fails_the_landing(at: int) -> None:
    """Its source has changed since it was sent first."""
    machine = begun()
    machine.on_corrupt(write_of(machine, BOTH), {1}, "here")
    changed = bytearray(SUM_1)
    changed[at] ^= 1
    effects = machine.on_frame(b"a", one(1, 1, bytes(changed)), [P, P], 0.0)
    assert not any(isinstance(effect, Write) for effect in effects)
    failed, *_ = events(effects)
    assert isinstance(failed, LandingFailed)
    assert "block 1 of the ticket in layer 0 was sent again with another sum" in str(failed.error)


def damaged_header() -> DamagedHeader:
    broken = bytearray(frames.encode(BEGIN))
    broken[-1] ^= 1
    with pytest.raises(DamagedHeader) as caught:
        frames.decode(bytes(broken))
    return caught.value


def test_a_damaged_header_ends_the_connection_and_nothing_else() -> None:
    machine = begun()
    machine.on_written(write_of(machine, one(0, 0, SUM_1)))
    effects = machine.on_malformed(b"a", damaged_header())
    assert events(effects) == []
    (refused,) = replies(effects)
    assert isinstance(refused, frames.Rejected)
    assert refused.code == frames.NO_SESSION
    assert machine.num_sessions == 0
    greet(machine, b"b")
    machine.on_written(write_of(machine, one(0, 1, SUM_1), b"b"))
    assert isinstance(events(machine.on_frame(b"b", COMMIT, [], 0.0))[0], Landed)


def test_a_copy_found_damaged_between_two_connections_is_asked_for_on_the_next_one() -> None:
    """The piece may have been acknowledged before, and then its sender does not send it again."""
    machine = begun()
    machine.on_written(write_of(machine, one(0, 1, SUM_1)))
    write = write_of(machine, dataclasses.replace(BOTH, seq=1))
    machine.on_malformed(b"a", damaged_header())
    assert machine.on_corrupt(write, {1}, "here") == [Dropped(DropReason.DAMAGED, "here")]
    greet(machine, b"b")
    asked = frames.Repeat(1, 3, 0, (1,))
    assert repeats(machine.on_frame(b"b", COMMIT, [], 0.0)) == [asked]
    landed, *_ = events(machine.on_written(write_of(machine, one(0, 1, SUM_1), b"b")))
    assert isinstance(landed, Landed)


def test_a_landing_whose_headers_are_always_damaged_fails() -> None:
    machine = begun(session=b"0")
    for number in range(MAX_DAMAGED_HEADERS):
        assert not events(machine.on_malformed(b"%d" % number, damaged_header()))
        greet(machine, b"%d" % (number + 1))
    failed, _ = events(machine.on_malformed(b"%d" % MAX_DAMAGED_HEADERS, damaged_header()))
    assert isinstance(failed, LandingFailed)


def test_a_stranger_with_a_damaged_header_gets_no_answer() -> None:
    machine = begun()
    assert replies(machine.on_malformed(b"x", damaged_header())) == []
    assert machine.num_sessions == 1


def test_a_damaged_header_of_a_one_sided_writer_keeps_its_blocks() -> None:
    """It may still write: its landing fails when it comes back, and waits for a fence."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a", lane="rdma")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    machine.on_malformed(b"a", damaged_header())
    hello(machine, b"b", lane="rdma")
    (failed,) = events(machine.on_frame(b"b", BEGIN, [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert machine.num_quarantined_blocks == 2


# The sender.


def test_the_sender_sends_damaged_pieces_again_before_it_commits() -> None:
    machine = sending.ready(sending.ticket())
    sending.push(machine, 1, 0)
    machine.on_commit(1, Commit(num_tokens=8, first_token_id=1))
    effects = machine.on_frame(sending.PEER, frames.Repeat(1, 3, 0, (1,)), 0.1)
    (chunk,) = (effect for effect in effects if isinstance(effect, SendChunk))
    found = chunk.chunk.ordinals.tolist(), chunk.chunk.source_blocks.tolist()
    assert (chunk.seq, *found) == (2, [1], [6])
    assert sending.sent(machine.on_frame(sending.PEER, frames.Ack(2), 0.1)) == []
    (commit,) = sending.sent(machine.on_frame(sending.PEER, frames.Ack(3), 0.1))
    assert isinstance(commit, frames.CommitFrame)
    assert commit.num_pieces == 2


def test_pieces_asked_for_after_the_commit_are_sent_and_no_second_commit() -> None:
    machine = sending.ready(sending.ticket())
    sending.push(machine, 1, 0)
    machine.on_commit(1, Commit(num_tokens=8, first_token_id=1))
    machine.on_frame(sending.PEER, frames.Ack(2), 0.1)
    effects = machine.on_frame(sending.PEER, frames.Repeat(1, 3, 0, (0, 1)), 0.2)
    assert [seq for seq, _, _ in sending.chunks(effects)] == [2, 3]
    assert sending.sent(machine.on_frame(sending.PEER, frames.Ack(4), 0.3)) == []
    assert sending.ends(machine.on_frame(sending.PEER, frames.Committed(1, 3), 0.4)) == [
        TransferEnded(1, None)
    ]


@pytest.mark.parametrize(
    ("layer", "ordinals"), [(1, (0,)), (0, (2,)), (99, (0,)), (0, ()), (0, (0, 7))]
)
def test_pieces_that_were_not_sent_cannot_be_asked_for(
    layer: int, ordinals: tuple[int, ...]
) -> None:
    machine = sending.ready(sending.ticket())
    sending.push(machine, 1, 0)
    effects = machine.on_frame(sending.PEER, frames.Repeat(1, 3, layer, ordinals), 0.1)
    (ended,) = sending.ends(effects)
    assert isinstance(ended, TransferEnded)
    assert "pieces that were not sent" in str(ended.error)


def test_a_peer_that_asks_for_ever_is_given_up() -> None:
    machine = sending.ready(sending.ticket())
    sending.push(machine, 1, 0)
    for _ in range(MAX_REPEATS_PER_TRANSFER):
        assert not sending.ends(machine.on_frame(sending.PEER, frames.Repeat(1, 3, 0, (1,)), 0.1))
    (ended,) = sending.ends(machine.on_frame(sending.PEER, frames.Repeat(1, 3, 0, (1,)), 0.1))
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, HandoffFailed)


def test_a_transfer_that_is_over_or_aborted_sends_nothing_again() -> None:
    machine = sending.ready(sending.ticket(1), sending.ticket(2))
    sending.push(machine, 1, 0)
    machine.on_abort(1, 0.1)
    assert machine.on_frame(sending.PEER, frames.Repeat(1, 3, 0, (1,)), 0.1) == []
    effects = machine.on_frame(sending.PEER, frames.Repeat(7, 3, 0, (1,)), 0.1)
    assert sending.sent(effects) == [frames.Abort(7, 3)]
    assert not sending.ends(effects)


def test_a_repeat_that_comes_after_its_connection_is_not_answered() -> None:
    machine = sending.ready(sending.ticket())
    machine.on_link_lost(sending.PEER, 0.1)
    assert machine.on_frame(sending.PEER, frames.Repeat(7, 3, 0, (1,)), 0.1) == []


def test_a_damaged_answer_opens_the_connection_again_and_not_for_ever() -> None:
    machine = sending.ready(sending.ticket())
    for _ in range(MAX_DAMAGED_HEADERS):
        assert not sending.ends(machine.on_damaged_header(sending.PEER, damaged_header(), 1.0))
        machine.on_tick(1.1)
        sending.welcome(machine, 1.1)
    (ended,) = sending.ends(machine.on_damaged_header(sending.PEER, damaged_header(), 2.0))
    assert isinstance(ended, TransferEnded)
    assert "checksum" in str(ended.error)
