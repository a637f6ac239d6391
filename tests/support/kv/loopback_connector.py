"""The reference connector: nodes of one process, joined by a network that loses nothing by itself.

Messages are passed as views of the sender's pool, as late as a zero-copy network might read them.
For tests, the network can hold messages back and cut connections.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock, MonotonicClock
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import OnEvent
from kv_transfer.lanes.inline_lane import InlineLane
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Bytes, Pool, as_pool
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import VERIFY_AUTO
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S, DEFAULT_WINDOW_BYTES, Limits
from kv_transfer.transport import Arrival, FromPeer, FromSession, LinkLost, Parts


class LoopbackNetwork:
    """A network: connectors made with the same one can reach each other by endpoint."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self.nodes: dict[str, LoopbackTransport] = {}
        self._connections: dict[bytes, tuple[LoopbackTransport, Peer]] = {}
        self._held: deque[Callable[[], None]] | None = None

    def hold(self) -> None:
        """Keep every message back from now on."""
        with self._lock:
            self._held = deque() if self._held is None else self._held

    def release(self) -> None:
        """Deliver held messages in order, and hold nothing more."""
        with self._lock:
            held, self._held = self._held or deque(), None
            for deliver in held:
                deliver()

    def wait_held(self, count: int, timeout_s: float) -> bool:
        """Wait for `count` held messages; return whether they came within `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: len(self._held or ()) >= count, timeout_s)

    def cut(self, endpoint: str) -> None:
        """Break every connection to `endpoint`; messages in flight on them are lost."""
        with self._lock:
            for connection, (origin, peer) in list(self._connections.items()):
                if peer.endpoint == endpoint:
                    del self._connections[connection]
                    origin.arrive(connection, LinkLost(peer))

    def join(self, node: LoopbackTransport) -> str:
        with self._lock:
            endpoint = f"loopback://{next(self._numbers)}"
            self.nodes[endpoint] = node
            return endpoint

    def leave(self, endpoint: str) -> None:
        with self._lock:
            del self.nodes[endpoint]
            self.cut(endpoint)

    def connect(self, origin: LoopbackTransport, peer: Peer) -> bytes:
        """Return a new connection; `HandoffFailed` when no node has this endpoint."""
        with self._lock:
            if peer.endpoint not in self.nodes:
                raise HandoffFailed(f"no node listens at {peer.endpoint}")
            connection = b"loopback-%d" % next(self._numbers)
            self._connections[connection] = (origin, peer)
            return connection

    def disconnect(self, connection: bytes) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def send(self, connection: bytes, parts: Parts) -> bool:
        """Send from the end that connected; return False when the connection is gone."""
        with self._lock:
            if connection not in self._connections:
                return False
            self._deliver(lambda: self._to_receiver(connection, parts))
            return True

    def reply(self, connection: bytes, parts: Parts) -> None:
        """Send from the end that was connected to."""
        with self._lock:
            self._deliver(lambda: self._to_origin(connection, parts))

    def _deliver(self, deliver: Callable[[], None]) -> None:
        if self._held is None:
            deliver()
        else:
            self._held.append(deliver)
            self._lock.notify_all()

    def _to_receiver(self, connection: bytes, parts: Parts) -> None:
        if connection in self._connections:
            node = self.nodes[self._connections[connection][1].endpoint]
            node.arrive(connection, FromSession(connection, parts))

    def _to_origin(self, connection: bytes, parts: Parts) -> None:
        if connection in self._connections:
            origin, peer = self._connections[connection]
            origin.arrive(connection, FromPeer(peer, parts))


class LoopbackTransport:
    """One node's end of a `LoopbackNetwork`."""

    is_short_of_files = False

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network
        self._opened: dict[Peer, bytes] = {}
        self._inbox: deque[tuple[bytes, Arrival]] = deque()
        self._is_awake = False
        self._changed = threading.Condition()
        self.endpoint = network.join(self)

    def connect(self, peer: Peer) -> None:
        self.disconnect(peer)
        self._opened[peer] = self._network.connect(self, peer)

    def disconnect(self, peer: Peer) -> None:
        connection = self._opened.pop(peer, None)
        if connection is not None:
            self._network.disconnect(connection)

    def send(self, peer: Peer, parts: Parts) -> bool:
        connection = self._opened.get(peer)
        return connection is not None and self._network.send(connection, parts)

    def reply(self, session: bytes, parts: Parts) -> None:
        self._network.reply(session, parts)

    def arrive(self, connection: bytes, arrival: Arrival) -> None:
        """Queue an arrival; called by the network, on any thread."""
        with self._changed:
            self._inbox.append((connection, arrival))
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_awake, timeout_s)
            self._is_awake = False

    def receive_nowait(self) -> Arrival | None:
        with self._changed:
            while self._inbox:
                connection, arrival = self._inbox.popleft()
                # Arrivals of an earlier connection do not belong to the new one.
                if isinstance(arrival, FromSession) or (
                    self._opened.get(arrival.peer) == connection
                ):
                    return arrival
        return None

    def wake(self) -> None:
        with self._changed:
            self._is_awake = True
            self._changed.notify()

    def close(self) -> None:
        for peer in list(self._opened):
            self.disconnect(peer)
        self._network.leave(self.endpoint)


class LoopbackConnector(TransportConnector):
    """A `KVConnector` for nodes that live in one process.

    `lanes` are further lanes, used where a pair supports them; `verify` is a mode of
    `shared.lanes`. Raises `ConfigError` when the window is too small for one block.
    """

    def __init__(
        self,
        pool: Pool | Bytes,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        network: LoopbackNetwork,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S,
        kv_lanes: int = 1,
        lanes: Sequence[Lane] = (),
        beside: Pool | Bytes | None = None,
        verify: str = VERIFY_AUTO,
        clock: Clock | None = None,
    ) -> None:
        pool = as_pool(pool, layout)
        limits = Limits(
            window_bytes=window_bytes, peer_timeout_s=peer_timeout_s, max_channels=kv_lanes
        )
        super().__init__(
            pool,
            layout,
            incarnation,
            on_event,
            transport=LoopbackTransport(network),
            lanes=[*lanes, InlineLane("loopback", pool, limits)],
            beside=beside,
            verify=verify,
            limits=limits,
            clock=clock or MonotonicClock(),
        )
