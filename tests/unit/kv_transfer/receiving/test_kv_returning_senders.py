"""What becomes of sessions and landings when a sender comes back, late, changed or not at all."""

from __future__ import annotations

import pytest

from common.errors import PeerProtocolError
from common.ids import Incarnation
from kv_transfer.contract import LandingFailed, Released
from kv_transfer.receiving.effects import OpenLane, SendBack
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.limits import MAX_WAIT_S
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader
from tests.support.kv.receiver_events import (
    BEGIN,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    begin_copy,
    events,
    hello,
    receiver,
    replies,
    ticket,
)

NEXT_LIFE = Incarnation(SENDER.node_id, SENDER.epoch + 1)


def greet(machine: Receiver, session: bytes, number: int) -> frames.Frame:
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto", number=number)
    *_, effect = machine.on_frame(session, greeting, [], 0.0)
    if isinstance(effect, OpenLane):
        (effect,) = machine.on_lane(session, "zmq", b"")
    assert isinstance(effect, SendBack)
    return effect.frame


def begun() -> Receiver:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    return machine


def interrupt(machine: Receiver) -> None:
    """End the session by a header with a wrong checksum."""
    machine.on_malformed(b"a", DamagedHeader("header: wrong checksum"))
    assert machine.num_landings == 1
    assert machine.num_sessions == 0


def test_a_late_hello_of_an_abandoned_connection_replaces_nothing() -> None:
    machine = receiver(ticket())
    assert isinstance(greet(machine, b"new", 2), frames.Welcome)
    machine.on_frame(b"new", BEGIN, [], 0.0)
    refused = greet(machine, b"old", 1)
    assert isinstance(refused, frames.Rejected)
    assert "HELLO is from connection 1 of p#5, which has connection 2" in refused.message
    begin_copy(machine, b"new", 0, 0)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 3), (0, 0), (7, 0)])
def test_a_later_connection_replaces_the_one_before(first: int, second: int) -> None:
    """Every connection of an earlier release (0) counts as later."""
    machine = receiver()
    assert isinstance(greet(machine, b"a", first), frames.Welcome)
    assert isinstance(greet(machine, b"b", second), frames.Welcome)
    assert machine.num_sessions == 1
    assert replies(machine.on_frame(b"b", frames.Ping(()), [], 0.0))[0] == frames.Pong()


def test_numbers_begin_again_in_another_life() -> None:
    machine = receiver()
    greet(machine, b"a", 9)
    greeting = frames.Hello(NEXT_LIFE, ME, LAYOUT, {"zmq": b""}, "auto", number=1)
    assert any(isinstance(one, OpenLane) for one in machine.on_frame(b"b", greeting, [], 0.0))


def test_landings_of_a_sender_that_comes_back_without_a_usable_lane_fail() -> None:
    machine = begun()
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"teleport": b""}, "auto")
    machine.on_frame(b"b", greeting, [], 1.0)
    failed, released = events(machine.on_lane(b"b", "", b"", ("teleport",)))
    assert isinstance(failed, LandingFailed)
    assert released == Released(1)


def test_landings_of_a_process_that_restarts_after_a_damaged_header_fail() -> None:
    machine = begun()
    interrupt(machine)
    greeting = frames.Hello(NEXT_LIFE, ME, LAYOUT, {"zmq": b""}, "auto")
    failed, released = events(machine.on_frame(b"b", greeting, [], 0.5))
    assert isinstance(failed, LandingFailed)
    assert "p#5 restarted" in str(failed.error)
    assert released == Released(1)


def test_landings_of_a_sender_that_does_not_come_back_after_a_damaged_header_fail() -> None:
    machine = begun()
    interrupt(machine)
    at_s = LIMITS.peer_timeout_s
    machine.on_tick(at_s - MAX_WAIT_S)
    assert machine.next_deadline_s() == pytest.approx(at_s)
    assert events(machine.on_tick(at_s - 0.01)) == []
    failed, _ = events(machine.on_tick(at_s))
    assert isinstance(failed, LandingFailed)
    assert "did not connect again within" in str(failed.error)


def test_landings_of_a_sender_that_comes_back_go_on() -> None:
    machine = begun()
    interrupt(machine)
    hello(machine, b"b", now_s=0.5)
    machine.on_frame(b"b", BEGIN, [], 0.5)
    machine.on_tick(1.5)
    assert events(machine.on_tick(LIMITS.peer_timeout_s + 0.2)) == []
    begin_copy(machine, b"b", 0, 0)


def test_the_time_in_which_the_receiver_stood_still_is_not_held_against_a_sender() -> None:
    machine = begun()
    interrupt(machine)
    machine.on_tick(0.1)
    assert events(machine.on_tick(8.0)) == []
    assert events(machine.on_tick(8.0 + 1.0)) == []
    assert isinstance(events(machine.on_tick(8.0 + LIMITS.peer_timeout_s))[0], LandingFailed)


def test_other_malformed_messages_end_the_landings_at_once() -> None:
    machine = begun()
    effects = machine.on_malformed(b"a", PeerProtocolError("nonsense"))
    assert isinstance(events(effects)[0], LandingFailed)
