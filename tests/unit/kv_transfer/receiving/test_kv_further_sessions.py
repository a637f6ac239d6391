"""Further connections of a sender, as the receiver takes them."""

from __future__ import annotations

import dataclasses

import pytest

from common.ids import Incarnation
from kv_transfer.contract import Landed, LandingFailed
from kv_transfer.receiving.effects import Dropped, DropReason, OpenLane, SendBack
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.limits import BESIDE_WINDOWS, MAX_FRAMES_IN_FLIGHT
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    P,
    begin_copy,
    data,
    events,
    replies,
    ticket,
)

SUMS = bytes(16)
OTHER = Incarnation("other", 1)


def connected(wants: int = 4, grants: int = 3, lane: str = "zmq") -> tuple[Receiver, frames.Frame]:
    """Return a receiver with the first connection of a sender, and its WELCOME."""
    limits = dataclasses.replace(LIMITS, max_channels=grants)
    machine = Receiver(ME, LAYOUT, limits, num_blocks=4)
    machine.on_expect(ticket(), 10.0, 0.0)
    greeting = frames.Hello(SENDER, ME, LAYOUT, {lane: b""}, "auto", num_channels=wants)
    (opened,) = machine.on_frame(b"a", greeting, [], 0.0)
    assert isinstance(opened, OpenLane)
    (welcome,) = replies(machine.on_lane(b"a", lane, b""))
    return machine, welcome


def further(
    machine: Receiver,
    session: bytes,
    channel: int,
    group: bytes = b"a",
    sender: Incarnation = SENDER,
) -> frames.Frame:
    """Return the answer to the HELLO of a further connection."""
    greeting = frames.Hello(sender, ME, LAYOUT, {"zmq": b""}, "auto", channel=channel, group=group)
    *_, reply = machine.on_frame(session, greeting, [], 0.0)
    assert isinstance(reply, SendBack)
    return reply.frame


@pytest.mark.parametrize(
    ("wants", "grants", "wanted"), [(4, 3, 3), (2, 3, 2), (1, 3, 1), (0, 3, 1)]
)
def test_the_smaller_number_counts(wants: int, grants: int, wanted: int) -> None:
    _, welcome = connected(wants, grants)
    assert isinstance(welcome, frames.Welcome)
    assert (welcome.num_channels, welcome.group) == (wanted, b"a" if wanted > 1 else b"")


def test_bytes_that_go_another_way_need_one_connection() -> None:
    _, welcome = connected(lane="shm")
    assert isinstance(welcome, frames.Welcome)
    assert welcome.num_channels == 1


def test_releases_without_the_fields_have_one_connection() -> None:
    machine, _ = connected(wants=1)
    assert replies(machine.on_frame(b"a", BEGIN, [], 0.0)) == []
    assert isinstance(further(machine, b"b", 1), frames.Rejected)


@pytest.mark.parametrize(
    ("channel", "group", "sender"),
    [(3, b"a", SENDER), (1, b"x", SENDER), (1, b"a", OTHER), (1, b"b", SENDER)],
)
def test_a_connection_that_belongs_to_no_other_is_refused(
    channel: int, group: bytes, sender: Incarnation
) -> None:
    machine, _ = connected()
    further(machine, b"b", 2)
    refused = further(machine, b"c", channel, group, sender)
    assert isinstance(refused, frames.Rejected)
    assert refused.code == frames.NO_SESSION
    assert machine.num_sessions == 1


def test_without_files_no_further_connection_is_taken() -> None:
    machine, welcome = connected()
    further(machine, b"b", 1)
    machine.on_files(is_short=True)
    assert isinstance(further(machine, b"c", 2), frames.Rejected)
    # HELLO may come twice; and the same channel again would be one file more for a while.
    assert further(machine, b"b", 1) == welcome
    assert isinstance(further(machine, b"d", 1), frames.Rejected)
    assert further(machine, b"b", 1) == welcome
    machine.on_files(is_short=False)
    assert further(machine, b"c", 2) == welcome


def test_without_files_a_sender_that_comes_back_is_granted_one_connection() -> None:
    machine, _ = connected()
    machine.on_files(is_short=True)
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto", num_channels=4)
    machine.on_frame(b"new", greeting, [], 0.0)
    (welcome,) = replies(machine.on_lane(b"new", "zmq", b""))
    assert isinstance(welcome, frames.Welcome)
    assert welcome.num_channels == 1


def test_data_on_any_connection_fills_the_landing() -> None:
    machine, _ = connected()
    assert further(machine, b"b", 1) == connected()[1]
    assert replies(machine.on_frame(b"a", BEGIN, [], 0.0)) == [frames.Begun(1, 3)]
    for ordinal, session in enumerate((b"a", b"b")):
        machine.on_written(begin_copy(machine, session, 0, ordinal))
    assert isinstance(events(machine.on_frame(b"a", COMMIT, [], 0.0))[0], Landed)


