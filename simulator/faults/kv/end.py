"""One node's connector: its sender and its receiver, which are real, and their effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from common.errors import InternalError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from engine.core.blocks.block_pool import BlockPool, BlockUse
from kv_transfer.contract import (
    Commit,
    KVEvent,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.lanes.rdma.batch_queue import BATCHES_PER_WINDOW
from kv_transfer.receiving.effects import (
    CloseLane,
    Fence,
    MoveSlab,
    OpenLane,
    ReceiverEffect,
    SendBack,
    Write,
)
from kv_transfer.receiving.lane_uses import LaneUses
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    SayHello,
    SendChunk,
    SenderEffect,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.deadlines import earliest_s
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.lanes import LANES_BY_SPEED, ONE_SIDED_LANES, POOL_ONLY_LANES, VERIFY_AUTO
from kv_transfer.shared.limits import MAX_WAIT_S, Limits
from kv_transfer.wire import frames
from simulator.faults.contents import KVMemory, Numbers
from simulator.faults.hosts import ProcessClock
from simulator.faults.kv.copies import CopiedBlocks
from simulator.faults.kv.moving import MovingEnd, Parcel, SentPieces, data_of
from simulator.faults.kv.pieces import check_pieces
from simulator.faults.kv.ring import RingOfSlots
from simulator.faults.kv.wires import INLINE_LANE, KVSocket, KVWires
from simulator.faults.kv.written import WrittenBlocks

LEAST_WAIT_S = 1e-4
MOST_WOKEN = 10
"""Ticks that follow each other, in which a connector does nothing of what is due."""
WRITABLE = (BlockUse.RECEIVING, BlockUse.QUARANTINED)
_RING_SHARE = 2
"""The divisor of a ring's slots: it has few, so that frames wait for them."""


