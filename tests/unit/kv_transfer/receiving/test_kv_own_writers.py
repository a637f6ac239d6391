"""Landings whose sender writes by itself, or is about to, and whose connection has broken."""

from __future__ import annotations

import pytest

from kv_transfer.contract import GivenUp, LandingFailed
from kv_transfer.receiving.effects import ReceiverEffect, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader
from tests.support.kv.receiver_events import (
    BEGIN,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    events,
    replies,
    ticket,
)

NUM_BLOCKS = len(ticket().target_block_ids)
ABORT = frames.Abort(BEGIN.lease_token, BEGIN.generation)


def machine() -> Receiver:
    made = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify="off")
    made.on_expect(ticket(), 10.0, 0.0)
    return made


def begin(made: Receiver, session: bytes, lane: str) -> list[ReceiverEffect]:
    """Connect over the lane, and begin the landing there."""
    made.on_frame(session, frames.Hello(SENDER, ME, LAYOUT, {lane: b""}, "off"), [], 0.0)
    made.on_lane(session, lane, b"")
    return made.on_frame(session, BEGIN, [], 0.0)


def read(made: Receiver, session: bytes) -> Write:
    """Begin to copy a piece over the lane `rdma_read`."""
    data = frames.Data(0, 1, 3, 0, (0,), (), (0,), b"", True)
    (write,) = made.on_frame(session, data, [], 0.0)
    assert isinstance(write, Write)
    return write


def assert_broken(made: Receiver, effects: list[ReceiverEffect]) -> None:
    (failed,) = events(effects)
    assert isinstance(failed, LandingFailed)
    assert "the connection of p#5 broke while it wrote" in str(failed.error)
    assert any(isinstance(reply, frames.Failed) for reply in replies(effects))
    assert made.num_landings == 0


@pytest.mark.parametrize("lane", ["zmq", "rdma_read", "rdma"])
def test_what_a_sender_wrote_by_itself_goes_on_over_no_other_connection(lane: str) -> None:
    """Its writes of the first connection may still arrive, over whatever comes later."""
    made = machine()
    assert events(begin(made, b"a", "rdma")) == []
    assert_broken(made, begin(made, b"b", lane))
    assert made.num_quarantined_blocks == NUM_BLOCKS


def test_a_sender_that_will_write_by_itself_waits_for_no_copy_of_before() -> None:
    made = machine()
    begin(made, b"a", "rdma_read")
    read(made, b"a")
    assert_broken(made, begin(made, b"b", "rdma"))


@pytest.mark.parametrize("lane", ["zmq", "rdma_read"])
def test_a_copy_of_before_ends_no_landing_that_goes_on_by_copies(lane: str) -> None:
    made = machine()
    begin(made, b"a", "rdma_read")
    read(made, b"a")
    assert events(begin(made, b"b", lane)) == []
    assert made.num_landings == 1


def test_without_a_copy_of_before_a_sender_may_go_on_by_itself() -> None:
    made = machine()
    begin(made, b"a", "rdma_read")
    assert events(begin(made, b"b", "rdma")) == []
    assert made.num_landings == 1


def test_an_abort_on_an_interrupted_connection_ends_what_is_copied_from_there() -> None:
    made = machine()
    begin(made, b"a", "zmq")
    made.on_malformed(b"a", DamagedHeader("header: wrong checksum"))
    failed, _ = events(made.on_frame(b"a", ABORT, [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert isinstance(failed.error, GivenUp)


def test_an_abort_on_an_interrupted_connection_ends_nothing_that_its_sender_writes() -> None:
    """Its last writes may arrive later: the landing waits until the sender is back, or is gone."""
    made = machine()
    begin(made, b"a", "rdma")
    made.on_malformed(b"a", DamagedHeader("header: wrong checksum"))
    assert events(made.on_frame(b"a", ABORT, [], 0.0)) == []
    assert (made.num_landings, made.num_quarantined_blocks) == (1, 0)


@pytest.mark.parametrize("lane", ["zmq", "rdma"])
def test_an_abort_on_a_connection_that_the_landing_has_left_ends_nothing(lane: str) -> None:
    made = machine()
    begin(made, b"a", "zmq")
    made.on_malformed(b"a", DamagedHeader("header: wrong checksum"))
    begin(made, b"b", lane)
    assert events(made.on_frame(b"a", ABORT, [], 0.0)) == []
    assert made.num_landings == 1
