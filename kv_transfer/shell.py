"""A KV connector over any transport and lanes: one thread, two machines, one pool.

The connector's thread owns the transport and the lanes, reads the pool to send and is the only one
here to write it.
Other threads call the machines under `_sender_lock` or `_receiver_lock` and leave the effects in
one queue, in order; its length is bounded by the window and the open transfers. The receiving lock
is also held from the last check of a landing to the end of its write: that is what makes `revoke`
a fence. Events are emitted with no lock held, so `on_event` may call the connector.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import assert_never, cast

from common.clock import Clock
from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from common.kv_layout import KVLayout
from kv_transfer import pieces
from kv_transfer.connector import (
    Commit,
    KVEvent,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.core import frames
from kv_transfer.core.effects import (
    CloseLane,
    Connect,
    Disconnect,
    Dropped,
    DropReason,
    Effect,
    Emit,
    Fence,
    OpenLane,
    Peer,
    Reply,
    SayHello,
    SendChunk,
    SendToPeer,
    TakeLane,
    Write,
)
from kv_transfer.core.lanes import (
    INLINE_LANES,
    LANES_BY_SPEED,
    ONE_SIDED_LANES,
    PULLING_LANES,
    VERIFY_AUTO,
)
from kv_transfer.core.limits import Limits
from kv_transfer.core.receiver import Receiver
from kv_transfer.core.sender import Sender
from kv_transfer.lane import Broken, Lane, OneSidedLane, PullingLane
from kv_transfer.statistics import ConnectorStatistics
from kv_transfer.transfer_metrics import TransferMetrics, TransferTiming
from kv_transfer.transport import Arrival, FromPeer, FromSession, LinkLost, Parts, Transport

logger = logging.getLogger("pdserve.kv_transfer")

MAX_WAIT_S = 1.0
MAX_ARRIVALS_PER_TURN = 256
LOG_INTERVAL_S = 10.0


class TransportConnector:
    """Implements `KVConnector`; transports and lanes differ, this does not."""

    def __init__(
        self,
        pool: pieces.Pool,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        transport: Transport,
        lanes: Sequence[Lane],
        verify: str = VERIFY_AUTO,
        clock: Clock,
        limits: Limits,
    ) -> None:
        """`lanes` are offered to decode nodes and taken from prefill nodes; `verify` is a mode of
        `core.lanes` or auto.
        """
        pieces.check_pool(pool, layout)
        self._pool = pool
        self._layout = layout
        self._on_event = on_event
        self._transport = transport
        self._clock = clock
        self._verify = verify
        self._lanes = {lane.name: lane for lane in lanes}
        self._pulling = {
            name: cast(PullingLane, lane)
            for name, lane in self._lanes.items()
            if name in PULLING_LANES
        }
        self._one_sided: dict[str, OneSidedLane] = {
            name: cast(OneSidedLane, lane)
            for name, lane in self._lanes.items()
            if name in ONE_SIDED_LANES
        }
        self._lane_to: dict[Peer, Lane] = {}
        self._sender = Sender(incarnation, layout, limits)
        self._receiver = Receiver(
            incarnation,
            layout,
            limits,
            num_blocks=pool.shape[2],
            verify=verify,
            blocks_per_slab=min(
                (lane.blocks_per_slab for lane in self._one_sided.values()), default=None
            ),
        )
        self._sender_lock = threading.Lock()
        self._receiver_lock = threading.Lock()
        self._effects: deque[Effect] = deque()
        self._is_closing = False
        self._is_closed = False
        self._bytes_sent = 0
        self._bytes_received = 0
        self._checksum_failures = 0
        self._dropped = dict.fromkeys(DropReason, 0)
        self._logged_at_s: dict[DropReason, float] = {}
        self._metrics = TransferMetrics(self._lanes)
        for lane in self._one_sided.values():
            lane.attach(transport.wake)
        self._thread = threading.Thread(target=self._run, name="pdserve-kv", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where senders connect to; goes into tickets."""
        return self._transport.endpoint

    # -- the contract ----------------------------------------------------------------------------

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        with self._receiver_lock:
            self._refuse_when_closed()
            self._receiver.on_expect(ticket, sender_deadline_s, self._clock.now_s())
        self._transport.wake()

    def revoke(self, lease_token: int) -> None:
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_revoke(lease_token))
        self._transport.wake()

    def open(self, ticket: Ticket, *, deadline_s: float) -> None:
        with self._sender_lock:
            self._refuse_when_closed()
            now_s = self._clock.now_s()
            effects = self._sender.on_open(ticket, deadline_s, now_s)
            peer = Peer(ticket.kv_endpoint, ticket.decode_node)
            self._metrics.on_open(ticket.lease_token, peer, now_s)
            self._effects.extend(effects)
        self._transport.wake()

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        num_blocks = self._pool.shape[2]
        if not all(0 <= block < num_blocks for block in source_blocks):
            raise ValueError(f"source blocks {source_blocks}: the pool has {num_blocks}")
        with self._sender_lock:
            effects = self._sender.on_push(lease_token, layer, ordinals, source_blocks)
            self._effects.extend(effects)
        self._transport.wake()

    def commit(self, lease_token: int, commit: Commit) -> None:
        with self._sender_lock:
            effects = self._sender.on_commit(lease_token, commit)
            self._metrics.on_commit(lease_token, self._clock.now_s())
            self._effects.extend(effects)
        self._transport.wake()

    def abort(self, lease_token: int) -> None:
        with self._sender_lock:
            self._effects.extend(self._sender.on_abort(lease_token))
        self._transport.wake()

    def close(self) -> None:
        self._is_closing = True
        self._transport.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- besides the contract --------------------------------------------------------------------

    def statistics(self) -> ConnectorStatistics:
        """A snapshot, for metrics and tests."""
        with self._sender_lock:
            num_transfers = self._sender.num_transfers
        with self._receiver_lock:
            num_landings = self._receiver.num_landings
            num_sessions = self._receiver.num_sessions
            num_quarantined = self._receiver.num_quarantined_blocks
        return ConnectorStatistics(
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            transfers_open=num_transfers,
            landings_open=num_landings,
            sessions_open=num_sessions,
            blocks_quarantined=num_quarantined,
            lanes={
                peer.incarnation.node_id: lane.name for peer, lane in self._lane_to.copy().items()
            },
            frames_dropped={reason.value: count for reason, count in self._dropped.items()},
            checksum_failures=self._checksum_failures,
            measured=self._metrics.view(),
        )

    @property
    def last_committed(self) -> TransferTiming | None:
        """The transfer that was committed last, as this sender saw it."""
        return self._metrics.last_committed

    def _refuse_when_closed(self) -> None:
        if self._is_closing or self._is_closed:
            raise ValueError("the KV connector is closed")

    # -- the connector's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._perform_all()
                self._transport.wait(self._timeout_s())
                self._take_arrivals()
                self._take_written()
                self._tick()
        except Exception:
            logger.exception("the KV connector's thread met a bug; everything open fails")
        finally:
            self._finish()

    def _finish(self) -> None:
        """Emit what is owed and let go of the network."""
        with self._sender_lock, self._receiver_lock:
            self._is_closed = True
            self._effects.extend(self._sender.on_close(self._clock.now_s()))
        try:
            self._perform_all()
            self._take_written()
            for lane in self._lanes.values():
                lane.close()
            with self._receiver_lock:
                self._effects.extend(self._receiver.on_close())
            self._perform_all()
        finally:
            self._transport.close()

    def _timeout_s(self) -> float:
        now_s = self._clock.now_s()
        with self._sender_lock:
            sender_at_s = self._sender.next_deadline_s()
        with self._receiver_lock:
            receiver_at_s = self._receiver.next_deadline_s()
        deadlines = [at_s for at_s in (sender_at_s, receiver_at_s) if at_s is not None]
        return min(max(0.0, min(deadlines, default=now_s + MAX_WAIT_S) - now_s), MAX_WAIT_S)

    def _take_arrivals(self) -> None:
        for _ in range(MAX_ARRIVALS_PER_TURN):
            arrival = self._transport.receive_nowait()
            if arrival is None:
                break
            self._on_arrival(arrival)
            self._perform_all()

    def _take_written(self) -> None:
        """Headers whose bytes are where they belong leave; a lane that failed is told."""
        for lane in self._one_sided.values():
            for ready in lane.take_ready():
                if isinstance(ready, Broken):
                    self._metrics.on_fallback(lane.name, "write_failed")
                    self._lose_link(ready.peer)
                else:
                    self._send(ready.peer, ready.parts)

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_quiet())
            self._effects.extend(self._receiver.on_tick(now_s))
        with self._sender_lock:
            self._effects.extend(self._sender.on_tick(now_s))

    def _on_arrival(self, arrival: Arrival) -> None:
        now_s = self._clock.now_s()
        match arrival:
            case LinkLost(peer):
                with self._sender_lock:
                    self._effects.extend(self._sender.on_link_lost(peer, now_s))
            case FromPeer(peer, parts):
                self._on_answer(peer, parts, now_s)
            case FromSession(session, parts):
                self._on_message(session, parts, now_s)
            case _:
                assert_never(arrival)

    def _on_answer(self, peer: Peer, parts: Parts, now_s: float) -> None:
        try:
            frame = _decode(parts)
        except PeerProtocolError as error:
            with self._sender_lock:
                self._effects.extend(self._sender.on_peer_failed(peer, error, now_s))
            return
        if isinstance(frame, frames.Ack):
            self._metrics.on_acknowledged(peer, frame.consumed, now_s)
        with self._sender_lock:
            self._effects.extend(self._sender.on_frame(peer, frame, now_s))

    def _on_message(self, session: bytes, parts: Parts, now_s: float) -> None:
        sizes = [part.nbytes for part in parts[1:]]
        with self._receiver_lock:
            try:
                effects = self._receiver.on_frame(session, _decode(parts), sizes, now_s)
            except PeerProtocolError as error:
                effects = self._receiver.on_malformed(session, error)
        for effect in effects:
            if isinstance(effect, Write):
                num_bytes = 2 * len(effect.target_blocks) * self._layout.piece_bytes
                self._bytes_received += num_bytes
                token = effect.data.lease_token
                self._metrics.on_piece(token, effect.lane, num_bytes, now_s)
                self._write(effect, parts[1:])
            else:
                self._effects.append(effect)

    def _write(self, write: Write, parts: Parts) -> None:
        """Bring the pieces into the pool, verified; the landing is looked at again to copy."""
        pulling = self._pulling.get(write.lane)
        if pulling is not None:
            self._pull(pulling, write)
            return
        source = parts if write.lane in INLINE_LANES else None
        sums = self._checked(write, self._sums(write, source))
        if sums is not None and (source is None or self._copy(write, source)):
            self._on_written(write, sums)

    def _sums(self, write: Write, source: Parts | None) -> pieces.Sums:
        """Of `source` or else of the pool. Without the lock: nothing here takes longer."""
        data = write.data
        if write.verify == "off":
            return pieces.NO_SUMS
        if source is None:
            return pieces.pool_sums(self._pool, data.layer, write.target_blocks, data.ordinals)
        return pieces.payload_sums(data, source, self._layout.piece_bytes)

    def _checked(self, write: Write, sums: pieces.Sums) -> list[int] | None:
        """What of `sums` goes into the commit's digest; None: the bytes are corrupt."""
        if write.verify == "off":
            return []
        if write.verify == "commit":
            return pieces.block_sums(sums)
        problem = pieces.find_corruption(write.data, sums)
        if problem is None:
            return []
        self._checksum_failures += 1
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_corrupt(write, problem))
        return None

    def _copy(self, write: Write, source: Parts) -> bool:
        """Whether the landing was still open, so that the pieces were copied."""
        with self._receiver_lock:
            if not self._receiver.may_write(write):
                return False
            pieces.write(self._pool, write.data, write.target_blocks, source)
            return True

    def _pull(self, lane: PullingLane, write: Write) -> None:
        with self._receiver_lock:
            if not self._receiver.may_write(write):
                return
            try:
                copied = lane.pull(write, self._pool)
            except PeerProtocolError as error:
                self._effects.extend(self._receiver.on_malformed(write.session, error))
                return
        sums = self._checked(write, copied)
        if sums is not None:
            self._on_written(write, sums)

    def _on_written(self, write: Write, sums: Sequence[int]) -> None:
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_written(write, sums))

    # -- effects ---------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        while self._effects:
            self._perform(self._effects.popleft())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Connect(peer):
                self._connect(peer)
            case Disconnect(peer):
                self._disconnect(peer)
            case SayHello(peer):
                self._say_hello(peer)
            case TakeLane(peer, lane, lane_reply):
                self._take_lane(peer, lane, lane_reply)
            case SendToPeer(peer, frame, is_behind_writes):
                self._send_in_order(peer, [memoryview(frames.encode(frame))], is_behind_writes)
            case SendChunk():
                self._send_chunk(effect)
            case Reply(session, frame):
                self._transport.reply(session, [memoryview(frames.encode(frame))])
            case OpenLane(session, offers):
                self._open_lane(session, offers)
            case CloseLane(session, lane):
                self._lanes[lane].drop(session)
            case Fence(lane, slabs):
                self._fence(lane, slabs)
            case Emit(event):
                self._emit(event)
            case Dropped(reason, detail):
                self._count_dropped(reason, detail)
            case Write():
                raise AssertionError("a write is done where its payload is")
            case _:
                assert_never(effect)

    def _connect(self, peer: Peer) -> None:
        self._metrics.on_connect(peer)
        try:
            self._transport.connect(peer)
        except HandoffFailed as error:
            with self._sender_lock:
                now_s = self._clock.now_s()
                self._effects.extend(self._sender.on_peer_failed(peer, error, now_s))

    def _disconnect(self, peer: Peer) -> None:
        lane = self._lane_to.pop(peer, None)
        if lane is not None:
            lane.forget(peer)
        self._metrics.on_disconnect(peer)
        self._transport.disconnect(peer)

    def _say_hello(self, peer: Peer) -> None:
        offers = {
            name: offer
            for name, lane in self._lanes.items()
            if (offer := lane.offer(peer)) is not None
        }
        with self._sender_lock:
            hello = self._sender.hello(peer, offers, self._verify)
        self._send(peer, [memoryview(frames.encode(hello))])

    def _take_lane(self, peer: Peer, name: str, reply: bytes) -> None:
        lane = self._lanes[name]
        try:
            lane.accept(peer, reply)
        except PeerProtocolError as protocol_error:
            with self._sender_lock:
                now_s = self._clock.now_s()
                self._effects.extend(self._sender.on_peer_failed(peer, protocol_error, now_s))
        except HandoffFailed as error:
            logger.warning("lane %s to %s cannot be used: %s", name, peer, error)
            self._metrics.on_fallback(name, "unusable")
            self._lose_link(peer)
        else:
            self._lane_to[peer] = lane
            self._metrics.on_lane(peer, name)
            if name not in self._one_sided:
                for faster in self._one_sided:
                    self._metrics.on_fallback(faster, "not_agreed")

    def _open_lane(self, session: bytes, offers: Mapping[str, bytes]) -> None:
        chosen, reply = "", b""
        for name in LANES_BY_SPEED:
            lane = self._lanes.get(name)
            answer = lane.open(session, offers[name]) if lane and name in offers else None
            if answer is not None:
                chosen, reply = name, answer
                break
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_lane(session, chosen, reply, offers))

    def _fence(self, name: str, slabs: Sequence[int]) -> None:
        self._one_sided[name].fence(slabs)
        with self._receiver_lock:
            self._effects.extend(self._receiver.on_fenced(name, slabs))

    def _send_chunk(self, effect: SendChunk) -> None:
        lane = self._lane_to.get(effect.peer)
        if lane is None:
            return  # The link broke in this turn: the chunk leaves again on the next one.
        chunk = effect.chunk
        sums: pieces.Sums = ((), ())
        if effect.verify != "off":
            sums = pieces.pool_sums(self._pool, chunk.layer, chunk.source_blocks, chunk.ordinals)
        if effect.verify == "commit":
            with self._sender_lock:
                self._sender.on_summed(effect.lease_token, chunk, pieces.block_sums(sums))
            sums = ((), ())
        payload = lane.payload(chunk)
        header = frames.Data(
            seq=effect.seq,
            lease_token=effect.lease_token,
            generation=effect.generation,
            layer=chunk.layer,
            ordinals=chunk.ordinals,
            runs=payload.runs,
            source_blocks=payload.source_blocks,
            key_sums=sums[0],
            value_sums=sums[1],
        )
        num_bytes = 2 * len(chunk.ordinals) * self._layout.piece_bytes
        self._bytes_sent += num_bytes
        now_s = self._clock.now_s()
        self._metrics.on_chunk(effect.lease_token, effect.peer, lane.name, num_bytes, now_s)
        one_sided = self._one_sided.get(lane.name)
        if one_sided is not None:
            one_sided.write(effect.peer, chunk, effect.target_blocks)
        parts = [memoryview(frames.encode(header)), *payload.parts]
        self._send_in_order(effect.peer, parts, is_behind_writes=True)

    def _send_in_order(self, peer: Peer, parts: Parts, is_behind_writes: bool) -> None:
        """Send, on a one-sided lane perhaps when what was written before is done."""
        lane = self._lane_to.get(peer)
        one_sided = self._one_sided.get(lane.name) if lane else None
        if is_behind_writes and one_sided is not None:
            one_sided.send_after(peer, parts)
        else:
            self._send(peer, parts)

    def _send(self, peer: Peer, parts: Parts) -> None:
        if not self._transport.send(peer, parts):
            self._lose_link(peer)

    def _lose_link(self, peer: Peer) -> None:
        """Nothing may follow on a connection that lost a frame, or on a lane that failed."""
        self._disconnect(peer)
        with self._sender_lock:
            self._effects.extend(self._sender.on_link_lost(peer, self._clock.now_s()))

    def _emit(self, event: KVEvent) -> None:
        match event:
            case TransferEnded(token, error):
                self._metrics.on_ended(token, error is None, self._clock.now_s())
            case Landed(token):
                self._metrics.on_landed(token, self._clock.now_s())
            case LandingFailed(token) | Released(token):
                self._metrics.on_landing_over(token)
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event raised for %r", event)

    def _count_dropped(self, reason: DropReason, detail: str) -> None:
        """A flood of bad frames costs one line per reason and interval."""
        self._dropped[reason] += 1
        now_s = self._clock.now_s()
        last_s = self._logged_at_s.get(reason)
        if reason in (DropReason.DUPLICATE, DropReason.LATE):
            return
        if last_s is None or now_s >= last_s + LOG_INTERVAL_S:
            self._logged_at_s[reason] = now_s
            logger.warning("%d dropped as %s: %.300s", self._dropped[reason], reason.value, detail)


def _decode(parts: Parts) -> frames.Frame:
    if not parts:
        raise PeerProtocolError("an empty message")
    return frames.decode(parts[0])
