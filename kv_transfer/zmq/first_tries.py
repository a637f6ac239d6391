"""How the first try to connect to a peer ends, which ZMQ says to monitors alone.

ZMQ tries for ever, so that a port which refuses connections looks like one that is silent. A
monitor tells after a moment. It is taken off as soon as the first try has ended, well or not.

ZMQ's thread waits, for ever, when nobody reads what it tells a monitor. So a monitor is ended
before the socket that reads it is closed; pyzmq's `disable_monitor` does it the other way around.
"""

from __future__ import annotations

import contextlib
import struct
from itertools import count

import zmq

from kv_transfer.shared.effects import Peer
from kv_transfer.zmq.readiness import Readiness, Socket

_EVENTS = int(zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED)
_EVENT = struct.Struct("=H")


class FirstTries:
    """The connections whose first try has not ended. Belongs to the thread of the sockets."""

    def __init__(self, context: zmq.Context[Socket], readiness: Readiness) -> None:
        self._context = context
        self._readiness = readiness
        self._numbers = count()
        self._watched: dict[Peer, tuple[Socket, Socket]] = {}
        """The DEALER of each peer, and what reads its monitor."""
        self._peers: dict[Socket, Peer] = {}

    def __contains__(self, source: Socket) -> bool:
        return source in self._peers

    def watch(self, peer: Peer, dealer: Socket) -> None:
        """Watch a DEALER that connects next; without room for more sockets it is not watched."""
        address = f"inproc://first-try-{next(self._numbers)}"
        with contextlib.suppress(zmq.ZMQError, OSError):
            reader = self._context.socket(zmq.PAIR)
            self._watched[peer], self._peers[reader] = (dealer, reader), peer
            try:
                dealer.monitor(address, _EVENTS)
                reader.connect(address)
                self._readiness.watch(reader)
            except BaseException:
                self.forget(peer)
                raise

    def end(self, source: Socket) -> Peer | None:
        """Read the end of a try from one of these sockets; return its peer if it failed."""
        peer = self._peers[source]
        try:
            told, _ = source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        (event,) = _EVENT.unpack_from(told)
        self.forget(peer)
        return peer if event == zmq.EVENT_CONNECT_RETRIED else None

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer, if it is watched; its DEALER is not closed yet."""
        watched = self._watched.pop(peer, None)
        if watched is None:
            return
        dealer, reader = watched
        del self._peers[reader]
        dealer.monitor(None, 0)
        self._readiness.forget(reader)
        reader.close(0)
