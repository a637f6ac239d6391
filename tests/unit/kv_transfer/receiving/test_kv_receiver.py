"""The receiving machine: which frames it accepts, how long it waits, what it keeps."""

from __future__ import annotations

import dataclasses

import pytest

from common.ids import Incarnation
from kv_transfer.contract import Landed, LandingFailed, Released
from kv_transfer.receiving.effects import (
    CloseLane,
    Dropped,
    DropReason,
    OpenLane,
    SendBack,
    Write,
)
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import (
    MAX_BLOCKS_PER_FRAME,
    MAX_REMEMBERED_EPOCHS,
    MAX_REMEMBERED_OUTCOMES,
    Limits,
)
from kv_transfer.wire import frames
from tests.support.clocks.lines_run import lines_run
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    OTHER,
    SENDER,
    P,
    begin_copy,
    copied,
    data,
    events,
    hello,
    land,
    receiver,
    replies,
    ticket,
)

WELCOME = frames.Welcome(
    ME, "zmq", b"", LIMITS.window_bytes, "block", LIMITS.quiet_s, MAX_BLOCKS_PER_FRAME
)


def test_without_files_further_senders_are_refused_and_connected_ones_go_on() -> None:
    machine = receiver()
    hello(machine, b"x")
    machine.on_files(is_short=True)
    refused = hello(machine, b"y", OTHER)
    assert isinstance(refused, frames.Rejected)
    assert refused.code == "overloaded"
    assert "can open no more files" in refused.message
    assert hello(machine, b"x") == WELCOME
    assert hello(machine, b"z") == WELCOME
    machine.on_files(is_short=False)
    assert hello(machine, b"y", OTHER) == WELCOME
    assert machine.num_sessions == 2


@pytest.mark.covers("F65", "F120")
def test_sessions_are_bounded_and_the_refusal_says_so() -> None:
    machine = receiver()
    for number in range(3):
        assert hello(machine, b"%d" % number, Incarnation(f"p{number}", 1)) == WELCOME
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto")
    dropped, answer = machine.on_frame(b"d", greeting, [], 0.0)
    error = f"{ME} has 3 KV connections already"
    assert dropped == Dropped(DropReason.REFUSED, f"{SENDER}: {error}")
    assert answer == SendBack(b"d", frames.Rejected("overloaded", error))
    machine.on_tick(32.0)
    assert machine.num_sessions == 0
    assert hello(machine, b"d") == WELCOME


def test_a_sender_that_connects_again_replaces_its_session() -> None:
    """Peers that flap every 50 ms do not fill the table: another one is welcome all the time."""
    machine = receiver()
    flapping = [Incarnation(f"p{number}", 1) for number in range(2)]
    for turn in range(100):
        now_s = turn * 0.05
        for number, sender in enumerate(flapping):
            assert hello(machine, b"%d of %d" % (turn, number), sender, now_s) == WELCOME
        assert hello(machine, b"honest", OTHER, now_s) == WELCOME
        assert machine.num_sessions == 3
    (refused,) = replies(machine.on_frame(b"98 of 0", BEGIN, [], now_s))
    assert isinstance(refused, frames.Rejected)
    assert refused.code == frames.NO_SESSION


def test_a_replaced_session_closes_its_lane_and_keeps_its_landings() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "auto")
    closed, opened = machine.on_frame(b"b", greeting, [], 0.0)
    assert closed == CloseLane(b"a", "zmq")
    assert opened == OpenLane(b"b", {"zmq": b""})
    assert (machine.num_sessions, machine.num_landings) == (1, 1)
    assert land(machine, b"a", 0, 0) == []


