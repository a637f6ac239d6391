"""The KV plane: each node's real sender and receiver, on connections that break.

A connection is a socket of ZMQ to an address. It keeps its order, waits while its path is cut, and
waits for a process at its address. When it breaks, the socket connects again by itself: what was on
its way is lost, and the receiver takes what follows for a session of its own. Nobody is told.

The bytes of a frame are read from the sender's blocks when it arrives, as late as a zero-copy send
may be, and compared with what they were: a checksum of the real connector does the same. On a
one-sided lane its sender writes them, whatever the receiver thinks of its landing, as long as the
pool is where the sender was told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from common.errors import InternalError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from engine.core.blocks.block_pool import BlockPool, BlockUse
from kv_transfer.contract import Commit, OnEvent, Ticket, TransferEnded
from kv_transfer.receiving.effects import (
    Fence,
    MoveSlab,
    OpenLane,
    ReceiverEffect,
    SendBack,
    Write,
)
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
from kv_transfer.shared.block_arrays import run_lengths
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.lanes import ONE_SIDED_LANES, VERIFY_AUTO
from kv_transfer.shared.limits import MAX_WAIT_S, Limits
from kv_transfer.wire import frames
from simulator.faults.contents import KVMemory, Numbers
from simulator.faults.hosts import Paths, ProcessClock
from simulator.timeline import Timeline

INLINE_LANE = "zmq"
LEAST_WAIT_S = 1e-4
WRITABLE = (BlockUse.RECEIVING, BlockUse.QUARANTINED)


@dataclass(slots=True, eq=False)
class _Parcel:
    """A frame on its way. DATA has the blocks that it is read from, and what they held.

    Where its sender writes them, it has the blocks that they are written to, and the address.
    """

    frame: frames.Frame
    blocks: Sequence[int] = ()
    values: Numbers | None = None
    targets: Sequence[int] = ()
    address: bytes = b""


@dataclass(slots=True, eq=False)
class _Connection:
    """One socket of a sender. `session` is another one after each break."""

    peer: Peer
    source: KVEnd
    session: bytes
    there: deque[tuple[bytes, _Parcel]] = field(default_factory=deque)
    back: deque[tuple[bytes, frames.Frame]] = field(default_factory=deque)
    lane: str = ""
    address: bytes = b""
    """That of the peer's pool."""


class KVWires:
    """All connections between nodes, on one lane; `ends` are the living nodes by address."""

    def __init__(self, timeline: Timeline, paths: Paths, latency_s: float) -> None:
        self.lane = INLINE_LANE
        self._timeline = timeline
        self._paths = paths
        self._latency_s = latency_s
        self._sessions = count(1)
        self.ends: dict[str, KVEnd] = {}
        self._connections: list[_Connection] = []

    def join(self, end: KVEnd) -> None:
        """Have a node listen at its address."""
        self.ends[end.me.node_id] = end
        self.flush()

    def leave(self, end: KVEnd) -> None:
        """Break everything of a node that is dead."""
        if self.ends.get(end.me.node_id) is end:
            del self.ends[end.me.node_id]
        self._connections = [one for one in self._connections if one.source is not end]
        for one in self._connections:
            if one.peer.endpoint == end.me.node_id:
                self._break(one)

    def break_between(self, first: str, second: str, *, arrives: bool) -> None:
        """Break the connections between two nodes; with `arrives` what was sent is read first."""
        for one in list(self._connections):
            if {one.source.me.node_id, one.peer.endpoint} == {first, second}:
                if arrives:
                    while one.there and self._arrive(one):
                        pass
                self._break(one)

    def flush(self) -> None:
        """Let what waits go on: a path is open again, or somebody listens again."""
        for one in self._connections:
            for _ in one.there:
                self._timeline.after(self._latency_s, partial(self._arrive, one))
            for _ in one.back:
                self._timeline.after(self._latency_s, partial(self._arrive_back, one))

    def connect(self, source: KVEnd, peer: Peer) -> _Connection:
        """Return a new connection."""
        connection = _Connection(peer, source, self._new_session())
        self._connections.append(connection)
        return connection

    def close(self, connection: _Connection) -> None:
        """Close a connection; what was not read is lost."""
        connection.there.clear()
        self._connections.remove(connection)

    def send(self, connection: _Connection, parcel: _Parcel) -> None:
        """Send a frame to the address of the connection's peer."""
        connection.there.append((connection.session, parcel))
        self._timeline.after(self._latency_s, partial(self._arrive, connection))

    def send_back(self, session: bytes, frame: frames.Frame) -> None:
        """Send a frame back on a session; it is lost if that is over."""
        for one in self._connections:
            if one.session == session:
                one.back.append((session, frame))
                self._timeline.after(self._latency_s, partial(self._arrive_back, one))

    def _new_session(self) -> bytes:
        return b"%d" % next(self._sessions)

    def _break(self, connection: _Connection) -> None:
        connection.there.clear()
        connection.back.clear()
        connection.session = self._new_session()

    def _arrive(self, connection: _Connection) -> bool:
        target = self.ends.get(connection.peer.endpoint)
        source = connection.source
        if target is None or not connection.there:
            return False
        if not self._paths.is_open(source.me.node_id, target.me.node_id):
            return False
        session, parcel = connection.there.popleft()
        target.clock.run(partial(target.on_parcel, session, parcel, source))
        return True

    def _arrive_back(self, connection: _Connection) -> None:
        names = connection.peer.endpoint, connection.source.me.node_id
        if connection.back and self._paths.is_open(*names):
            session, frame = connection.back.popleft()
            source = connection.source
            source.clock.run(partial(source.on_answer, connection, session, frame))


