"""The receiving machine where a lane could not get the bytes of a frame."""

from __future__ import annotations

from common.errors import HandoffFailed
from kv_transfer.contract import GivenUp, Landed, LandingFailed, Released
from kv_transfer.receiving.effects import CloseLane, Dropped, DropReason, ReceiverEffect, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.limits import MAX_DAMAGED_HEADERS
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    events,
    replies,
    ticket,
)

LOST = HandoffFailed("a read of 16 bytes at p:1 failed")


def machine() -> Receiver:
    made = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify="off")
    made.on_expect(ticket(), 10.0, 0.0)
    return made


def connect(made: Receiver, session: bytes, lane: str = "rdma_read") -> None:
    made.on_frame(session, frames.Hello(SENDER, ME, LAYOUT, {lane: b""}, "off"), [], 0.0)
    made.on_lane(session, lane, b"")
    made.on_frame(session, BEGIN, [], 0.0)


def read(made: Receiver, session: bytes, seq: int, *, wants_ack: bool = True) -> Write:
    data = frames.Data(seq, 1, 3, 0, (seq,), (), (seq,), b"", wants_ack)
    (write,) = made.on_frame(session, data, [], 0.0)
    assert isinstance(write, Write)
    return write


def reasons(effects: list[ReceiverEffect]) -> list[DropReason]:
    return [effect.reason for effect in effects if isinstance(effect, Dropped)]


def test_the_lane_is_verified_at_commit_at_least() -> None:
    made = machine()
    made.on_frame(b"a", frames.Hello(SENDER, ME, LAYOUT, {"rdma_read": b""}, "off"), [], 0.0)
    (welcome,) = replies(made.on_lane(b"a", "rdma_read", b""))
    assert isinstance(welcome, frames.Welcome)
    assert welcome.verify == "commit"


def test_a_frame_that_was_not_read_ends_its_connection_and_is_not_acknowledged() -> None:
    made = machine()
    connect(made, b"a")
    effects = made.on_unread(read(made, b"a", 0), LOST)
    assert reasons(effects) == [DropReason.UNREAD]
    (refusal,) = replies(effects)
    assert isinstance(refusal, frames.Rejected)
    assert (refusal.code, refusal.message) == (frames.NO_SESSION, str(LOST))
    assert CloseLane(b"a", "rdma_read") in effects
    assert events(effects) == []
    assert (made.num_sessions, made.num_landings) == (0, 1)


def test_its_landing_goes_on_over_another_lane() -> None:
    made = machine()
    connect(made, b"a")
    lost, other = read(made, b"a", 0), read(made, b"a", 1)
    made.on_unread(lost, LOST)
    connect(made, b"b", "zmq")
    again = [begin_copy_unsummed(made, seq) for seq in (0, 1)]
    for write in again:
        assert events(made.on_written(write)) == []
    assert events(made.on_frame(b"b", COMMIT, [], 0.0)) == [], "the other read is under way"
    effects = made.on_unread(other, LOST)
    assert [type(event) for event in events(effects)] == [Landed]
    assert made.num_sessions == 1, "a late loss of the first connection ends not the second one"


def begin_copy_unsummed(made: Receiver, seq: int) -> Write:
    data = frames.Data(seq, 1, 3, 0, (seq,), (1,), (), b"", False)
    (write,) = made.on_frame(b"b", data, [LAYOUT.piece_bytes] * 2, 0.0)
    assert isinstance(write, Write)
    return write


def test_one_connection_ends_once_for_all_of_its_reads() -> None:
    made = machine()
    connect(made, b"a")
    first, second = read(made, b"a", 0), read(made, b"a", 1)
    assert len(replies(made.on_unread(first, LOST))) == 1
    assert replies(made.on_unread(second, LOST)) == []


def test_a_session_that_has_the_same_id_is_another_one() -> None:
    made = machine()
    connect(made, b"a")
    late = read(made, b"a", 0)
    made.on_malformed(b"a", DamagedHeader("header: wrong checksum"))
    connect(made, b"a")
    assert replies(made.on_unread(late, LOST)) == []
    assert made.num_sessions == 1


def test_a_landing_that_ended_meanwhile_is_released_when_the_read_is_over() -> None:
    made = machine()
    connect(made, b"a")
    write = read(made, b"a", 0)
    assert events(made.on_revoke(1)) == []
    assert made.num_quarantined_blocks == 2
    assert events(made.on_unread(write, LOST)) == [Released(1)]
    assert made.num_quarantined_blocks == 0


def test_a_sender_that_does_not_come_back_is_not_waited_for_long() -> None:
    made = machine()
    connect(made, b"a")
    made.on_unread(read(made, b"a", 0), LOST)
    assert events(made.on_tick(LIMITS.peer_timeout_s - 0.1)) == []
    failed, released = events(made.on_tick(LIMITS.peer_timeout_s))
    assert isinstance(failed, LandingFailed)
    assert released == Released(1)


def test_a_sender_that_is_ending_may_still_abort_on_the_connection_that_ended() -> None:
    """Its ring is gone, so the read fails; what it said before counts."""
    made = machine()
    connect(made, b"a")
    made.on_unread(read(made, b"a", 0), LOST)
    for stranger in (b"b", b""):
        assert events(made.on_frame(stranger, frames.Abort(1, 3), [], 0.0)) == []
    failed, released = events(made.on_frame(b"a", frames.Abort(1, 3), [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert isinstance(failed.error, GivenUp)
    assert released == Released(1)
    assert reasons(made.on_frame(b"a", frames.Abort(1, 3), [], 0.0)) == [DropReason.NO_SESSION]


def test_a_landing_that_loses_again_and_again_fails() -> None:
    made = machine()
    for number in range(MAX_DAMAGED_HEADERS):
        session = b"%d" % number
        connect(made, session)
        assert events(made.on_unread(read(made, session, 0), LOST)) == []
    connect(made, b"last")
    failed, *_ = events(made.on_unread(read(made, b"last", 0), LOST))
    assert isinstance(failed, LandingFailed)
    assert failed.error is LOST
