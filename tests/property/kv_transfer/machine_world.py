"""Sender and receiver machines joined by a network that breaks wherever a test likes.

The pools are dictionaries and a piece's checksum is its value, so a wrong byte is a wrong number.
Payloads are read from the source when they are delivered, as late as a zero-copy send may be.

On the one-sided lane the sender's writes wait in `posted` until `nic` lets one go; no cut and no
end of a transfer takes them back, only a fence does. Each asserts that the block that it changes
is still held for the landing that it was meant for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.connector.connector_parts import Effect
from kv_transfer.contract import Commit, KVEvent, Landed, Released, Ticket
from kv_transfer.receiving.effects import (
    CloseLane,
    Dropped,
    Fence,
    MoveSlab,
    OpenLane,
    SendBack,
    Write,
)
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    SayHello,
    SendChunk,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.block_arrays import run_lengths
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from kv_transfer.shared.limits import BESIDE_WINDOWS, MAX_WAIT_S, Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
LIMITS = Limits(window_bytes=3 * PAIR_BYTES, max_frame_bytes=2 * PAIR_BYTES)
PREFILL, DECODE = Incarnation("p", 1), Incarnation("d", 1)
PEER = Peer("there", DECODE)
NUM_BLOCKS = 5
BLOCKS_PER_SLAB = 4
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


def packed(sums: Sequence[int]) -> bytes:
    """Return the numbers as `Data.sums`; a block's keys and values are one number here."""
    return 2 * b"".join(one.to_bytes(8, "little") for one in sums)


def _said(data: frames.Data, index: int) -> bytes:
    return 2 * data.sums[8 * index : 8 * index + 8]


@dataclass(eq=False, slots=True)
class Post:
    """A write of one block of one layer that the sender's adapter was given."""

    connection: bytes
    token: int
    layer: int
    source_block: int
    target_block: int
    key: int
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """A frame to the receiver; DATA on an inline lane carries what `blocks` hold on arrival."""

    frame: frames.Frame
    blocks: tuple[int, ...] = ()


