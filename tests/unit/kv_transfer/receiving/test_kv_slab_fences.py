"""Fences of slabs in which other senders write all the time: nobody is disturbed, and they come."""

from __future__ import annotations

import random
from collections import deque

import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import KVEvent, LandingFailed, Released, Ticket
from kv_transfer.receiving.effects import Fence, MoveSlab, OpenLane, ReceiverEffect, SendBack
from kv_transfer.receiving.machine import Receiver
from kv_transfer.receiving.slab_fences import NO_LEASE
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
ME = Incarnation("d", 1)
GENERATION = 3
LIMITS = Limits(max_sessions=8)


class Senders:
    """A receiver with some connected senders on the one-sided lane, and the lane itself.

    `places` are the addresses at which each slab can be written; a sender writes at what it was
    told last. Answers of senders wait in `answers`.
    """

    def __init__(self, num_blocks: int, blocks_per_slab: int) -> None:
        self.receiver = Receiver(
            ME, LAYOUT, LIMITS, num_blocks=num_blocks, blocks_per_slab=blocks_per_slab
        )
        self.num_slabs = num_blocks // blocks_per_slab
        self.now_s = 0.0
        self.places = [{0} for _ in range(self.num_slabs)]
        self.known: dict[bytes, bytes] = {}
        self.answers: deque[tuple[bytes, frames.Frame]] = deque()
        self.events: list[KVEvent] = []
        self.fences: list[int] = []
        self.is_full: set[bytes] = set()

    @property
    def reply(self) -> bytes:
        """What the lane tells senders: the newest place of each slab."""
        return bytes(max(places) % 256 for places in self.places)

    def connect(self, session: bytes, lane: str = "rdma") -> None:
        sender = Incarnation(session.decode(), 1)
        self.do(self.receiver.on_frame(session, _hello(sender, lane), [], self.now_s))

    def begun(self, session: bytes, token: int, *blocks: int) -> None:
        ticket = Ticket(
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
        self.receiver.on_expect(ticket, 600.0, self.now_s)
        self.say(session, frames.Begin(token, GENERATION))

    def say(self, session: bytes, frame: frames.Frame) -> None:
        self.do(self.receiver.on_frame(session, frame, [], self.now_s))

    def answer(self) -> None:
        while self.answers:
            self.say(*self.answers.popleft())

    def tick(self, by_s: float = 0.0) -> None:
        self.now_s += by_s
        self.do(self.receiver.on_tick(self.now_s))

    def end(self, session: bytes) -> None:
        """The connection of a sender ends; what it was told stays in its mind."""
        self.do(self.receiver.on_malformed(session, frames.UnknownVersion("bye")))
        self.answers = deque(one for one in self.answers if one[0] != session)

    def do(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLane(session, offers):
                    (lane,) = offers
                    self.do(self.receiver.on_lane(session, lane, self.reply))
                case MoveSlab("rdma", slab):
                    self.places[slab].add(max(self.places[slab]) + 1)
                    self.do(self.receiver.on_moved("rdma", self.reply, self.now_s))
                case Fence("rdma", slab):
                    self.fences.append(slab)
                    self.places[slab] = {max(self.places[slab])}
                    self.do(self.receiver.on_fenced(self.now_s))
                case SendBack(session, frame) if session not in self.is_full:
                    self._hear(session, frame)
                case Emit(event):
                    self.events.append(event)

    def _hear(self, session: bytes, frame: frames.Frame) -> None:
        match frames.decode(frames.encode(frame)):
            case frames.Welcome(lane="rdma", lane_reply=reply):
                self.known[session] = reply
            case frames.Failed(token, generation):
                self.answers.append((session, frames.Abort(token, generation)))

    def can_write(self, session: bytes, slab: int) -> bool:
        return self.known[session][slab] in {place % 256 for place in self.places[slab]}

    @property
    def released(self) -> list[int]:
        return [event.lease_token for event in self.events if isinstance(event, Released)]


def _lease_of(frame: frames.Frame) -> int | None:
    return frame.lease_token if isinstance(frame, frames.Abort) else None


def _hello(sender: Incarnation, lane: str) -> frames.Hello:
    return frames.Hello(sender, ME, LAYOUT, {lane: b""}, "auto")


@pytest.fixture
def world() -> Senders:
    world = Senders(num_blocks=12, blocks_per_slab=4)
    world.connect(b"a")
    world.connect(b"b")
    return world


def test_a_slab_in_which_others_write_is_fenced_when_they_have_moved(world: Senders) -> None:
    world.begun(b"b", 1, 0)
    world.begun(b"a", 2, 1)
    world.end(b"a")
    world.tick()
    assert world.fences == []
    assert world.can_write(b"b", 0)
    assert world.can_write(b"a", 0), "the old address stays until the others have moved"
    world.answer()
    assert world.fences == [0]
    assert world.released == [2]
    assert world.can_write(b"b", 0)
    assert not world.can_write(b"a", 0)


def test_no_fence_before_the_last_sender_has_reported(world: Senders) -> None:
    world.connect(b"c")
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.tick()
    assert world.answers[0][0] == b"b"
    world.say(*world.answers.popleft())
    assert world.fences == []
    world.say(b"c", frames.Abort(NO_LEASE, 99))  # Of another question.
    assert world.fences == []
    world.answer()
    assert world.fences == [0]


def test_a_question_that_was_lost_is_asked_again_with_the_address(world: Senders) -> None:
    """A reply is dropped when the queue of its connection is full."""
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.is_full = {b"b"}
    world.tick()
    assert not world.answers
    world.is_full = set()
    world.say(b"b", frames.Ping(()))
    assert world.can_write(b"b", 0)
    world.answer()
    assert world.released == [1]
    assert world.can_write(b"b", 0)


def test_a_sender_that_does_not_report_is_waited_for_for_a_while(world: Senders) -> None:
    world.begun(b"a", 1, 0, 5)
    world.end(b"a")
    world.tick()
    for _ in range(3):
        world.tick(LIMITS.report_timeout_s / 4)
        world.say(b"b", frames.Ping(()))
        world.answers.clear()
    assert world.released == []
    assert world.receiver.next_deadline_s() == LIMITS.report_timeout_s
    world.tick(LIMITS.report_timeout_s / 4)
    # Nor in the next slab, but it is still told the address.
    assert world.released == [1]
    assert world.fences == [0, 1]
    assert world.can_write(b"b", 0)
    assert world.can_write(b"b", 1)


def test_a_process_that_stood_still_waits_anew(world: Senders) -> None:
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.tick()
    world.tick(3600.0)
    assert world.fences == []
    world.answer()
    assert world.fences == [0]


def test_a_sender_that_ends_while_it_is_waited_for_is_fenced_by_the_next_move(
    world: Senders,
) -> None:
    """It knows the new address too."""
    world.begun(b"b", 1, 0)
    world.begun(b"a", 2, 1)
    world.end(b"a")
    world.tick()
    world.end(b"b")
    world.tick()
    assert world.released == [2, 1]
    assert world.fences == [0, 0]
    assert not world.can_write(b"b", 0)


def test_a_sender_that_ends_between_the_address_and_the_fence_keeps_its_blocks_until_the_next_one(
    world: Senders,
) -> None:
    world.begun(b"b", 1, 0)
    world.begun(b"a", 2, 1)
    world.connect(b"c")
    world.end(b"a")
    world.tick()
    world.end(b"b")
    world.say(b"c", world.answers[-1][1])
    assert world.released == [2]
    world.answer()
    assert world.released == [2, 1]


def test_a_sender_that_connects_meanwhile_has_the_new_address_and_is_not_asked(
    world: Senders,
) -> None:
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.tick()
    world.connect(b"c")
    assert [session for session, _ in world.answers] == [b"b"]
    world.answer()
    assert world.can_write(b"c", 0)


def test_senders_on_other_lanes_are_not_asked(world: Senders) -> None:
    world.connect(b"z", "zmq")
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.tick()
    assert [session for session, _ in world.answers] == [b"b"]


def test_slabs_take_turns(world: Senders) -> None:
    """Sender after sender dies in the first slab: the others are fenced all the same."""
    world.begun(b"a", 1, 4, 8)
    world.end(b"a")
    world.tick()
    for token in range(2, 12):
        world.connect(b"x")
        world.begun(b"x", token, token % 4)
        world.end(b"x")
        world.tick()
        # One slab is fenced, and the next one moves.
        world.say(*world.answers.popleft())
        if token == 5:
            assert 1 in world.released
    world.answer()
    assert sorted(world.released) == list(range(1, 12))


def test_a_fence_releases_nothing_of_a_sender_that_is_connected(world: Senders) -> None:
    """It may write at the new address until it has reported that it stopped."""
    world.begun(b"b", 1, 0)
    world.do(world.receiver.on_revoke(1))
    (stopped,) = world.answers
    world.answers.clear()
    world.begun(b"a", 2, 1)
    world.end(b"a")
    world.tick()
    world.answer()
    assert world.fences == [0]
    assert world.released == [2]
    world.say(*stopped)
    assert world.released == [2, 1]


def test_closing_in_the_middle_of_a_move_releases_everything_once(world: Senders) -> None:
    world.begun(b"a", 1, 0)
    world.end(b"a")
    world.tick()
    world.do(world.receiver.on_close())
    assert world.released == [1]
    world.do(world.receiver.on_moved("rdma", b"late", 0.0))
    world.do(world.receiver.on_fenced(0.0))
    assert world.released == [1]


@pytest.mark.parametrize("reports", [True, False], ids=["all report", "one does not report"])
@pytest.mark.parametrize("num_open", [2, 20, 100, 400])
def test_blocks_of_a_dead_sender_come_back_however_many_landings_are_open(
    num_open: int, reports: bool
) -> None:
    """Prompts queue and compute for long; each has blocks in any slab, as an LRU pool gives them.

    All are begun when their prompts are submitted, and last for 20 s on average. The times are
    those of a node; one of the other senders may ping for ever and not report.
    """
    rng = random.Random(1)
    world = Senders(num_blocks=8192, blocks_per_slab=512)
    free = rng.sample(range(8192), 8192)
    sessions = [b"a", b"b", b"c", b"d"]
    for session in sessions:
        world.connect(session)
    held: dict[int, list[int]] = {}
    token = 0

    def begin(session: bytes) -> None:
        nonlocal token
        token += 1
        held[token] = [free.pop(0) for _ in range(16)]
        world.begun(session, token, *held[token])

    def end(one: int) -> None:
        free.extend(held.pop(one))

    open_of: dict[bytes, list[int]] = {session: [] for session in sessions}
    for number in range(num_open):
        session = sessions[number % 4]
        begin(session)
        open_of[session].append(token)
    dead = set(open_of.pop(b"d"))
    last_heard_at_s = world.now_s
    while not dead <= set(world.released):
        world.tick(0.1)
        for session, tokens in open_of.items():
            world.say(session, frames.Ping(tuple(tokens)))
            for one in [one for one in tokens if rng.random() < 0.1 / 20]:
                tokens.remove(one)
                world.say(session, frames.Abort(one, GENERATION))
                end(one)
                begin(session)
                tokens.append(token)
            for slab in range(world.num_slabs):
                assert world.can_write(session, slab)
        if not reports:
            deaf = (b"a", NO_LEASE)
            kept = [one for one in world.answers if (one[0], _lease_of(one[1])) != deaf]
            world.answers = deque(kept)
        world.answer()
        assert world.now_s < last_heard_at_s + 5.0
    failed = {event.lease_token for event in world.events if isinstance(event, LandingFailed)}
    assert dead <= failed
    # No other landing ended but by its own sender.
    assert not failed & {one for tokens in open_of.values() for one in tokens}


class SlowFences(Senders):
    """Fences are only noted: a lane may take seconds for one."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8, blocks_per_slab=4)
        self.asked: list[ReceiverEffect] = []

    def do(self, effects: list[ReceiverEffect]) -> None:
        self.asked += [effect for effect in effects if isinstance(effect, Fence)]
        super().do([effect for effect in effects if not isinstance(effect, Fence)])


def test_a_fence_is_asked_for_once_however_long_it_takes() -> None:
    senders = SlowFences()
    senders.connect(b"a")
    senders.begun(b"a", 1, 0, 1)
    senders.end(b"a")
    for _ in range(5):
        senders.tick(1.0)
    assert senders.asked == [Fence("rdma", 0)]
    assert not any(isinstance(event, Released) for event in senders.events)
    Senders.do(senders, senders.asked)
    assert senders.events[-1] == Released(1)


class WithoutAddresses(Senders):
    """A lane that has no further address for a slab, so its reply stays as it was."""

    @property
    def reply(self) -> bytes:
        return b"the same"


def test_a_sender_that_has_the_address_already_is_neither_told_nor_waited_for() -> None:
    senders = WithoutAddresses(num_blocks=8, blocks_per_slab=4)
    senders.connect(b"a")
    senders.connect(b"b")
    senders.begun(b"a", 1, 0)
    senders.end(b"a")
    senders.tick()
    assert not senders.answers
    assert senders.released == [1]