def test_the_landings_of_a_replaced_session_fail_with_the_next_one() -> None:
    """Its sender may have died before it began them there."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    hello(machine, b"b", now_s=1.0)
    assert events(machine.on_tick(2.9)) == []
    assert [type(event) for event in events(machine.on_tick(3.0))] == [LandingFailed, Released]
    assert machine.num_sessions == 0


def test_a_sender_that_restarted_ends_what_its_earlier_life_began() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    later = Incarnation(SENDER.node_id, SENDER.epoch + 1)
    greeting = frames.Hello(later, ME, LAYOUT, {"zmq": b""}, "auto")
    failed, released = events(machine.on_frame(b"b", greeting, [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert "restarted" in str(failed.error)
    assert released == Released(1)
    assert machine.num_sessions == 1
    assert isinstance(hello(machine, b"c"), frames.Rejected)


@pytest.mark.covers("F120")
def test_no_message_visits_every_session_or_landing() -> None:
    """A turn of the thread and a frame cost the same with 8 and with 800 senders."""

    def cost(num_senders: int) -> int:
        limits = Limits(max_sessions=1000)
        machine = Receiver(ME, LAYOUT, limits, num_blocks=1000)
        for number in range(num_senders):
            machine.on_expect(ticket(number + 1, (number,)), 10.0, 0.0)
            session = b"%d" % number
            hello(machine, session, Incarnation(f"p{number}", 1))
            machine.on_frame(session, frames.Begin(number + 1, 3), [], 0.0)

        def turn() -> None:
            machine.on_tick(0.1)
            machine.next_deadline_s()
            machine.on_frame(b"1", frames.Ping((2,)), [], 0.1)
            machine.on_frame(b"1", dataclasses.replace(data(0, 0), lease_token=2), [P, P], 0.1)

        return lines_run(turn)

    assert cost(800) <= 1.2 * cost(8)


def test_hello_again_is_the_same_session_and_another_sender_is_not() -> None:
    machine = receiver(ticket())
    assert hello(machine, b"a") == WELCOME
    machine.on_frame(b"a", BEGIN, [], 0.0)
    assert hello(machine, b"a") == WELCOME
    assert machine.num_sessions == 1
    stranger = frames.Hello(Incarnation("q", 1), ME, LAYOUT, {"zmq": b""}, "auto")
    failed, released = events(machine.on_frame(b"a", stranger, [], 0.0))
    assert isinstance(failed, LandingFailed)
    assert released == Released(1)
    assert machine.num_sessions == 0


def test_epochs_are_remembered_within_bounds() -> None:
    machine = receiver()
    hello(machine, b"a")
    machine.on_malformed(b"a", frames.UnknownVersion("bye"))
    older = Incarnation(SENDER.node_id, 4)
    assert isinstance(hello(machine, b"a", older), frames.Rejected)
    for number in range(MAX_REMEMBERED_EPOCHS):
        hello(machine, b"b", Incarnation(f"other{number}", 1))
        machine.on_malformed(b"b", frames.UnknownVersion("bye"))
    assert hello(machine, b"a", older) == WELCOME


@pytest.mark.covers("F78")
def test_outcomes_are_remembered_within_bounds() -> None:
    machine = receiver()
    hello(machine, b"a")
    for token in range(1, MAX_REMEMBERED_OUTCOMES + 2):
        machine.on_expect(ticket(token), 10.0, 0.0)
        machine.on_revoke(token)
    (first,) = replies(machine.on_frame(b"a", frames.Begin(1, 3), [], 0.0))
    (second,) = replies(machine.on_frame(b"a", frames.Begin(2, 3), [], 0.0))
    assert isinstance(first, frames.Failed)
    assert isinstance(second, frames.Failed)
    assert "no such lease" in first.message
    assert "revoked" in second.message


@pytest.mark.covers("F37")
def test_a_repeated_commit_gets_the_same_answer() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    land(machine, b"a", 0, 0)
    land(machine, b"a", 1, 1)
    effects = machine.on_frame(b"a", COMMIT, [], 0.0)
    assert replies(effects) == [frames.Committed(1, 3)]
    assert isinstance(events(effects)[0], Landed)
    hello(machine, b"b")
    for frame in (BEGIN, COMMIT, frames.Abort(1, 3)):
        again = machine.on_frame(b"b", frame, [], 0.0)
        assert again == [SendBack(b"b", frames.Committed(1, 3))]


def test_order_and_repetition_do_not_matter() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    assert events(land(machine, b"a", 0, 1)) == []
    assert events(land(machine, b"a", 1, 1)) == []
    assert len(events(land(machine, b"a", 2, 0))) == 1


def test_credit_comes_back_at_an_eighth_of_a_window_and_when_asked_for() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    acks = []
    for seq in range(4):
        effects = machine.on_frame(b"a", data(seq, 0, wants_ack=seq == 3), [P, P], 0.0)
        acks.append(replies(effects + copied(machine, effects)))
    first, last = [frames.Ack(2, LIMITS.window_bytes)], [frames.Ack(4, LIMITS.window_bytes)]
    assert acks == [[], first, [], last]


def test_credit_comes_back_in_order_when_copies_end_in_any() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    writes = [begin_copy(machine, b"a", seq, 0, wants_ack=seq == 2) for seq in range(4)]
    ended = [writes[index] for index in (1, 3, 2)]
    assert [replies(machine.on_written(write)) for write in ended] == [[], [], []]
    assert replies(machine.on_unwritten(writes[0])) == [frames.Ack(4, LIMITS.window_bytes)]


def test_a_landing_waits_for_the_last_of_its_copies() -> None:
    """A piece that came twice is copied once more, when all have arrived."""
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    twice = [begin_copy(machine, b"a", seq, 0) for seq in range(2)]
    land(machine, b"a", 2, 1)
    assert events(machine.on_written(twice[0])) == []
    assert events(machine.on_frame(b"a", COMMIT, [], 0.0)) == []
    assert machine.num_landings == 1
    assert isinstance(events(machine.on_written(twice[1]))[0], Landed)


@pytest.mark.covers("F14")
@pytest.mark.parametrize("end", ["revoke", "abort", "expire"])
def test_blocks_are_released_behind_the_last_copy(end: str) -> None:
    """Nothing writes a block that is free."""
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    writes = [begin_copy(machine, b"a", seq, seq) for seq in range(2)]
    if end == "revoke":
        ended = machine.on_revoke(1)
    elif end == "abort":
        ended = machine.on_frame(b"a", frames.Abort(1, 3), [], 0.0)
    else:
        ended = machine.on_tick(100.0)
    assert Released(1) not in events(ended)
    assert machine.num_landings == 0
    assert Released(1) not in events(machine.on_written(writes[0]))
    with pytest.raises(ValueError, match="block 1 was not released yet"):
        machine.on_expect(ticket(2, (1, 2)), 10.0, 100.0)
    assert events(machine.on_unwritten(writes[1])) == [Released(1)]
    machine.on_expect(ticket(2, (1, 2)), 10.0, 100.0)


def test_a_close_releases_what_was_being_copied() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    begin_copy(machine, b"a", 0, 0)
    machine.on_revoke(1)
    assert events(machine.on_close()) == [Released(1)]


@pytest.mark.parametrize("is_revoked", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_receiver_that_closes_tells_its_senders_that_it_has_ended_their_landings(
    has_begun: bool, is_revoked: bool
) -> None:
    """Each of several connections, of which any may be heard first: also before BEGIN arrives."""
    machine = receiver(ticket())
    for session in (b"a", b"b"):
        hello(machine, session, SENDER if session == b"a" else OTHER)
    if has_begun:
        machine.on_frame(b"a", BEGIN, [], 0.0)
    if is_revoked:
        machine.on_revoke(1)
    effects = machine.on_close()
    closed = frames.Rejected("lease_revoked", "the receiving connector was closed")
    found = [one for one in effects if isinstance(one, SendBack)]
    assert found[-2:] == [SendBack(b"a", closed), SendBack(b"b", closed)]
    ended = [SendBack(b"a", frames.Failed(1, 3, closed.code, closed.message))]
    assert found[:-2] == (ended if has_begun and not is_revoked else [])


def test_bytes_that_travel_beside_their_frame_are_credit_too() -> None:
    """Otherwise a sender gets no credit until its window is full, and both wait in turns."""
    machine = receiver(ticket())
    hello(machine, b"a", lane="shm")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    acks = []
    for seq in range(3):
        beside = dataclasses.replace(data(seq, 0), runs=(), source_blocks=(9,))
        effects = machine.on_frame(b"a", beside, [], 0.0)
        acks.append(replies(effects + copied(machine, effects)))
    assert acks == [[], [frames.Ack(2, LIMITS.window_bytes)], []]


@pytest.mark.covers("F14")
def test_a_revoked_landing_takes_no_write_that_was_checked_before() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    (write,) = machine.on_frame(b"a", data(0, 0), [P, P], 0.0)
    assert isinstance(write, Write)
    assert machine.may_write(write)
    revoked = machine.on_revoke(1)
    assert [type(frame) for frame in replies(revoked)] == [frames.Failed]
    assert not machine.may_write(write)
    assert machine.on_corrupt(write, {0}, "late") == [Emit(Released(1))]
    machine.on_expect(ticket(2), 10.0, 0.0)
    assert not machine.may_write(write)


@pytest.mark.parametrize("generation", [2, 4])
def test_a_write_of_another_generation_is_not_made(generation: int) -> None:
    """The lease was issued again, perhaps after so many others that its outcome was dropped."""
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    land(machine, b"a", 0, 1)
    write, *_ = machine.on_frame(b"a", data(1, 0), [P, P], 0.0)
    machine.on_frame(b"a", COMMIT, [], 0.0)
    assert isinstance(write, Write)
    late = dataclasses.replace(write, data=dataclasses.replace(write.data, generation=generation))
    assert not machine.may_write(late)
    assert events(machine.on_written(late)) == []
    assert machine.may_write(write)
    assert isinstance(events(machine.on_written(write))[0], Landed)


def test_a_ping_renews_only_what_it_names() -> None:
    """Invariant 6: held for somebody else until not renewed."""
    machine = receiver(ticket(1, (0,)), ticket(2, (1,)), sender_deadline_s=1.5)
    hello(machine, b"a")
    for token in (1, 2):
        machine.on_frame(b"a", frames.Begin(token, 3), [], 0.0)
    machine.on_frame(b"a", frames.Ping((1, 77)), [], 1.0)
    failed, released = events(machine.on_tick(1.5))
    assert isinstance(failed, LandingFailed)
    assert failed.lease_token == 2
    assert released == Released(2)
    assert events(machine.on_tick(2.49)) == []
    assert machine.next_deadline_s() == 2.5


def test_begin_data_and_commit_renew_what_they_name() -> None:
    machine = receiver(ticket(), sender_deadline_s=1.5)
    hello(machine, b"a")
    heard: list[tuple[float, frames.Frame, list[int]]] = [
        (1.4, BEGIN, []),
        (2.8, data(0, 0), [P, P]),
        (4.2, data(1, 1), [P, P]),
        (5.6, COMMIT, []),
    ]
    for at_s, frame, sizes in heard:
        machine.on_frame(b"a", frame, sizes, at_s)
        assert events(machine.on_tick(at_s + 1.3)) == []
    assert [type(event) for event in events(machine.on_tick(7.1))] == [LandingFailed]


def test_a_landing_that_is_begun_again_counts_once() -> None:
    machine, next_life = receiver(ticket()), Incarnation(SENDER.node_id, SENDER.epoch + 1)
    for session in (b"a", b"b"):
        hello(machine, session)
        machine.on_frame(session, BEGIN, [], 0.0)
    assert machine.sessions.earlier_lives(next_life) == [SENDER]
    machine.on_revoke(1)
    assert machine.sessions.earlier_lives(next_life) == []


def test_a_ping_is_answered_with_the_credit_given_so_far() -> None:
    """An acknowledgement that did not fit into a full queue is lost; its bytes must not be."""
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    asked = machine.on_written(begin_copy(machine, b"a", 0, 0, wants_ack=True))
    assert replies(asked) == [frames.Ack(1, LIMITS.window_bytes)]
    land(machine, b"a", 1, 1)
    for _ in range(2):
        pinged = machine.on_frame(b"a", frames.Ping((1,)), [], 0.1)
        assert replies(pinged) == [frames.Pong(), frames.Ack(1, LIMITS.window_bytes)]


def test_a_stranger_cannot_renew_or_abort_a_landing() -> None:
    machine = receiver(ticket(), sender_deadline_s=1.5)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    hello(machine, b"b", OTHER)
    machine.on_frame(b"b", frames.Ping((1,)), [], 1.0)
    assert replies(machine.on_frame(b"b", frames.Abort(1, 3), [], 1.0)) == [frames.Aborted(1, 3)]
    assert machine.num_landings == 1
    assert [type(event) for event in events(machine.on_tick(1.5))] == [LandingFailed, Released]


def test_a_silent_session_fails_what_it_was_writing() -> None:
    machine = receiver(ticket(1, (0,)), ticket(2, (1,)), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    assert events(machine.on_tick(1.99)) == []
    failed, released = events(machine.on_tick(2.0))
    assert isinstance(failed, LandingFailed)
    assert failed.lease_token == 1
    assert released == Released(1)
    assert (machine.num_sessions, machine.num_landings) == (0, 1)


def test_a_sender_without_a_landing_may_say_nothing_for_long() -> None:
    """It does not ping then, and closes its connection before."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    assert machine.on_tick(10.0) == []
    assert machine.num_sessions == 1
    # From its BEGIN on its silence counts.
    machine.on_frame(b"a", BEGIN, [], 10.0)
    for now_s in (10.0, 11.0, 11.9):
        assert events(machine.on_tick(now_s)) == []
    assert [type(event) for event in events(machine.on_tick(12.0))] == [LandingFailed, Released]
    assert machine.num_sessions == 0