class KVEnd:
    """One node's connector, with the seven methods of `kv_transfer.contract.KVConnector`.

    Raises `InternalError` where a write would reach a block that it must not reach.
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
    ) -> None:
        self.me = me
        self.clock = clock
        self._wires = wires
        self._piece_bytes = layout.piece_bytes
        self._memory = memory
        self._pool = pool
        self._on_event = on_event
        self.sender = Sender(me, layout, limits, pool.num_blocks, memory.num_host_blocks)
        self.receiver = Receiver(me, layout, limits, num_blocks=pool.num_blocks)
        self._num_moves = 0
        self._addresses = [b"0"]
        """Those under which the pool can be written; the last is the newest."""
        self._connections: dict[Peer, _Connection] = {}
        self.sent: dict[int, set[int]] = {}
        """The blocks that were pushed, by the lease token of each transfer that has not ended."""
        self._tick_at_s = float("inf")
        wires.join(self)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer and no landing is open, and no block waits for a writer."""
        receiver = self.receiver
        is_busy = self.sender.num_transfers or receiver.num_landings
        return not is_busy and not receiver.num_quarantined_blocks

    # The contract.

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        """Open a landing."""
        self.receiver.on_expect(ticket, sender_deadline_s, self.clock.now_s())
        self._look_at_time()

    def revoke(self, lease_token: int) -> None:
        """Close a landing."""
        self._perform(self.receiver.on_revoke(lease_token))

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        """Begin a transfer."""
        now_s = self.clock.now_s()
        self._perform(self.sender.on_open(ticket, deadline_s, now_s, priority))

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        """Send one layer of blocks."""
        if lease_token in self.sender.link_of:
            self.sent.setdefault(lease_token, set()).update(source_blocks)
        self._perform(self.sender.on_push(lease_token, layer, ordinals, source_blocks))

    def commit(self, lease_token: int, commit: Commit) -> None:
        """End a transfer whose blocks were all pushed."""
        self._perform(self.sender.on_commit(lease_token, commit))

    def abort(self, lease_token: int) -> None:
        """Abort a transfer."""
        self._perform(self.sender.on_abort(lease_token))

    def close(self) -> None:
        """End all transfers and landings. A process that dies does not do it."""
        self._perform(self.sender.on_close(self.clock.now_s()))
        self._perform(self.receiver.on_close())

    # Events.

    def on_parcel(self, session: bytes, parcel: _Parcel, source: KVEnd) -> None:
        """Take a frame of another node."""
        frame, sizes = parcel.frame, []
        if isinstance(frame, frames.Data):
            if parcel.targets and parcel.address not in self._addresses:
                mine = Peer(self.me.node_id, self.me)
                source.clock.run(partial(source.on_refused_write, mine))
                return
            if parcel.targets:
                self._put(frame.layer, parcel.targets, parcel, source)
            sizes = [n * self._piece_bytes for n in frame.runs for _ in "kv"]
        effects = self.receiver.on_frame(session, frame, sizes, self.clock.now_s())
        writes = [one for one in effects if isinstance(one, Write)]
        for write in writes:
            self._write(write, parcel, source)
        self._perform(one for one in effects if not isinstance(one, Write))

    def on_answer(self, connection: _Connection, session: bytes, frame: frames.Frame) -> None:
        """Take a frame back; one of a connection that was closed is dropped."""
        peer = connection.peer
        if self._connections.get(peer) is connection and connection.session == session:
            self._perform(self.sender.on_frame(peer, frame, self.clock.now_s()))

    def on_refused_write(self, peer: Peer) -> None:
        """Take that a write to `peer` failed: the connection is over."""
        self._perform(self.sender.on_link_lost(peer, self.clock.now_s()))

    def wake(self) -> None:
        """Look at the time, which has jumped."""
        self._tick()

    # Inside.

    def _perform(self, effects: Iterable[SenderEffect | ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case Emit(event):
                    if isinstance(event, TransferEnded):
                        self.sent.pop(event.lease_token, None)
                    self._on_event(event)
                case SendChunk():
                    self._send_chunk(effect)
                case SendToPeer(peer, frame):
                    self._send(peer, _Parcel(frame))
                case SendBack(session, frame):
                    self._wires.send_back(session, frame)
                case Connect(peer):
                    self._disconnect(peer)
                    self._connections[peer] = self._wires.connect(self, peer)
                case Disconnect(peer):
                    self._disconnect(peer)
                case SayHello(peer):
                    hello = self.sender.hello(peer, {self._wires.lane: b""}, VERIFY_AUTO)
                    self._send(peer, _Parcel(hello))
                case TakeLane(peer, lane, address) if peer in self._connections:
                    connection = self._connections[peer]
                    connection.lane, connection.address = lane, address
                case OpenLane(session, offers):
                    (lane,) = offers
                    self._perform(self.receiver.on_lane(session, lane, self._addresses[-1]))
                case MoveSlab():
                    self._move(effect)
                case Fence():
                    del self._addresses[:-1]
                    self._perform(self.receiver.on_fenced(self.clock.now_s()))
                case _:
                    pass
        self._look_at_time()

    def _move(self, move: MoveSlab) -> None:
        """Let the pool be written under a further address."""
        self._num_moves += 1
        self._addresses.append(b"%d" % self._num_moves)
        now_s = self.clock.now_s()
        self._perform(self.receiver.on_moved(move.lane, self._addresses[-1], now_s))

    def _disconnect(self, peer: Peer) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._wires.close(connection)

    def _send(self, peer: Peer, parcel: _Parcel) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            self._wires.send(connection, parcel)

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk, connection = effect.chunk, self._connections.get(effect.peer)
        if connection is None:
            return
        blocks: list[int] = chunk.source_blocks.tolist()
        is_sending = self.sender.is_sending(effect.lease_token)
        is_inline = is_sending and connection.lane not in ONE_SIDED_LANES
        if not is_sending:
            # As the connector does: DATA is numbered, and cannot be left out.
            abort = frames.Abort(effect.lease_token, effect.generation)
            self._send(effect.peer.main, _Parcel(abort))
        data = frames.Data(
            seq=effect.seq,
            lease_token=effect.lease_token,
            generation=effect.generation,
            layer=chunk.layer,
            ordinals=tuple(chunk.ordinals.tolist()),
            runs=tuple(run_lengths(chunk.source_blocks).tolist()) if is_inline else (),
            source_blocks=(),
            sums=bytes(16 * len(blocks)) if is_inline else b"",
            wants_ack=effect.wants_ack,
        )
        values = self._memory.read(chunk.layer, blocks)
        targets = effect.target_blocks.tolist() if is_sending and not is_inline else ()
        parcel = _Parcel(data, blocks, values, targets, connection.address)
        self._send(effect.peer, parcel)

    def _put(
        self, layer: int, targets: Sequence[int], parcel: _Parcel, source: KVEnd
    ) -> tuple[Numbers, Numbers]:
        """Write blocks as they are now; return what they are, and what was sent."""
        for block in targets:
            if self._pool.use_of(block) not in WRITABLE:
                raise InternalError(f"{self.me} lets block {block} be written that it may reuse")
        values, sent = parcel.values, parcel.values
        if source.clock.is_alive:
            values = source._memory.read(layer, parcel.blocks)
        assert values is not None, "DATA has values"
        assert sent is not None, "DATA has values"
        self._memory.put(layer, targets, values)
        return values, sent

    def _write(self, write: Write, parcel: _Parcel, source: KVEnd) -> None:
        if not self.receiver.may_write(write):
            self._perform(self.receiver.on_unwritten(write))
            return
        if parcel.targets:
            self._perform(self.receiver.on_written(write))
            return
        targets = write.target_blocks.tolist()
        values, sent = self._put(write.data.layer, targets, parcel, source)
        if (values == sent).all():
            self._perform(self.receiver.on_written(write))
            return
        if source.sender.is_sending(write.data.lease_token):
            raise InternalError(f"{source.me} changed blocks that it sends to {self.me}")
        is_wrong = (values != sent).any(axis=1).tolist()
        damaged = frozenset(
            ordinal for ordinal, wrong in zip(write.data.ordinals, is_wrong, strict=True) if wrong
        )
        self._perform(self.receiver.on_corrupt(write, damaged, "changed"))

    def _look_at_time(self) -> None:
        """Tick when the next deadline passes, and each second, as the connector's thread does."""
        ends = (self.sender.next_deadline_s(), self.receiver.next_deadline_s())
        due_s = min((at_s for at_s in ends if at_s is not None), default=None)
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
        self._perform(self.receiver.on_tick(now_s))
        self._perform(self.sender.on_tick(now_s))
