"""The receiving machine with senders that write its pool by themselves: when blocks come back."""

from __future__ import annotations

import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import KVEvent, Landed, LandingFailed, Released, Ticket
from kv_transfer.receiving.effects import Fence, MoveSlab, OpenLane, ReceiverEffect, SendBack, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.receiving.slab_fences import NO_LEASE
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
SENDER, ME = Incarnation("p", 5), Incarnation("d", 1)
# Slabs 0, 1 and 2.
NUM_BLOCKS, BLOCKS_PER_SLAB = 12, 4
GENERATION = 3


def ticket(token: int, *blocks: int) -> Ticket:
    return Ticket(
        attempt=AttemptId("r", 0),
        decode_node=ME,
        kv_endpoint="here",
        lease_token=token,
        generation=GENERATION,
        target_block_ids=blocks,
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=30.0,
    )


class Machine:
    """A receiver, and its effects. The lane moves slabs and fences them at once."""

    def __init__(self) -> None:
        self.receiver = Receiver(
            ME, LAYOUT, Limits(), num_blocks=NUM_BLOCKS, blocks_per_slab=BLOCKS_PER_SLAB
        )
        self.fences: list[int] = []
        self.replies: list[tuple[bytes, frames.Frame]] = []
        self.writes: list[Write] = []

    def take(self, effects: list[ReceiverEffect]) -> list[KVEvent]:
        """Record effects; return the events among them."""
        events = []
        for effect in effects:
            match effect:
                case Emit(event):
                    events.append(event)
                case MoveSlab("rdma", slab):
                    reply = b"%d moved, %d" % (slab, len(self.fences))
                    events += self.take(self.receiver.on_moved("rdma", reply, 0.0))
                case Fence("rdma", slab):
                    self.fences.append(slab)
                    events += self.take(self.receiver.on_fenced(0.0))
                case SendBack(session, frame):
                    self.replies.append((session, frame))
                case Write():
                    self.writes.append(effect)
        return events

    def hello(self, session: bytes, lane: str = "rdma", sender: Incarnation = SENDER) -> None:
        hello = frames.Hello(sender, ME, LAYOUT, {lane: b""}, "auto")
        *_, opened = self.receiver.on_frame(session, hello, [], 0.0)
        assert isinstance(opened, OpenLane)
        self.receiver.on_lane(session, lane, b"")

    def say(self, session: bytes, frame: frames.Frame, now_s: float = 0.0) -> list[KVEvent]:
        return self.take(self.receiver.on_frame(session, frame, [], now_s))

    def begun(self, session: bytes, token: int, *blocks: int) -> None:
        self.receiver.on_expect(ticket(token, *blocks), 100.0, 0.0)
        assert self.say(session, frames.Begin(token, GENERATION)) == []
        assert self.replies[-1] == (session, frames.Begun(token, GENERATION))

    def revoke(self, token: int) -> list[KVEvent]:
        return self.take(self.receiver.on_revoke(token))

    def tick(self, now_s: float) -> list[KVEvent]:
        return self.take(self.receiver.on_tick(now_s))

    def end_session(self, session: bytes) -> list[KVEvent]:
        return self.take(self.receiver.on_malformed(session, frames.UnknownVersion("bye")))


def abort(token: int, generation: int = GENERATION) -> frames.Abort:
    return frames.Abort(token, generation)


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.hello(b"a")
    return machine


def test_what_nobody_began_is_released_at_once(machine: Machine) -> None:
    """No sender writes before its BEGIN was answered."""
    machine.receiver.on_expect(ticket(1, 0), 100.0, 0.0)
    assert machine.revoke(1) == [Released(1)]
    machine.say(b"a", frames.Begin(1, GENERATION))
    assert isinstance(machine.replies[-1][1], frames.Failed)
    assert machine.receiver.num_quarantined_blocks == 0