def test_a_frame_without_bytes_may_come_before_the_abort_that_explains_it() -> None:
    """DATA is numbered on its connection, and the ABORT travels on the first one."""
    machine, _ = connected()
    further(machine, b"b", 1)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    empty = frames.Data(0, 1, 3, 0, (0,), (), (), b"", wants_ack=True)
    dropped, credit = machine.on_frame(b"b", empty, [], 0.0)
    assert isinstance(dropped, Dropped)
    assert credit == SendBack(b"b", frames.Ack(1, LIMITS.window_bytes))
    aborted, *_ = machine.on_frame(b"a", frames.Abort(1, 3), [], 0.0)
    assert aborted == SendBack(b"a", frames.Aborted(1, 3))


@pytest.mark.parametrize(
    ("session", "sizes", "sums"), [(b"a", [], b""), (b"b", [P, P], b""), (b"b", [], SUMS)]
)
def test_other_frames_that_do_not_name_their_bytes_break_the_protocol(
    session: bytes, sizes: list[int], sums: bytes
) -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    empty = frames.Data(0, 1, 3, 0, (0,), (), (), sums)
    failed, _ = events(machine.on_frame(session, empty, sizes, 0.0))
    assert isinstance(failed, LandingFailed)


def test_other_frames_on_a_further_connection_break_the_protocol() -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    effects = machine.on_frame(b"b", BEGIN, [], 0.0)
    (refused,) = replies(effects)
    assert isinstance(refused, frames.Rejected)
    assert "Begin on channel 1" in refused.message
    assert machine.num_sessions == 0


def test_a_ping_on_a_further_connection_is_answered_there_with_its_credit() -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    effects = machine.on_frame(b"b", frames.Ping(()), [], 0.0)
    assert [type(frame) for frame in replies(effects)] == [frames.Pong, frames.Ack]
    assert {effect.session for effect in effects if isinstance(effect, SendBack)} == {b"b"}


def test_a_damaged_header_ends_one_further_connection_and_no_landing() -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    machine.on_malformed(b"b", DamagedHeader("header: wrong checksum"))
    assert machine.num_sessions == machine.num_landings == 1
    dropped, _ = machine.on_frame(b"b", data(0, 0), [1], 0.0)
    assert isinstance(dropped, Dropped)
    assert dropped.reason is DropReason.NO_SESSION
    assert isinstance(further(machine, b"c", 1), frames.Welcome)
    begin_copy(machine, b"c", 0, 0)
    assert events(machine.on_tick(LIMITS.peer_timeout_s - 0.1)) == []


def test_a_later_connection_of_a_channel_replaces_the_one_before() -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    assert further(machine, b"b", 1) == further(machine, b"c", 1)
    (dropped, _) = machine.on_frame(b"b", data(0, 0), [1], 0.0)
    assert isinstance(dropped, Dropped)


def test_further_connections_end_with_the_first() -> None:
    machine, _ = connected()
    further(machine, b"b", 1)
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto", num_channels=4)
    machine.on_frame(b"new", greeting, [], 0.0)
    for stale in (b"a", b"b"):
        (dropped, _) = machine.on_frame(stale, data(0, 0), [1], 0.0)
        assert isinstance(dropped, Dropped)
    assert isinstance(further(machine, b"c", 1, b"a"), frames.Rejected)


def flood(machine: Receiver, *sessions: bytes, blocks: tuple[int, ...]) -> tuple[int, str]:
    """Send frames of these blocks, which nobody copies; return how many passed, and the refusal."""
    sizes = [len(blocks) * P] * 2
    for number in range(10 * MAX_FRAMES_IN_FLIGHT):
        seq, at = divmod(number, len(sessions))
        frame = frames.Data(seq, 1, 3, 0, blocks, (len(blocks),), (), bytes(16 * len(blocks)))
        for reply in replies(machine.on_frame(sessions[at], frame, sizes, 0.0)):
            assert isinstance(reply, frames.Rejected | frames.Failed)
            return number, reply.message
    raise AssertionError("every frame passed")


@pytest.mark.covers("F65")
def test_the_window_of_a_pair_holds_on_all_connections_together() -> None:
    """Unacknowledged frames are memory of this node."""
    machine, _ = connected()
    further(machine, b"b", 1)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    num_passed, message = flood(machine, b"a", b"b", blocks=(0, 1))
    most = BESIDE_WINDOWS * LIMITS.window_bytes
    assert num_passed == most // (4 * P) + 2
    assert f"wanted at most {most}" in message
    assert machine.num_sessions == machine.num_landings == 0


def test_the_frames_of_a_connection_are_bounded() -> None:
    machine = Receiver(ME, LAYOUT, dataclasses.replace(LIMITS, window_bytes=1 << 30), num_blocks=4)
    machine.on_expect(ticket(), 10.0, 0.0)
    machine.on_frame(b"a", frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto"), [], 0.0)
    machine.on_lane(b"a", "zmq", b"")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    num_passed, message = flood(machine, b"a", blocks=(0,))
    assert num_passed == MAX_FRAMES_IN_FLIGHT
    assert f"wanted at most {MAX_FRAMES_IN_FLIGHT} unacknowledged" in message