def test_an_idle_sender_is_forgotten_when_its_last_landing_is_long_over() -> None:
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 1.0)
    machine.on_frame(b"a", frames.Abort(1, 3), [], 1.0)
    machine.on_tick(32.9)
    assert machine.num_sessions == 1
    machine.on_tick(33.0)
    assert (machine.num_sessions, machine.next_deadline_s()) == (0, None)


@pytest.mark.parametrize("lane", ["shm", "rdma"])
def test_a_sender_whose_lane_keeps_memory_must_ping(lane: str) -> None:
    """A pool that is mapped, or one that it may write, is not kept for a dead process."""
    machine = receiver()
    welcome = hello(machine, b"a", lane=lane)
    assert isinstance(welcome, frames.Welcome)
    assert welcome.quiet_s == 0
    machine.on_tick(2.0)
    assert machine.num_sessions == 0


def test_a_process_that_slept_takes_nobody_for_dead() -> None:
    """Frames that arrived meanwhile may be read after the time is checked."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    machine.on_tick(0.0)
    assert machine.on_tick(50.0) == []
    assert (machine.num_sessions, machine.num_landings) == (1, 1)
    # From then on silence counts.
    machine.on_tick(51.0)
    assert machine.num_sessions == 1
    machine.on_tick(52.0)
    assert (machine.num_sessions, machine.num_landings) == (0, 0)


def test_a_sender_that_came_back_on_another_session_is_not_silent() -> None:
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    hello(machine, b"b", now_s=1.0)
    machine.on_frame(b"b", BEGIN, [], 1.0)
    assert events(machine.on_tick(2.0)) == []
    assert (machine.num_sessions, machine.num_landings) == (1, 1)


def test_closed_blocks_may_land_again_at_once() -> None:
    machine = receiver(ticket(1))
    machine.on_revoke(1)
    machine.on_expect(ticket(2), 10.0, 0.0)
    assert machine.num_landings == 1


@pytest.mark.covers("F23")
def test_a_begin_that_comes_late_does_not_take_the_landing_back() -> None:
    """Frames of an earlier connection arrive after the next one began again."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    hello(machine, b"b")
    machine.on_frame(b"b", BEGIN, [], 0.0)
    dropped, _ = machine.on_frame(b"a", BEGIN, [], 0.0)
    assert isinstance(dropped, Dropped)
    assert land(machine, b"a", 0, 0) == []
    land(machine, b"b", 0, 0)
    land(machine, b"b", 1, 1)
    assert replies(machine.on_frame(b"b", COMMIT, [], 0.0)) == [frames.Committed(1, 3)]


