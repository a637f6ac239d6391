"""A KV connector over any transport: one thread, two machines, one pool.

The connector's thread owns the transport, reads the pool to send and is the only one to write it.
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
from dataclasses import dataclass
from typing import assert_never

from common.clock import Clock
from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from common.kv_layout import KVLayout
from kv_transfer import pieces
from kv_transfer.connector import Commit, KVEvent, OnEvent, Ticket
from kv_transfer.core import frames
from kv_transfer.core.effects import (
    Connect,
    Disconnect,
    Dropped,
    DropReason,
    Effect,
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
from kv_transfer.transport import Arrival, FromPeer, FromSession, LinkLost, Parts, Transport

logger = logging.getLogger("pdserve.kv_transfer")

MAX_WAIT_S = 1.0
MAX_ARRIVALS_PER_TURN = 256
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorStatistics:
    """Counted since the connector was made, except for what is open now."""

    bytes_sent: int
    bytes_received: int
    transfers_open: int
    landings_open: int
    sessions_open: int
    frames_dropped: Mapping[str, int]
    checksum_failures: int


class TransportConnector:
    """Implements `KVConnector`; the transports differ, this does not."""

    def __init__(
        self,
        pool: pieces.Pool,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        transport: Transport,
        clock: Clock,
        limits: Limits,
    ) -> None:
        pieces.check_pool(pool, layout)
        self._pool = pool
        self._layout = layout
        self._on_event = on_event
        self._transport = transport
        self._clock = clock
        self._sender = Sender(incarnation, layout, limits)
        self._receiver = Receiver(incarnation, layout, limits, num_blocks=pool.shape[2])
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
            self._effects.extend(self._sender.on_open(ticket, deadline_s, self._clock.now_s()))
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
            self._effects.extend(self._sender.on_commit(lease_token, commit))
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
        return ConnectorStatistics(
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            transfers_open=num_transfers,
            landings_open=num_landings,
            sessions_open=num_sessions,
            frames_dropped={reason.value: count for reason, count in self._dropped.items()},
            checksum_failures=self._checksum_failures,
        )

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
                self._tick()
        except Exception:
            logger.exception("the KV connector's thread met a bug; everything open fails")
        finally:
            self._finish()

    def _finish(self) -> None:
        """Emit what is owed and let go of the network."""
        with self._sender_lock, self._receiver_lock:
            self._is_closed = True
            self._effects.extend(self._receiver.on_close())
            self._effects.extend(self._sender.on_close(self._clock.now_s()))
        try:
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
        with self._sender_lock:
            self._effects.extend(self._sender.on_frame(peer, frame, now_s))

    def _on_message(self, session: bytes, parts: Parts, now_s: float) -> None:
        sizes = [part.nbytes for part in parts[1:]]
        self._bytes_received += sum(sizes)
        with self._receiver_lock:
            try:
                effects = self._receiver.on_frame(session, _decode(parts), sizes, now_s)
            except PeerProtocolError as error:
                effects = self._receiver.on_malformed(session, error)
        for effect in effects:
            if isinstance(effect, Write):
                self._write(effect, parts[1:])
            else:
                self._effects.append(effect)

    def _write(self, write: Write, payload: Parts) -> None:
        """Verify without the lock, then check the landing again and copy with it."""
        problem = pieces.find_corruption(write.data, payload, self._layout.piece_bytes)
        with self._receiver_lock:
            if problem is not None:
                self._checksum_failures += 1
                self._effects.extend(self._receiver.on_corrupt(write, problem))
            elif self._receiver.may_write(write):
                pieces.write(self._pool, write.data, write.target_blocks, payload)
                self._effects.extend(self._receiver.on_written(write))

    # -- effects ---------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        while self._effects:
            self._perform(self._effects.popleft())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Connect(peer):
                self._connect(peer)
            case Disconnect(peer):
                self._transport.disconnect(peer)
            case SendToPeer(peer, frame):
                self._send(peer, [memoryview(frames.encode(frame))])
            case SendChunk():
                self._send_chunk(effect)
            case Reply(session, frame):
                self._transport.reply(session, [memoryview(frames.encode(frame))])
            case Emit(event):
                self._emit(event)
            case Dropped(reason, detail):
                self._count_dropped(reason, detail)
            case Write():
                raise AssertionError("a write is done where its payload is")
            case _:
                assert_never(effect)

    def _connect(self, peer: Peer) -> None:
        try:
            self._transport.connect(peer)
        except HandoffFailed as error:
            with self._sender_lock:
                now_s = self._clock.now_s()
                self._effects.extend(self._sender.on_peer_failed(peer, error, now_s))

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk = effect.chunk
        key_sums, value_sums = pieces.checksums(self._pool, chunk)
        header = frames.Data(
            seq=effect.seq,
            lease_token=effect.lease_token,
            generation=effect.generation,
            layer=chunk.layer,
            ordinals=chunk.ordinals,
            runs=tuple(count for _, count in chunk.runs),
            key_sums=key_sums,
            value_sums=value_sums,
        )
        payload = pieces.views(self._pool, chunk)
        self._bytes_sent += sum(part.nbytes for part in payload)
        self._send(effect.peer, [memoryview(frames.encode(header)), *payload])

    def _send(self, peer: Peer, parts: Parts) -> None:
        if not self._transport.send(peer, parts):
            # Nothing may follow on a connection that lost a frame.
            self._transport.disconnect(peer)
            with self._sender_lock:
                self._effects.extend(self._sender.on_link_lost(peer, self._clock.now_s()))

    def _emit(self, event: KVEvent) -> None:
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
