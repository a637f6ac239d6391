"""ZMQ sockets of one connector: a ROUTER that senders connect to, a DEALER per decode node.

All sockets belong to the connector's thread; other threads only write a byte to the wake-up pair.
A DEALER lives as long as one TCP connection is meant to: when its monitor reports the end, the
machine above closes it and opens another, so that nothing queued for an earlier connection is ever
sent on a later one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import ConfigError, HandoffFailed
from common.kv_layout import KVLayout
from kv_transfer.core.effects import Peer
from kv_transfer.core.limits import MAX_HEADER_BYTES, Limits
from kv_transfer.transport import Arrival, FromPeer, FromSession, LinkLost, Parts

# Messages, not bytes: bytes are bounded by the windows. A sender's queue holds its frames in flight
# and a few control frames for each of its transfers.
SENDER_HIGH_WATER_MARK = 4096
RECEIVER_HIGH_WATER_MARK = 64
LINGER_MS = 200


@dataclass(frozen=True, slots=True)
class _Connection:
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class ZmqTransport:
    """Binds `tcp://host:port` (port 0: any free one). Raises `ConfigError` when it cannot."""

    def __init__(self, host: str, port: int, layout: KVLayout, limits: Limits) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, limits.max_part_bytes(layout))
        self._router.setsockopt(zmq.RCVHWM, RECEIVER_HIGH_WATER_MARK)
        self._router.setsockopt(zmq.SNDHWM, SENDER_HIGH_WATER_MARK)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, _ms(limits.peer_timeout_s))
        self._router.setsockopt(zmq.HEARTBEAT_IVL, _ms(limits.ping_interval_s))
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(limits.peer_timeout_s))
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV endpoint tcp://{host}:{port} cannot be bound: {error}") from None
        self._endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._monitor_numbers = itertools.count()
        self._connections: dict[Peer, _Connection] = {}
        self._readers: dict[zmq.Socket[bytes], Callable[[], Arrival | None]] = {}
        self._ready: deque[zmq.Socket[bytes]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._watch(self._router, self._read_router)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def connect(self, peer: Peer) -> None:
        self.disconnect(peer)
        if not peer.endpoint.startswith("tcp://"):
            raise HandoffFailed(f"{peer}: wanted an endpoint tcp://host:port")
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        dealer.setsockopt(zmq.RCVHWM, SENDER_HIGH_WATER_MARK)
        dealer.setsockopt(zmq.SNDHWM, SENDER_HIGH_WATER_MARK)
        dealer.setsockopt(zmq.LINGER, 0)
        name = f"inproc://pdserve-kv-monitor-{next(self._monitor_numbers)}"
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED, name)
        self._connections[peer] = _Connection(dealer, monitor)
        self._watch(dealer, lambda: self._read_dealer(peer, dealer))
        self._watch(monitor, lambda: self._read_monitor(peer, monitor))
        try:
            dealer.connect(peer.endpoint)
        except zmq.ZMQError as error:
            self.disconnect(peer)
            raise HandoffFailed(f"cannot connect to {peer}: {error}") from None

    def disconnect(self, peer: Peer) -> None:
        self._close_connection(peer, linger_ms=0)

    def send(self, peer: Peer, parts: Parts) -> bool:
        connection = self._connections.get(peer)
        if connection is None:
            return False
        try:
            connection.dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def reply(self, session: bytes, parts: Parts) -> None:
        try:
            self._router.send_multipart([session, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def wait(self, timeout_s: float) -> None:
        for source, _ in self._poller.poll(_ms(timeout_s)):
            if source == self._wake_read.fileno():
                self._wake_read.recv(4096)
            elif source not in self._ready:
                self._ready.append(source)

    def receive_nowait(self) -> Arrival | None:
        while self._ready:
            try:
                arrival = self._readers[self._ready[0]]()
            except zmq.Again:
                self._ready.popleft()
                continue
            if self._ready:
                self._ready.rotate(-1)
            if arrival is not None:
                return arrival
        return None

    def wake(self) -> None:
        # Full: enough bytes wait there already. Closed: nobody waits.
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def close(self) -> None:
        for peer in list(self._connections):
            self._close_connection(peer, linger_ms=LINGER_MS)
        self._router.close(LINGER_MS)
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()

    def _read_router(self) -> Arrival | None:
        session, *parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        return FromSession(session.bytes, [part.buffer for part in parts])

    def _read_dealer(self, peer: Peer, dealer: zmq.Socket[bytes]) -> Arrival | None:
        parts = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
        return FromPeer(peer, [part.buffer for part in parts])

    def _read_monitor(self, peer: Peer, monitor: zmq.Socket[bytes]) -> Arrival | None:
        event = recv_monitor_message(monitor, zmq.NOBLOCK)
        return LinkLost(peer) if event["event"] == zmq.EVENT_DISCONNECTED else None

    def _close_connection(self, peer: Peer, *, linger_ms: int) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._unwatch(connection.dealer)
        self._unwatch(connection.monitor)
        connection.dealer.disable_monitor()
        connection.monitor.close(0)
        connection.dealer.close(linger_ms)

    def _watch(self, source: zmq.Socket[bytes], read: Callable[[], Arrival | None]) -> None:
        self._readers[source] = read
        self._poller.register(source, zmq.POLLIN)

    def _unwatch(self, source: zmq.Socket[bytes]) -> None:
        self._poller.unregister(source)
        del self._readers[source]
        if source in self._ready:
            self._ready.remove(source)


def _ms(span_s: float) -> int:
    return math.ceil(span_s * 1000)
