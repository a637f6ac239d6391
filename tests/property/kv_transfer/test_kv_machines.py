"""Sender and receiver machines joined by a network that breaks wherever hypothesis likes.

The pools are dictionaries and a piece's checksum is its value, so a wrong byte is a wrong number.
Payloads are read from the source when they are delivered, as late as a zero-copy send may be.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import AttemptId, Incarnation
from common.kv_layout import KVLayout
from kv_transfer.connector import Commit, Landed, LandingFailed, Ticket, TransferEnded
from kv_transfer.core import frames
from kv_transfer.core.effects import (
    Connect,
    Disconnect,
    Dropped,
    Emit,
    Peer,
    Reply,
    SendChunk,
    SendToPeer,
    Write,
)
from kv_transfer.core.limits import Limits
from kv_transfer.core.receiver import Receiver
from kv_transfer.core.sender import Sender

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
LIMITS = Limits(window_bytes=3 * PAIR_BYTES, max_frame_bytes=2 * PAIR_BYTES)
PREFILL, DECODE = Incarnation("p", 1), Incarnation("d", 1)
PEER = Peer("there", DECODE)
NUM_BLOCKS = 5
TOKEN = 9
TICKET = Ticket(
    attempt=AttemptId("r", 0),
    decode_node=DECODE,
    kv_endpoint=PEER.endpoint,
    lease_token=TOKEN,
    generation=4,
    target_block_ids=(7, 3, 4, 0, 6),
    num_cached_tokens=8,
    fingerprint=LAYOUT.fingerprint,
    lease_s=30,
)
COMMIT = Commit(num_tokens=8 + NUM_BLOCKS * 4, first_token_id=1)
SOURCES = (2, 3, 4, 9, 8)


class World:
    """Both machines, one connection at a time, and time that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sender = Sender(PREFILL, LAYOUT, LIMITS)
        self.receiver = Receiver(DECODE, LAYOUT, LIMITS, num_blocks=8)
        self.source = {(layer, b): 1000 * layer + b for layer in range(3) for b in SOURCES}
        self.target: dict[tuple[int, int], int] = {}
        self.connection: bytes | None = None
        self.num_connections = 0
        self.to_receiver: deque[tuple[bytes, frames.Frame, tuple[int, ...]]] = deque()
        self.to_sender: deque[tuple[bytes, frames.Frame]] = deque()
        self.events: list[object] = []
        self.is_revoked = False

    def do(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case Connect():
                    self.num_connections += 1
                    self.connection = b"%d" % self.num_connections
                case Disconnect():
                    self.connection = None
                case SendToPeer(_, frame):
                    self.carry(frame, ())
                case SendChunk(_, seq, token, generation, chunk):
                    sums = tuple(self.source[chunk.layer, b] for b in chunk.source_blocks)
                    data = frames.Data(
                        seq=seq,
                        lease_token=token,
                        generation=generation,
                        layer=chunk.layer,
                        ordinals=chunk.ordinals,
                        runs=tuple(count for _, count in chunk.runs),
                        key_sums=sums,
                        value_sums=sums,
                    )
                    self.carry(data, chunk.source_blocks)
                case Reply(session, frame):
                    self.to_sender.append((session, frame))
                case Emit(event):
                    self.events.append(event)
                case Dropped() | Write():
                    pass
        assert all(n <= LIMITS.window_bytes for n in self.sender.in_flight_bytes.values())

    def carry(self, frame: frames.Frame, blocks: tuple[int, ...]) -> None:
        if self.connection is not None:
            decoded = frames.decode(frames.encode(frame))
            self.to_receiver.append((self.connection, decoded, blocks))

    def deliver_to_receiver(self) -> None:
        if not self.to_receiver:
            return
        session, frame, blocks = self.to_receiver.popleft()
        sizes = []
        if isinstance(frame, frames.Data):
            sizes = [n * LAYOUT.piece_bytes for n in frame.runs for _ in "kv"]
        effects = self.receiver.on_frame(session, frame, sizes, self.now_s)
        for effect in effects:
            if not isinstance(effect, Write):
                continue
            payload = [self.source[effect.data.layer, block] for block in blocks]
            if tuple(payload) != effect.data.key_sums:
                self.do(self.receiver.on_corrupt(effect, "changed"))
            elif self.receiver.may_write(effect):
                assert not self.is_revoked
                for block, value in zip(effect.target_blocks, payload, strict=True):
                    self.target[effect.data.layer, block] = value
                self.do(self.receiver.on_written(effect))
        self.do(effects)
        self.do(self.receiver.on_quiet())

    def deliver_to_sender(self) -> None:
        if self.to_sender:
            session, frame = self.to_sender.popleft()
            if session == self.connection:
                decoded = frames.decode(frames.encode(frame))
                self.do(self.sender.on_frame(PEER, decoded, self.now_s))

    def cut(self, survivors: int) -> None:
        """Break the connection; the first `survivors` messages still reach the receiver."""
        if self.connection is None:
            return
        while len(self.to_receiver) > survivors:
            self.to_receiver.pop()
        self.to_sender.clear()
        self.connection = None
        self.do(self.sender.on_link_lost(PEER, self.now_s))

    def tick(self, by_s: float) -> None:
        self.now_s += by_s
        self.do(self.receiver.on_tick(self.now_s))
        self.do(self.sender.on_tick(self.now_s))

    def settle(self) -> None:
        for _ in range(2000):
            while self.to_receiver or self.to_sender:
                self.deliver_to_receiver()
                self.deliver_to_sender()
            deadlines = [self.sender.next_deadline_s(), self.receiver.next_deadline_s()]
            soonest_s = min((at_s for at_s in deadlines if at_s is not None), default=None)
            if soonest_s is None or not (self.sender.num_transfers or self.receiver.num_landings):
                return
            self.tick(max(0.0, soonest_s - self.now_s))
        raise AssertionError("the handoff did not end")


PUSHES = st.permutations([(layer, o) for layer in range(3) for o in range(NUM_BLOCKS)])
STEPS = st.lists(
    st.one_of(
        st.sampled_from(["push", "push", "receive", "receive", "answer", "tick", "commit"]),
        st.sampled_from(["abort", "revoke"]),
        st.tuples(st.just("cut"), st.integers(0, 6)),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(PUSHES, STEPS, st.booleans())
def test_a_handoff_is_right_or_fails_typed_whatever_the_network_does(
    pushes: list[tuple[int, int]], steps: list[object], may_give_up: bool
) -> None:
    """F14, F23, F28, F37, F56: one outcome on each side, equal bytes, nothing left behind."""
    world = World()
    world.receiver.on_expect(TICKET, 20.0, world.now_s)
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    left = list(pushes)
    has_committed = has_given_up = False

    def push() -> None:
        if left and not has_committed:
            layer, ordinal = left.pop()
            world.do(world.sender.on_push(TOKEN, layer, [ordinal], [SOURCES[ordinal]]))

    for step in steps:
        match step:
            case "push":
                push()
            case "receive":
                world.deliver_to_receiver()
            case "answer":
                world.deliver_to_sender()
            case "tick":
                world.tick(0.05)
            case "commit" if not left and not has_committed:
                has_committed = True
                world.do(world.sender.on_commit(TOKEN, COMMIT))
            case "abort" if may_give_up:
                has_given_up = True
                world.do(world.sender.on_abort(TOKEN))
            case "revoke" if may_give_up:
                has_given_up = world.is_revoked = True
                world.do(world.receiver.on_revoke(TOKEN))
            case ("cut", int(survivors)):
                world.cut(survivors)
    while left:
        push()
    if not has_committed:
        world.do(world.sender.on_commit(TOKEN, COMMIT))
    world.settle()

    ended = [event for event in world.events if isinstance(event, TransferEnded)]
    landed = [event for event in world.events if isinstance(event, Landed)]
    failed = [event for event in world.events if isinstance(event, LandingFailed)]
    assert len(ended) == 1
    assert len(landed) + len(failed) == 1 or (world.is_revoked and not failed)
    if ended[0].error is None or not has_given_up:
        # Cuts alone never cost the handoff: they are shorter than the silence that would.
        assert landed == [Landed(TOKEN, COMMIT)]
        assert ended[0].error is None
    if landed:
        assert world.target == {
            (layer, TICKET.target_block_ids[o]): world.source[layer, SOURCES[o]]
            for layer in range(3)
            for o in range(NUM_BLOCKS)
        }
    assert (world.sender.num_transfers, world.receiver.num_landings) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(PUSHES, st.integers(0, 30), st.integers(0, 2), st.sampled_from(SOURCES))
def test_a_source_that_changes_under_a_frame_never_lands(
    pushes: list[tuple[int, int]], delivered: int, layer: int, block: int
) -> None:
    """A frame is checked against what was true when it left, so a late read cannot land."""
    world = World()
    world.receiver.on_expect(TICKET, 20.0, world.now_s)
    world.do(world.sender.on_open(TICKET, 60.0, world.now_s))
    world.deliver_to_receiver()
    world.deliver_to_sender()
    for layer_pushed, ordinal in pushes:
        world.do(world.sender.on_push(TOKEN, layer_pushed, [ordinal], [SOURCES[ordinal]]))
    world.do(world.sender.on_commit(TOKEN, COMMIT))
    for _ in range(delivered):
        world.deliver_to_receiver()
    in_flight = {
        (frame.layer, source)
        for _, frame, blocks in world.to_receiver
        if isinstance(frame, frames.Data)
        for source in blocks
    }
    world.source[layer, block] = 777
    world.settle()
    landed = [event for event in world.events if isinstance(event, Landed)]
    if (layer, block) in in_flight:
        assert not landed
    else:
        assert landed
