"""Connections between nodes, which break.

A connection is a socket of ZMQ to an address. It keeps its order, waits while its path is cut, and
waits for a process at its address. When it breaks, the socket connects again by itself: frames on
their way are lost, and later ones belong to a new session at the receiver. Neither end is told.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from common.ids import Incarnation
from kv_transfer.shared.effects import Peer
from kv_transfer.wire import frames
from simulator.faults.hosts import Paths
from simulator.faults.kv.flights import Flights
from simulator.faults.kv.moving import MovingEnd, Parcel
from simulator.timeline import Timeline

INLINE_LANE = "zmq"
_LATENCIES = (1.0, 0.4, 2.5)
"""How much longer than the first one each connection of two nodes takes: what passes the other."""
BROKEN = 0.6
"""The share of several connections of two nodes that break at once."""


class ConnectedEnd(MovingEnd, Protocol):
    """A connector that listens at an address, and connects to others."""

    def on_parcel(self, session: bytes, parcel: Parcel, source: MovingEnd) -> None:
        """Take a frame of another node."""

    def on_answer(self, connection: KVSocket, session: bytes, frame: frames.Frame) -> None:
        """Take a frame back; one of a connection that was closed is dropped."""


@dataclass(slots=True, eq=False)
class KVSocket:
    """One socket of a sender. `session` is another one after each break."""

    peer: Peer
    source: ConnectedEnd
    session: bytes
    there: deque[tuple[bytes, Parcel]] = field(default_factory=deque)
    back: deque[tuple[bytes, frames.Frame]] = field(default_factory=deque)
    lane: str = ""


class KVWires:
    """All connections between nodes; `ends` are the living nodes by address.

    Nodes offer `lane`, and where it fails `INLINE_LANE`. Times of flights are drawn from `seed`.
    """

    def __init__(
        self,
        timeline: Timeline,
        paths: Paths,
        latency_s: float,
        *,
        lane: str = INLINE_LANE,
        seed: int = 0,
    ) -> None:
        self.lane = lane
        self.flights = Flights(timeline, paths, latency_s, seed)
        self._timeline = timeline
        self._paths = paths
        self._latency_s = latency_s
        self._rng = random.Random(f"wires of {seed}")
        self._sessions = count(1)
        self.ends: dict[str, ConnectedEnd] = {}
        self._end_of: dict[Incarnation, ConnectedEnd] = {}
        self._connections: list[KVSocket] = []

    def join(self, end: ConnectedEnd) -> None:
        """Add a node, which listens at its address."""
        self.ends[end.me.node_id] = self._end_of[end.me] = end
        self.flush()

    def end_of(self, me: Incarnation) -> ConnectedEnd:
        """Return the connector of a process, which may be dead."""
        return self._end_of[me]

    def leave(self, end: ConnectedEnd, *, is_closed: bool = False) -> None:
        """Break all connections of a dead node; with `is_closed` its last frames are read first."""
        if self.ends.get(end.me.node_id) is end:
            del self.ends[end.me.node_id]
        self._connections = [one for one in self._connections if one.source is not end]
        for one in self._connections:
            if one.peer.endpoint == end.me.node_id and is_closed:
                self._timeline.after(self._latency_s, partial(self._break, one))
            elif one.peer.endpoint == end.me.node_id:
                self._break(one)

    def break_between(self, first: str, second: str, *, arrives: bool) -> None:
        """Break connections between two nodes; with `arrives` frames sent are read first."""
        for one in self._that_break(first, second):
            if arrives:
                while one.there and self._arrive(one):
                    pass
            self._break(one)
        self.flights.break_between(first, second)

    def _that_break(self, first: str, second: str) -> list[KVSocket]:
        """Return the connections between two nodes that break at once: of several some."""
        between = [
            one
            for one in self._connections
            if {one.source.me.node_id, one.peer.endpoint} == {first, second}
        ]
        has_further = any(one.peer.channel for one in between)
        return [one for one in between if not has_further or self._rng.random() < BROKEN]

    def flush(self) -> None:
        """Deliver the frames that waited for an open path, or for a process at their address."""
        for one in self._connections:
            for _ in one.there:
                self._timeline.after(self._latency_of(one), partial(self._arrive, one))
            for _ in one.back:
                self._timeline.after(self._latency_of(one), partial(self._arrive_back, one))
        self.flights.flush()

    def connect(self, source: ConnectedEnd, peer: Peer) -> KVSocket:
        """Return a new connection."""
        connection = KVSocket(peer, source, self._new_session())
        self._connections.append(connection)
        return connection

    def close(self, connection: KVSocket) -> None:
        """Close a connection; frames that were not read are lost."""
        connection.there.clear()
        self._connections.remove(connection)

    def send(self, connection: KVSocket, parcel: Parcel) -> None:
        """Send a frame to the address of the connection's peer."""
        connection.there.append((connection.session, parcel))
        self._timeline.after(self._latency_of(connection), partial(self._arrive, connection))

    def send_back(self, session: bytes, frame: frames.Frame) -> None:
        """Send a frame back on a session; it is lost if that is over."""
        for one in self._connections:
            if one.session == session:
                one.back.append((session, frame))
                self._timeline.after(self._latency_of(one), partial(self._arrive_back, one))

    def _latency_of(self, connection: KVSocket) -> float:
        return self._latency_s * _LATENCIES[connection.peer.channel % len(_LATENCIES)]

    def _new_session(self) -> bytes:
        return b"%d" % next(self._sessions)

    def _break(self, connection: KVSocket) -> None:
        connection.there.clear()
        connection.back.clear()
        connection.session = self._new_session()

    def _arrive(self, connection: KVSocket) -> bool:
        target = self.ends.get(connection.peer.endpoint)
        source = connection.source
        if target is None or not connection.there:
            return False
        if not self._paths.is_open(source.me.node_id, target.me.node_id):
            return False
        session, parcel = connection.there.popleft()
        target.clock.run(partial(target.on_parcel, session, parcel, source))
        return True

    def _arrive_back(self, connection: KVSocket) -> None:
        names = connection.peer.endpoint, connection.source.me.node_id
        if connection.back and self._paths.is_open(*names):
            session, frame = connection.back.popleft()
            source = connection.source
            source.clock.run(partial(source.on_answer, connection, session, frame))