@pytest.mark.parametrize("lane", ["zmq", "loopback", "shm"])
def test_where_the_receiver_writes_blocks_come_back_at_once(lane: str) -> None:
    machine = Machine()
    machine.hello(b"a", lane)
    machine.receiver.on_expect(ticket(1, 0), 100.0, 0.0)
    machine.say(b"a", frames.Begin(1, GENERATION))
    assert machine.replies == []
    assert machine.revoke(1) == [Released(1)]


def test_a_revoked_landing_keeps_its_blocks_until_its_sender_is_quiet(machine: Machine) -> None:
    machine.begun(b"a", 1, 0, 5)
    assert machine.revoke(1) == []
    assert machine.receiver.num_quarantined_blocks == 2
    assert isinstance(machine.replies[-1][1], frames.Failed)
    with pytest.raises(ValueError, match="block 5 was not released"):
        machine.receiver.on_expect(ticket(2, 5), 100.0, 0.0)
    assert machine.say(b"a", abort(1)) == [Released(1)]
    assert machine.receiver.num_quarantined_blocks == 0
    machine.receiver.on_expect(ticket(2, 5), 100.0, 0.0)


@pytest.mark.covers("F15")
def test_never_on_a_timer(machine: Machine) -> None:
    """The sender lives, does not report its end, and pings for an hour."""
    machine.begun(b"a", 1, 0)
    machine.revoke(1)
    for second in range(3600):
        machine.say(b"a", frames.Ping(()), float(second))
        assert machine.tick(float(second)) == []
    assert machine.fences == []
    assert machine.receiver.num_quarantined_blocks == 1


def test_an_expired_landing_says_so_and_keeps_its_blocks(machine: Machine) -> None:
    machine.receiver.on_expect(ticket(1, 0), 1.0, 0.0)
    machine.say(b"a", frames.Begin(1, GENERATION))
    machine.say(b"a", frames.Ping(()), 1.0)
    (failed,) = machine.tick(1.0)
    assert isinstance(failed, LandingFailed)
    assert machine.say(b"a", abort(1), 1.1) == [Released(1)]


