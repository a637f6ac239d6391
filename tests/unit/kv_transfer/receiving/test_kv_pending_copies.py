"""The receiving machine and lanes whose copies are completed later."""

from __future__ import annotations

from kv_transfer.contract import Landed, LandingFailed, Released
from kv_transfer.receiving.effects import ReceiverEffect, SendBack, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.wire import frames
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    events,
    ticket,
)

PIECES = [(layer, ordinal) for layer in range(LAYOUT.num_layers) for ordinal in range(2)]


def machine() -> Receiver:
    made = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify="off")
    made.on_expect(ticket(), 10.0, 0.0)
    return made


def connect(made: Receiver, session: bytes) -> None:
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"shm": b""}, "off")
    made.on_frame(session, greeting, [], 0.0)
    made.on_lane(session, "shm", b"")
    made.on_frame(session, BEGIN, [], 0.0)


def send(made: Receiver, session: bytes, *, wants_ack: bool = False) -> list[Write]:
    """Send every piece in a frame of its own; return what is to be copied."""
    writes = []
    for seq, (layer, ordinal) in enumerate(PIECES):
        frame = frames.Data(seq, 1, 3, layer, (ordinal,), (), (0,), b"", wants_ack)
        effects = made.on_frame(session, frame, [], 0.0)
        assert acks(effects) == []
        writes += [effect for effect in effects if isinstance(effect, Write)]
    assert len(writes) == len(PIECES)
    return writes


def acks(effects: list[ReceiverEffect]) -> list[int]:
    frames_sent = [effect.frame for effect in effects if isinstance(effect, SendBack)]
    return [frame.consumed for frame in frames_sent if isinstance(frame, frames.Ack)]


def end(made: Receiver, write: Write) -> list[ReceiverEffect]:
    return made.on_written(write)


def test_frames_are_acknowledged_in_order_when_their_copies_are_over() -> None:
    made = machine()
    connect(made, b"a")
    writes = send(made, b"a", wants_ack=True)
    # What ends before an earlier one is acknowledged with it.
    given = [acks(end(made, write)) for write in reversed(writes)]
    assert given == [[]] * (len(writes) - 1) + [[len(writes)]]


def test_a_copy_of_an_earlier_connection_keeps_the_landing_open() -> None:
    """It might write after the sequence runs."""
    made = machine()
    connect(made, b"a")
    late = send(made, b"a")[0]
    connect(made, b"b")
    for write in send(made, b"b"):
        assert acks(end(made, write)) in ([], [len(PIECES)])
    assert events(made.on_frame(b"b", COMMIT, [], 0.0)) == []
    effects = end(made, late)
    assert events(effects) == []
    assert acks(effects) == []


def test_it_lands_with_the_last_of_them() -> None:
    made = machine()
    connect(made, b"a")
    earlier = send(made, b"a")
    connect(made, b"b")
    for write in send(made, b"b"):
        end(made, write)
    assert events(made.on_frame(b"b", COMMIT, [], 0.0)) == []
    ended = [event for write in earlier for event in events(end(made, write))]
    assert [type(event) for event in ended] == [Landed]


def test_what_ended_is_released_with_its_last_copy() -> None:
    made = machine()
    connect(made, b"a")
    first, *others = send(made, b"a")
    assert events(made.on_revoke(1)) == []
    for write in others:
        assert events(end(made, write)) == []
    assert events(end(made, first)) == [Released(1)]


def test_a_connection_that_writes_by_itself_does_not_take_over_what_is_copied() -> None:
    """Each of the two would have to be waited for; the attempt is repeated instead."""
    made = machine()
    connect(made, b"a")
    first, *others = send(made, b"a")
    made.on_frame(b"b", frames.Hello(SENDER, ME, LAYOUT, {"rdma": b""}, "off"), [], 0.0)
    made.on_lane(b"b", "rdma", b"")
    failed, *rest = events(made.on_frame(b"b", BEGIN, [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert rest == []
    for write in others:
        assert events(end(made, write)) == []
    assert events(end(made, first)) == [Released(1)]


def test_closing_releases_what_was_copied() -> None:
    """The lanes are closed before: no copy is under way any more."""
    made = machine()
    connect(made, b"a")
    send(made, b"a")
    failed, released = events(made.on_close())
    assert isinstance(failed, LandingFailed)
    assert released == Released(1)
