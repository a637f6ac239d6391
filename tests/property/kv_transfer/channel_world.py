"""Both machines over several connections of a network that delivers, delays and breaks at random.

Each connection keeps its order; nothing else is in order. Copies begin and end at any time after
their frame, and read the source as late as a zero-copy send may. Source blocks change when their
transfer has ended, and target blocks have a new owner when they were released.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import PdserveError
from kv_transfer.connector.connector_parts import Effect
from kv_transfer.contract import Landed, LandingFailed, Released, Ticket, TransferEnded
from kv_transfer.receiving.effects import Dropped, OpenLane, SendBack, Write
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
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames
from tests.property.kv_transfer.machine_world import (
    COMMIT,
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PAIR_BYTES,
    PREFILL,
    SOURCES,
    TICKET,
    packed,
)

STEP_S = 0.1


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of a frame's blocks, with the source block of each."""

    write: Write
    blocks: tuple[int, ...]
    is_begun: bool = False


class ChannelWorld:
    """One transfer after the other; `wants` and `grants` are what the two sides may have."""

    def __init__(self, seed: object, wants: int, grants: int) -> None:
        self.rng = random.Random(str(seed))
        window = {"window_bytes": 8 * PAIR_BYTES, "max_frame_bytes": 2 * PAIR_BYTES}
        self.sender = Sender(PREFILL, LAYOUT, Limits(**window, max_channels=wants))
        self.receiver = Receiver(
            DECODE, LAYOUT, Limits(**window, max_channels=grants), num_blocks=8, verify="block"
        )
        self.now_s = 0.0
        self.source: dict[tuple[int, int], int] = {}
        self.target: dict[tuple[int, int], int] = {}
        self.holder: dict[int, int] = {}
        # The connection of each channel, and of all that ever were the peer and the messages.
        self.open: dict[Peer, bytes] = {}
        self.peer_of: dict[bytes, Peer] = {}
        self.to_receiver: dict[bytes, deque[tuple[frames.Frame, tuple[int, ...]]]] = {}
        self.to_sender: dict[bytes, deque[frames.Frame]] = {}
        self.mute: set[bytes] = set()
        self.copies: list[Copy] = []
        self.damage_next = 0
        self.used_channels: set[int] = set()
        self.ended: dict[int, PdserveError | None] = {}
        self.landed: set[int] = set()

    def begin(self, ticket: Ticket) -> None:
        """Expect, open, push and commit one transfer of new content."""
        token = ticket.lease_token
        self.source = {(n, b): token * 10_000 + 100 * n + b for n in range(3) for b in SOURCES}
        self.receiver.on_expect(ticket, 20.0, self.now_s)
        self.holder.update(dict.fromkeys(ticket.target_block_ids, token))
        self.do(self.sender.on_open(ticket, 60.0, self.now_s))
        for layer in range(LAYOUT.num_layers):
            self.do(self.sender.on_push(token, layer, range(NUM_BLOCKS), SOURCES))
            for _ in range(self.rng.randrange(6)):
                self.step()
        self.do(self.sender.on_commit(token, COMMIT))

    def do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect(peer):
                    connection = b"c%d" % len(self.peer_of)
                    self.open[peer], self.peer_of[connection] = connection, peer
                    self.to_receiver[connection], self.to_sender[connection] = deque(), deque()
                case Disconnect(peer):
                    self.open.pop(peer, None)
                case SayHello(peer):
                    hello = self.sender.hello(peer, {"zmq": b""}, "block")
                    self._send(peer, hello)
                case SendToPeer(peer, frame):
                    self._send(peer, frame)
                case SendChunk():
                    self._send_chunk(effect)
                case OpenLane(session):
                    self.do(self.receiver.on_lane(session, "zmq", b""))
                case SendBack(session, frame):
                    if session not in self.mute and session in self.to_sender:
                        self.to_sender[session].append(frame)
                case Write():
                    raise AssertionError("it has its payload")
                case Emit(event):
                    self._note(event)
                case TakeLane() | Dropped():
                    pass
        in_flight = sum(self.sender.in_flight_bytes.values())
        assert 0 <= in_flight <= 8 * PAIR_BYTES

    def _note(self, event: object) -> None:
        match event:
            case TransferEnded(token, error):
                self.ended[token] = error
                self.source = dict.fromkeys(self.source, -1)
            case Landed(token):
                assert token in self.holder.values()
                for ordinal, block in enumerate(TICKET.target_block_ids):
                    for layer in range(LAYOUT.num_layers):
                        wanted = token * 10_000 + 100 * layer + SOURCES[ordinal]
                        assert self.target[layer, block] == wanted, "a wrong byte landed"
                assert not any(copy.is_begun for copy in self.copies), "a copy goes on"
                self.landed.add(token)
                self._free(token)
            case Released(token):
                self._free(token)
            case LandingFailed():
                pass

    def _free(self, token: int) -> None:
        self.holder = {block: one for block, one in self.holder.items() if one != token}

    def _send(self, peer: Peer, frame: frames.Frame, blocks: tuple[int, ...] = ()) -> None:
        connection = self.open.get(peer)
        if connection is not None and connection not in self.mute:
            self.to_receiver[connection].append((frame, blocks))

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk = effect.chunk
        blocks = tuple(chunk.source_blocks.tolist())
        sums = packed([self.source[chunk.layer, block] % (1 << 64) for block in blocks])
        self.used_channels.add(effect.peer.channel)
        data = frames.Data(
            seq=effect.seq,
            lease_token=effect.lease_token,
            generation=effect.generation,
            layer=chunk.layer,
            ordinals=tuple(chunk.ordinals.tolist()),
            runs=(len(blocks),),
            source_blocks=(),
            sums=sums,
            wants_ack=effect.wants_ack,
        )
        self._send(effect.peer, data, blocks)

    # -- what may happen next --------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing that is due, or let time pass."""
        moves: list[tuple[str, bytes | Copy]] = []
        moves += [("in", one) for one, queue in self.to_receiver.items() if queue]
        moves += [("out", one) for one, queue in self.to_sender.items() if queue]
        moves += [("copy", one) for one in self.copies]
        if not moves or self.rng.random() < 0.02:
            self.tick()
            return
        kind, which = self.rng.choice(moves)
        if isinstance(which, Copy):
            self._copy(which)
        elif kind == "in":
            self._deliver(which)
        else:
            frame = self.to_sender[which].popleft()
            if self.open.get(self.peer_of[which]) == which:
                self.do(self.sender.on_frame(self.peer_of[which], frame, self.now_s))

    def tick(self) -> None:
        self.now_s += STEP_S
        self.do(self.sender.on_tick(self.now_s))
        self.do(self.receiver.on_tick(self.now_s))

    def _deliver(self, connection: bytes) -> None:
        frame, blocks = self.to_receiver[connection].popleft()
        sizes = [PAIR_BYTES // 2 * len(blocks)] * 2 if blocks else []
        effects = self.receiver.on_frame(connection, frame, sizes, self.now_s)
        writes = [effect for effect in effects if isinstance(effect, Write)]
        self.copies += [Copy(write, blocks) for write in writes]
        self.do(effect for effect in effects if not isinstance(effect, Write))

    def _copy(self, copy: Copy) -> None:
        write = copy.write
        if not copy.is_begun and self.receiver.may_write(write):
            copy.is_begun = True
            return
        self.copies.remove(copy)
        if not copy.is_begun:
            self.do(self.receiver.on_unwritten(write))
            return
        layer, damaged = write.data.layer, set()
        for index, target in enumerate(write.target_blocks.tolist()):
            assert self.holder.get(target) == write.data.lease_token, "a block of another owner"
            value = self.source[layer, copy.blocks[index]]
            if self.damage_next:
                self.damage_next, value = self.damage_next - 1, value + 1
            self.target[layer, target] = value
            said = int.from_bytes(write.data.sums[8 * index : 8 * index + 8], "little")
            if said != value % (1 << 64):
                damaged.add(write.data.ordinals[index])
        if damaged:
            self.do(self.receiver.on_corrupt(write, damaged, "damaged"))
        else:
            self.do(self.receiver.on_written(write))

    def cut(self, peer: Peer) -> None:
        """Break a connection: what is on the wire to the receiver may still arrive, or not."""
        connection = self.open.get(peer)
        if connection is None:
            return
        if self.rng.random() < 0.5:
            self.to_receiver[connection].clear()
        self.do(self.sender.on_link_lost(peer, self.now_s))

    def silence(self, peer: Peer) -> None:
        """Lose what is sent on a connection from now on, in both directions."""
        connection = self.open.get(peer)
        if connection is not None:
            self.mute.add(connection)
            self.to_receiver[connection].clear()
            self.to_sender[connection].clear()