def test_a_begin_on_a_later_connection_takes_the_landing_over() -> None:
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    land(machine, b"a", 0, 0)
    hello(machine, b"b")
    machine.on_frame(b"b", BEGIN, [], 0.0)
    assert land(machine, b"a", 1, 1) == []
    land(machine, b"b", 0, 1)
    assert replies(machine.on_frame(b"b", COMMIT, [], 0.0)) == [frames.Committed(1, 3)]


def test_a_commit_counts_only_where_the_landing_was_begun() -> None:
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    land(machine, b"a", 0, 0)
    land(machine, b"a", 1, 1)
    hello(machine, b"x", OTHER)
    (refused,) = replies(machine.on_frame(b"x", COMMIT, [], 0.0))
    assert isinstance(refused, frames.Failed)
    assert machine.num_landings == 1
    hello(machine, b"b")
    refused, *_ = replies(machine.on_frame(b"b", COMMIT, [], 0.0))
    assert isinstance(refused, frames.Rejected)
    assert (machine.num_sessions, machine.num_landings) == (1, 0)


def test_an_abort_by_a_stranger_is_confirmed_and_changes_nothing() -> None:
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    hello(machine, b"b", OTHER)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    for session, generation in [(b"b", 3), (b"a", 4), (b"a", 2)]:
        effects = machine.on_frame(session, frames.Abort(1, generation), [], 0.0)
        assert effects == [SendBack(session, frames.Aborted(1, generation))]
    assert machine.num_landings == 1


@pytest.mark.parametrize("lane", ["zmq", "rdma"])
def test_an_abort_has_one_answer(lane: str) -> None:
    """ABORTED is the answer, so no FAILED is sent."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a", lane=lane)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    effects = machine.on_frame(b"a", frames.Abort(1, 3), [], 0.0)
    assert replies(effects) == [frames.Aborted(1, 3)]
    assert [type(event) for event in events(effects)] == [LandingFailed, Released]
    assert machine.num_quarantined_blocks == 0