def test_an_abort_of_an_open_landing_releases_with_it(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    failed, released = machine.say(b"a", abort(1))
    assert isinstance(failed, LandingFailed)
    assert released == Released(1)
    assert machine.say(b"a", abort(1)) == []
    assert machine.receiver.num_quarantined_blocks == 0


def test_an_abort_on_another_session_releases_nothing(machine: Machine) -> None:
    """It overtakes writes: it proves their end only behind them, on their connection."""
    machine.begun(b"a", 1, 0)
    machine.begun(b"a", 2, 1)
    machine.revoke(1)
    machine.hello(b"x", sender=Incarnation("other", 1))
    assert machine.say(b"x", abort(1)) == []
    machine.hello(b"b")
    assert machine.say(b"b", abort(1)) == []
    (failed,) = machine.say(b"b", abort(2))
    assert isinstance(failed, LandingFailed)
    assert machine.receiver.num_quarantined_blocks == 2
    # Its earlier connection is over, so only a fence releases them.
    assert machine.say(b"a", abort(1)) == machine.say(b"a", abort(2)) == []
    machine.tick(0.1)
    assert machine.say(b"x", abort(NO_LEASE, 1)) == []
    assert machine.say(b"b", abort(NO_LEASE, 1)) == [Released(1), Released(2)]
    assert machine.fences == [0]


def test_an_abort_of_another_generation_or_token_releases_nothing(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    machine.revoke(1)
    assert machine.say(b"a", abort(1, GENERATION + 1)) == []
    assert machine.say(b"a", abort(2)) == []
    assert machine.say(b"a", abort(1)) == [Released(1)]


def test_a_resumed_landing_fails_and_waits_for_a_fence(machine: Machine) -> None:
    """Writes of the earlier connection may still arrive."""
    machine.begun(b"a", 1, 0)
    machine.hello(b"b")
    (failed,) = machine.say(b"b", frames.Begin(1, GENERATION))
    assert isinstance(failed, LandingFailed)
    assert [session for session, _ in machine.replies[-2:]] == [b"a", b"b"]
    assert machine.say(b"b", abort(1)) == []
    assert machine.end_session(b"b") == []
    assert machine.fences == []
    assert machine.tick(0.1) == [Released(1)]
    assert machine.fences == [0]


def test_a_session_that_ended_is_fenced_once(machine: Machine) -> None:
    machine.begun(b"a", 1, 0, 9)
    (failed,) = machine.end_session(b"a")
    assert isinstance(failed, LandingFailed)
    assert machine.tick(0.1) == [Released(1)]
    assert machine.fences == [0, 2]
    assert machine.tick(0.2) == []
    assert machine.fences == [0, 2]


def test_a_silent_session_is_over(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    machine.revoke(1)
    over_at_s = Limits().patience_s("rdma")
    for second in range(int(over_at_s)):
        assert machine.tick(second) == []
    assert machine.tick(over_at_s - 0.01) == []
    assert machine.fences == []
    assert machine.tick(over_at_s) == [Released(1)]
    assert machine.fences == [0]


def test_several_senders_that_ended_are_fenced_together(machine: Machine) -> None:
    machine.hello(b"b", sender=Incarnation("q", 1))
    machine.begun(b"a", 1, 0)
    machine.begun(b"b", 2, 1, 11)
    machine.end_session(b"a")
    machine.end_session(b"b")
    assert machine.tick(0.1) == [Released(1), Released(2)]
    assert machine.fences == [0, 2]


def test_closing_releases_everything_once(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    machine.begun(b"a", 2, 1)
    machine.receiver.on_expect(ticket(3, 2), 100.0, 0.0)
    machine.revoke(1)
    events = machine.take(machine.receiver.on_close())
    failed = [event.lease_token for event in events if isinstance(event, LandingFailed)]
    released = [event.lease_token for event in events if isinstance(event, Released)]
    assert failed == [2, 3]
    assert sorted(released) == [1, 2, 3]
    assert machine.receiver.num_quarantined_blocks == 0
    assert machine.receiver.num_landings == 0


def test_a_landed_landing_is_not_quarantined(machine: Machine) -> None:
    """Everything was written and acknowledged before the COMMIT could leave."""
    machine.begun(b"a", 1, 0)
    machine.say(b"a", frames.Data(0, 1, GENERATION, 0, (0,), (), (), b""))
    (write,) = machine.writes
    machine.take(machine.receiver.on_written(write))
    (landed,) = machine.say(b"a", frames.CommitFrame(1, GENERATION, 1, 0, 4, 7, ()))
    assert isinstance(landed, Landed)
    assert machine.revoke(1) == []
    assert machine.say(b"a", abort(1)) == []
    assert machine.receiver.num_quarantined_blocks == 0


def test_a_notice_of_a_write_to_a_quarantined_block_counts_for_nothing(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    machine.say(b"a", frames.Data(0, 1, GENERATION, 0, (0,), (), (), b""))
    (write,) = machine.writes
    machine.revoke(1)
    assert not machine.receiver.may_write(write)
    assert machine.take(machine.receiver.on_written(write)) == []
    assert machine.say(b"a", frames.CommitFrame(1, GENERATION, 1, 0, 4, 7, ())) == []
    assert isinstance(machine.replies[-1][1], frames.Failed)


def test_the_states_of_a_quarantined_landing(machine: Machine) -> None:
    machine.begun(b"a", 1, 0)
    landing = machine.receiver.landings.get(1)
    assert landing is not None
    states = [landing.state]
    machine.revoke(1)
    states.append(landing.state)
    machine.say(b"a", abort(1))
    states.append(landing.state)
    names = [state.name for state in states]
    assert names == ["TRANSFERRING", "QUARANTINED", "ABORTED"]