class World:
    """Both machines, one connection at a time, and time that only the test moves."""

    def __init__(self, lane: str = "zmq", verify: str = "block") -> None:
        self.lane, self.verify = lane, verify
        self.is_one_sided = lane in ONE_SIDED_LANES
        self.now_s = 0.0
        self.sender = Sender(PREFILL, LAYOUT, LIMITS)
        self.receiver = Receiver(
            DECODE,
            LAYOUT,
            LIMITS,
            num_blocks=8,
            verify=verify,
            blocks_per_slab=BLOCKS_PER_SLAB,
        )
        self.source = {(layer, b): 1000 * layer + b for layer in range(3) for b in SOURCES}
        self.target: dict[tuple[int, int], int] = {}
        self.connection: bytes | None = None
        self.num_connections = 0
        self.to_receiver: deque[tuple[bytes, Message]] = deque()
        self.to_sender: deque[tuple[bytes, frames.Frame]] = deque()
        # What waits for writes before it leaves, on the present connection; and those writes.
        self.behind_writes: deque[Post | Message] = deque()
        self.posted: deque[Post] = deque()
        # What a write must name, for each slab; what it may name too, of a slab that moves; and
        # what the sender knows of that.
        self.keys = [0, 0]
        self.left_keys: dict[int, int] = {}
        self.known_keys = [0, 0]
        self.holder: dict[int, int] = {}
        self.events: list[KVEvent] = []
        self.is_revoked = False
        # Of each of the next writes, the index of the block that the wire changes.
        self.damage_next: list[int] = []

    def expect(self, ticket: Ticket = TICKET) -> None:
        self.receiver.on_expect(ticket, 20.0, self.now_s)
        self.holder.update(dict.fromkeys(ticket.target_block_ids, ticket.lease_token))

    def do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._perform(effect)
        most_bytes = LIMITS.window_bytes * (BESIDE_WINDOWS if self.is_one_sided else 1)
        assert all(n <= most_bytes for n in self.sender.in_flight_bytes.values())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Connect():
                self.num_connections += 1
                self.connection = b"%d" % self.num_connections
            case Disconnect():
                self.connection = None
                self.behind_writes.clear()
            case SayHello(peer):
                self.carry(Message(self.sender.hello(peer, {self.lane: b""}, self.verify)))
            case SendToPeer(_, frame, is_behind_writes):
                self.carry(Message(frame), is_behind_writes=is_behind_writes)
            case SendChunk():
                self._send_chunk(effect)
            case SendBack(session, frame):
                self.to_sender.append((session, frames.decode(frames.encode(frame))))
            case OpenLane(session, offers):
                assert list(offers) == [self.lane]
                self.do(self.receiver.on_lane(session, self.lane, bytes(self.keys)))
            case MoveSlab(lane, slab):
                self.left_keys[slab] = self.keys[slab]
                self.keys[slab] += 1
                self.do(self.receiver.on_moved(lane, bytes(self.keys), self.now_s))
            case Fence(_, slab):
                del self.left_keys[slab]
                self.do(self.receiver.on_fenced(self.now_s))
            case TakeLane(_, _, lane_reply):
                self.known_keys = list(lane_reply)
            case Emit(event):
                self.events.append(event)
                if isinstance(event, Landed | Released):
                    freed = [b for b, token in self.holder.items() if token == event.lease_token]
                    for block in freed:
                        del self.holder[block]
            case CloseLane() | Dropped() | Write():
                pass

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk = effect.chunk
        blocks = tuple(chunk.source_blocks.tolist())
        sums = tuple(self.source[chunk.layer, b] for b in blocks)
        if effect.verify == "commit":
            self.sender.on_summed(effect.lease_token, chunk, 2 * np.array(sums, np.uint64))
        sums = sums if effect.verify == "block" else ()
        if self.is_one_sided and self.connection is not None:
            for source, target in zip(blocks, effect.target_blocks.tolist(), strict=True):
                key = self.known_keys[target // BLOCKS_PER_SLAB]
                post = Post(self.connection, effect.lease_token, chunk.layer, source, target, key)
                self.posted.append(post)
                self.behind_writes.append(post)
        data = frames.Data(
            seq=effect.seq,
            lease_token=effect.lease_token,
            generation=effect.generation,
            layer=chunk.layer,
            ordinals=tuple(chunk.ordinals.tolist()),
            runs=() if self.is_one_sided else tuple(run_lengths(chunk.source_blocks).tolist()),
            source_blocks=(),
            sums=packed(sums),
            wants_ack=effect.wants_ack,
        )
        self.carry(Message(data, blocks), is_behind_writes=True)

    def carry(self, message: Message, *, is_behind_writes: bool = False) -> None:
        if self.connection is None:
            return
        message = Message(frames.decode(frames.encode(message.frame)), message.blocks)
        if self.is_one_sided and is_behind_writes:
            self.behind_writes.append(message)
            self._pass_on()
        else:
            self.to_receiver.append((self.connection, message))

    def _pass_on(self) -> None:
        """Send the headers that wait behind no write any more."""
        while self.behind_writes and self.connection is not None:
            head = self.behind_writes[0]
            if isinstance(head, Post) and not head.is_done:
                return
            self.behind_writes.popleft()
            if isinstance(head, Message):
                self.to_receiver.append((self.connection, head))

    def nic(self) -> None:
        """Perform the oldest write in flight, or refuse it because its key was removed."""
        if not self.posted:
            return
        post = self.posted.popleft()
        slab = post.target_block // BLOCKS_PER_SLAB
        if post.key not in (self.keys[slab], self.left_keys.get(slab)):
            if post.connection == self.connection:
                self.do(self.sender.on_link_lost(PEER, self.now_s))
            return
        assert self.holder.get(post.target_block) == post.token, "a late write"
        self.target[post.layer, post.target_block] = self.source[post.layer, post.source_block]
        post.is_done = True
        self._pass_on()

    def deliver_to_receiver(self) -> None:
        if not self.to_receiver:
            return
        session, message = self.to_receiver.popleft()
        frame, sizes = message.frame, []
        if isinstance(frame, frames.Data):
            sizes = [n * LAYOUT.piece_bytes for n in frame.runs for _ in "kv"]
        effects = self.receiver.on_frame(session, frame, sizes, self.now_s)
        for effect in effects:
            if isinstance(effect, Write):
                self._write(effect, message.blocks)
        self.do(effects)

    def _write(self, write: Write, blocks: tuple[int, ...]) -> None:
        layer, targets = write.data.layer, write.target_blocks.tolist()
        if self.is_one_sided:
            payload = [self.target[layer, block] for block in targets]
        else:
            payload = [self.source[layer, block] for block in blocks]
        if self.damage_next:
            at = self.damage_next.pop()
            payload[at % len(payload)] += 1
        if not self.is_one_sided:
            if not self.receiver.may_write(write):
                return
            for block, value in zip(targets, payload, strict=True):
                assert self.holder.get(block) == write.data.lease_token
                self.target[layer, block] = value
        damaged = frozenset(
            ordinal
            for index, ordinal in enumerate(write.data.ordinals)
            if write.verify == "block"
            and packed(payload[index : index + 1]) != _said(write.data, index)
        )
        if damaged:
            self.do(self.receiver.on_corrupt(write, damaged, "changed"))
            return
        sums = 2 * np.array(payload, np.uint64) if write.verify == "commit" else None
        self.do(self.receiver.on_written(write, sums))

    def deliver_to_sender(self) -> None:
        if self.to_sender:
            session, frame = self.to_sender.popleft()
            if session == self.connection:
                self.do(self.sender.on_frame(PEER, frame, self.now_s))

    def cut(self, survivors: int) -> None:
        """Break the connection; the first `survivors` messages still reach the receiver."""
        if self.connection is None:
            return
        while len(self.to_receiver) > survivors:
            self.to_receiver.pop()
        self.to_sender.clear()
        self.connection = None
        self.behind_writes.clear()
        self.do(self.sender.on_link_lost(PEER, self.now_s))

    def tick(self, by_s: float) -> None:
        self.now_s += by_s
        self.do(self.receiver.on_tick(self.now_s))
        self.do(self.sender.on_tick(self.now_s))

    @property
    def is_over(self) -> bool:
        receiver = self.receiver
        is_busy = self.sender.num_transfers or receiver.num_landings or self.holder
        return not is_busy and not receiver.num_quarantined_blocks

    def settle(self, *, is_nic_stuck: bool = False) -> None:
        """Run until everything has ended; `is_nic_stuck`: posted writes are never performed."""
        for _ in range(2000):
            while self.to_receiver or self.to_sender or (self.posted and not is_nic_stuck):
                self.deliver_to_receiver()
                self.deliver_to_sender()
                if not is_nic_stuck:
                    self.nic()
            deadlines = [self.sender.next_deadline_s(), self.receiver.next_deadline_s()]
            soonest_s = min((at_s for at_s in deadlines if at_s is not None), default=None)
            if self.is_over:
                return
            wait_s = 0.0 if soonest_s is None else max(0.0, soonest_s - self.now_s)
            self.tick(min(wait_s, MAX_WAIT_S))  # As a connector's thread waits.
        raise AssertionError("the handoff did not end")