class KVEnd:
    """One node's connector, with the seven methods of `kv_transfer.contract.KVConnector`.

    `blocks_per_slab`: see `Receiver`. Raises `InternalError` for a write to memory that must not be
    written, and for pieces that land otherwise than they were sent.
    """

    def __init__(
        self,
        me: Incarnation,
        clock: ProcessClock,
        wires: KVWires,
        layout: KVLayout,
        memory: KVMemory,
        pool: BlockPool,
        limits: Limits,
        on_event: OnEvent,
        *,
        blocks_per_slab: int | None = None,
    ) -> None:
        self.me = me
        self.clock = clock
        self.wires = wires
        self.flights = wires.flights
        self.memory = memory
        self._piece_bytes = layout.piece_bytes
        self.batch_bytes = limits.window_bytes // BATCHES_PER_WINDOW
        self._pool = pool
        self._on_event = on_event
        self.sender = Sender(me, layout, limits, pool.num_blocks, memory.num_host_blocks)
        slab = blocks_per_slab or pool.num_blocks
        self.receiver = Receiver(
            me, layout, limits, num_blocks=pool.num_blocks, blocks_per_slab=slab
        )
        self._copied = CopiedBlocks(self)
        self._written = WrittenBlocks(self, pool.num_blocks, slab)
        self.ring: RingOfSlots | None = None
        if wires.lane == "rdma_read":
            num_slots = limits.ring_slots(layout) // _RING_SHARE
            self.ring = RingOfSlots(self, num_slots, layout.block_size)
        self._sent_here = SentPieces(memory)
        self._uses = LaneUses()
        self._connections: dict[Peer, KVSocket] = {}
        self._open: set[int] = set()
        self.sent: dict[int, set[int]] = {}
        """The blocks that were pushed, by the lease token of each transfer that has not ended."""
        self._tick_at_s = float("inf")
        self._num_woken = 0
        wires.join(self)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer and no landing is open, and no block waits for a writer."""
        receiver = self.receiver
        is_busy = self.sender.num_transfers or receiver.num_landings
        return not is_busy and not receiver.num_quarantined_blocks

    @property
    def holds_slots(self) -> bool:
        """Whether slots of the ring are lent.

        Some are for a moment after all transfers and landings, for which a draining node does not
        wait.
        """
        return self.ring is not None and not self.ring.is_idle

    # The contract.

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        """Open a landing."""
        self.receiver.on_expect(ticket, sender_deadline_s, self.clock.now_s())
        self._look_at_time()

    def revoke(self, lease_token: int) -> None:
        """Close a landing."""
        self.perform(self.receiver.on_revoke(lease_token))

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        """Begin a transfer."""
        self._open.add(ticket.lease_token)
        now_s = self.clock.now_s()
        self.perform(self.sender.on_open(ticket, deadline_s, now_s, priority))

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        """Send one layer of blocks."""
        if lease_token in self.sender.link_of:
            self.sent.setdefault(lease_token, set()).update(source_blocks)
        self.perform(self.sender.on_push(lease_token, layer, ordinals, source_blocks))

    def commit(self, lease_token: int, commit: Commit) -> None:
        """End a transfer whose blocks were all pushed."""
        self.perform(self.sender.on_commit(lease_token, commit))

    def abort(self, lease_token: int) -> None:
        """Abort a transfer."""
        self.perform(self.sender.on_abort(lease_token, self.clock.now_s()))

    def close(self) -> None:
        """End all transfers and landings. A process that dies does not do it."""
        self.perform(self.sender.on_close(self.clock.now_s()))
        self.perform(self.receiver.on_close())

    # Events.

    def on_parcel(self, session: bytes, parcel: Parcel, source: MovingEnd) -> None:
        """Take a frame of another node."""
        frame, sizes = parcel.frame, []
        if isinstance(frame, frames.Data):
            sizes = [n * self._piece_bytes for n in frame.runs for _ in "kv"]
        effects = self.receiver.on_frame(session, frame, sizes, self.clock.now_s())
        for write in [one for one in effects if isinstance(one, Write)]:
            self._write(write, parcel, source)
        self.perform(one for one in effects if not isinstance(one, Write))

    def on_answer(self, connection: KVSocket, session: bytes, frame: frames.Frame) -> None:
        """Take a frame back; one of a connection that was closed is dropped."""
        peer = connection.peer
        if self._connections.get(peer) is connection and connection.session == session:
            if isinstance(frame, frames.Ack) and self.ring is not None:
                self.ring.frames.acknowledge(peer, frame.consumed)
            self.perform(self.sender.on_frame(peer, frame, self.clock.now_s()))

    def lose_link(self, peer: Peer) -> None:
        """Close a connection whose lane has failed, or that is to have another lane."""
        self._disconnect(peer)
        self.perform(self.sender.on_link_lost(peer, self.clock.now_s()))

    def wake(self) -> None:
        """Look at the time, which has jumped."""
        self._tick()

    # Called by the modules that move bytes: `MovingEnd`.

    def send(self, peer: Peer, parcel: Parcel) -> None:
        """Send a frame on the connection to `peer`, if there is one."""
        connection = self._connections.get(peer)
        if connection is not None:
            self.wires.send(connection, parcel)

    def send_without_bytes(self, effect: SendChunk) -> None:
        """Send the header of a chunk whose transfer is over; DATA is numbered."""
        abort = frames.Abort(effect.lease_token, effect.generation)
        self._send_in_order(effect.peer.main, abort)
        self._send_in_order(effect.peer, data_of(effect))

    def bytes_in(self, num_blocks: int) -> int:
        """Return the size of blocks in one layer."""
        return 2 * num_blocks * self._piece_bytes

    def put(self, layer: int, blocks: Sequence[int], values: Numbers) -> None:
        """Write blocks. Raises `InternalError` where they may have been used again."""
        for block in blocks:
            if self._pool.use_of(block) not in WRITABLE:
                raise InternalError(f"{self.me} lets block {block} be written that it may reuse")
        self.memory.put(layer, blocks, values)

    def end_of(self, me: Incarnation) -> MovingEnd:
        """Return the connector of another process, which may be dead."""
        return self.wires.end_of(me)

    def put_written(self, effect: SendChunk, addresses: Sequence[int], values: Numbers) -> bool:
        """Write the blocks that another node sends; return False if the address was removed.

        Raises `InternalError` where the blocks are not held for this lease.
        """
        return self._written.put(effect, addresses, values)

    def bytes_of(self, parcel: Parcel, layer: int) -> Numbers:
        """Return the bytes that follow a header of this node, as they are when they arrive."""
        assert parcel.values is not None, "DATA has values"
        if not self.clock.is_alive:
            return parcel.values
        if parcel.is_in_ring:
            return self.slots_at(parcel.blocks)
        return self.memory.read(layer, parcel.blocks)

    def slots_at(self, slots: Sequence[int]) -> Numbers:
        """Return the contents of slots of the ring."""
        assert self.ring is not None, "only slots of a ring are named"
        return self.ring.slots_at(slots)

    def damaged_in(
        self, write: Write, parcel: Parcel, source: MovingEnd, values: Numbers
    ) -> frozenset[int]:
        """Return the ordinals of the blocks that differ from those sent.

        Raises `InternalError` where the sender has changed blocks that it still sends.
        """
        sent = parcel.values
        assert sent is not None, "DATA has values"
        found = zip(write.data.ordinals, values, sent, strict=True)
        wrong = frozenset(ordinal for ordinal, here, there in found if here != there)
        if wrong and source.clock.is_alive and source.sender.is_sending(write.data.lease_token):
            raise InternalError(f"{source.me} changed blocks that it sends to {self.me}")
        return wrong

    def record(self, write: Write, parcel: Parcel, damaged: frozenset[int]) -> None:
        """Report to the receiver that a write is in the pool."""
        assert parcel.values is not None, "DATA has values"
        if self.receiver.may_write(write):
            self._sent_here.add(write, parcel.values, damaged)
        if damaged:
            self.end_write(write, self.receiver.on_corrupt(write, damaged, "changed"))
        else:
            self.end_write(write, self.receiver.on_written(write))

    def end_write(self, write: Write, effects: Iterable[ReceiverEffect]) -> None:
        """Perform the receiver's effects at the end of a write, maybe the last of a session."""
        self.perform(effects)
        self._close_unused(write.session, self._uses.end_copy(write.session))

    def perform(self, effects: Iterable[SenderEffect | ReceiverEffect]) -> None:
        """Perform the effects of a machine, in order."""
        for effect in effects:
            match effect:
                case Emit(event):
                    self._emit(event)
                case SendChunk():
                    self._send_chunk(effect)
                case SendToPeer(peer, frame, is_behind_writes):
                    if is_behind_writes:
                        self._send_in_order(peer, frame)
                    else:
                        self.send(peer, Parcel(frame))
                case SendBack(session, frame):
                    self.wires.send_back(session, frame)
                case Connect(peer):
                    self._disconnect(peer)
                    self._connections[peer] = self.wires.connect(self, peer)
                case Disconnect(peer):
                    self._disconnect(peer)
                case SayHello(peer):
                    hello = self.sender.hello(peer, self._offers(peer), VERIFY_AUTO)
                    self.send(peer, Parcel(hello))
                case TakeLane(peer, lane, reply) if peer in self._connections:
                    self._connections[peer].lane = lane
                    if lane in ONE_SIDED_LANES:
                        self._written.accept(peer, reply)
                case OpenLane(session, offers):
                    self._open_lane(session, offers)
                case CloseLane(session, lane):
                    self._close_unused(session, self._uses.leave(session, lane))
                case MoveSlab():
                    self._move(effect)
                case Fence(_, slab):
                    self._written.fence(slab)
                    self.perform(self.receiver.on_fenced(self.clock.now_s()))
                case _:
                    pass
        self._look_at_time()

    # Inside.

    def _emit(self, event: KVEvent) -> None:
        match event:
            case TransferEnded(token):
                self.sent.pop(token, None)
                self._open.discard(token)
                if self.ring is not None:
                    self.ring.frames.on_ended(token)
            case Landed(token):
                self._sent_here.check(self.me, token)
                self._sent_here.forget(token)
            case LandingFailed(token) | Released(token):
                self._sent_here.forget(token)
        self._on_event(event)

    def _offers(self, peer: Peer) -> dict[str, bytes]:
        lane = self.wires.lane
        is_withheld = lane in ONE_SIDED_LANES and not self._written.may_offer(peer)
        return dict.fromkeys((INLINE_LANE,) if is_withheld else (lane, INLINE_LANE), b"")

    def _open_lane(self, session: bytes, offers: Iterable[str]) -> None:
        """Choose the fastest lane; slots are not read from a node where that failed lately."""
        known, refused = self.receiver.sessions.get(session), ""
        if self.ring is not None and known is not None and not self.ring.may_read(known.sender):
            refused = self.wires.lane
        lane = min((one for one in offers if one != refused), key=LANES_BY_SPEED.index)
        self._close_unused(session, self._uses.open(session, lane))
        reply = self._written.reply() if lane in ONE_SIDED_LANES else b""
        self.perform(self.receiver.on_lane(session, lane, reply))

    def _move(self, move: MoveSlab) -> None:
        """Add an address under which a slab can be written."""
        reply = self._written.move(move.slab)
        self.perform(self.receiver.on_moved(move.lane, reply, self.clock.now_s()))

    def _disconnect(self, peer: Peer) -> None:
        connection = self._connections.pop(peer, None)
        if self.ring is not None:
            self.ring.frames.drop(peer, self._open)
        if connection is not None:
            self._written.forget(peer)
            self.wires.close(connection)

    def _send_in_order(self, peer: Peer, frame: frames.Frame) -> None:
        """Send a frame, where the peer is written to after all writes before it."""
        connection = self._connections.get(peer)
        if connection is not None and connection.lane in ONE_SIDED_LANES:
            self._written.send_after(peer, Parcel(frame))
        else:
            self.send(peer, Parcel(frame))

    def _send_chunk(self, effect: SendChunk) -> None:
        connection = self._connections.get(effect.peer)
        if connection is None:
            return
        lane = connection.lane
        is_in_pool = int(effect.chunk.source_blocks[0]) < self._pool.num_blocks
        if not is_in_pool and lane in POOL_ONLY_LANES:
            self.perform(self.sender.on_abort(effect.lease_token, self.clock.now_s()))
        if self.ring is not None:
            self.ring.send(effect, lane, is_in_pool=is_in_pool)
        elif not self.sender.is_sending(effect.lease_token):
            self.send_without_bytes(effect)
        elif lane in ONE_SIDED_LANES:
            self._written.send(effect)
        else:
            self._copied.send(effect, lane)

    def _close_unused(self, session: bytes, lane: str) -> None:
        """Close the lane, if any, of a session that is over and has no copies in progress."""
        if lane and self.ring is not None:
            self.ring.drop(session)

    def _write(self, write: Write, parcel: Parcel, source: MovingEnd) -> None:
        self._uses.begin_copy(write.session)
        if write.lane in ONE_SIDED_LANES:
            if self.receiver.may_write(write):
                self.record(write, parcel, frozenset())
            else:
                self.end_write(write, self.receiver.on_unwritten(write))
        elif self.ring is not None:
            self.ring.write(write, parcel, source)
        else:
            self._copied.write(write, parcel, source)

    def _look_at_time(self) -> None:
        """Tick when the next deadline passes, and each second, as the connector's thread does."""
        due_s = earliest_s(self.sender.next_deadline_s(), self.receiver.next_deadline_s())
        if due_s is None:
            return
        now_s = self.clock.now_s()
        due_s = min(max(due_s, now_s + LEAST_WAIT_S), now_s + MAX_WAIT_S)
        if due_s < self._tick_at_s:
            self._tick_at_s = due_s
            self.clock.at(due_s, partial(self._tick_due, due_s))

    def _tick_due(self, due_s: float) -> None:
        if due_s == self._tick_at_s:
            self._tick()

    def _tick(self) -> None:
        self._tick_at_s = float("inf")
        now_s = self.clock.now_s()
        for peer in self._written.take_offered_again():
            if peer in self._connections:
                self.lose_link(peer)
        came = self.receiver.on_tick(now_s)
        self.perform(came)
        sent = self.sender.on_tick(now_s)
        self.perform(sent)
        self._check_woken(now_s, is_idle=not (came or sent))
        check_pieces(self.me, self.sender)

    def _check_woken(self, now_s: float, *, is_idle: bool) -> None:
        """Check that what is due is done: a thread that is woken for nothing takes a core.

        Raises `InternalError`.
        """
        due_s = earliest_s(self.sender.next_deadline_s(), self.receiver.next_deadline_s())
        is_still_due = is_idle and due_s is not None and due_s <= now_s
        self._num_woken = self._num_woken + 1 if is_still_due else 0
        if self._num_woken > MOST_WOKEN:
            raise InternalError(f"{self.me} is woken for KV again and again, and does nothing")
