"""A sender that sends what a test asks for, on the connection that the kind of connector uses."""

from __future__ import annotations

import contextlib
import queue
from typing import Any

import numpy as np
import zmq

from common.ids import Incarnation
from kv_transfer.contract import Ticket
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import PULLING_LANES
from kv_transfer.transport import FromPeer, Parts
from kv_transfer.wire import frames
from tests.support.kv.kinds import LoopbackKind
from tests.support.kv.kv_cluster import LAYOUT, WAIT_S, Cluster, Node
from tests.support.kv.loopback_connector import LoopbackTransport

ROGUE = Incarnation("rogue", 1)


class RawSender:
    """Greets `decode` as `ROGUE`, verifying blocks, with a pool of its own to send from."""

    def __init__(self, cluster: Cluster, decode: Node) -> None:
        self.pool: Bytes = cluster.kind.pool(LAYOUT, 4)
        self.pool[:] = np.random.default_rng(99).integers(0, 256, self.pool.shape, np.uint8)
        self.lane = cluster.lane
        self._kind = cluster.kind
        self._seq = 0
        is_loopback = isinstance(cluster.kind, LoopbackKind)
        self._line = _Loopback(cluster, decode) if is_loopback else _Dealer(decode)
        offers = {self.lane: cluster.kind.offer(self.pool, LAYOUT)}
        self.send(frames.Hello(ROGUE, decode.incarnation, LAYOUT, offers, "block"))
        welcome = self.answer()
        assert isinstance(welcome, frames.Welcome)
        assert welcome.lane == self.lane

    def send(self, frame: frames.Frame, *payload: memoryview) -> None:
        self._line.send([memoryview(frames.encode(frame)), *payload])

    def answer(self) -> frames.Frame:
        """Return the next answer that is not only credit."""
        while isinstance(frame := frames.decode(self._line.receive()), frames.Ack):
            pass
        return frame

    def settle(self) -> list[frames.Frame]:
        """Return the frames before the answer to a PING: all frames sent so far were handled."""
        self.send(frames.Ping(()))
        answers: list[frames.Frame] = []
        while not isinstance(answer := self.answer(), frames.Pong):
            answers.append(answer)
        return answers

    def data(self, ticket: Ticket, *, generation: int, layer: int, ordinal: int) -> None:
        """Return one whole, well-formed piece of block 0 of the pool."""
        keys, values = (self.pool[layer, kind, 0].data for kind in (0, 1))
        is_inline = self.lane not in PULLING_LANES
        frame = frames.Data(
            seq=self._seq,
            lease_token=ticket.lease_token,
            generation=generation,
            layer=layer,
            ordinals=(ordinal,),
            runs=(1,) if is_inline else (),
            source_blocks=() if is_inline else (self._kind.source_block(layer),),
            sums=self._kind.sums((keys, values), layer, ordinal),
        )
        self._seq += 1
        self.send(frame, *((keys, values) if is_inline else ()))

    def close(self) -> None:
        self._line.close()


def assert_unknown_block_is_refused(cluster: Cluster, decode: Node, block: int) -> None:
    """Name a source block that a sender's pool lacks: the connection ends, and no byte is written.

    `decode` refuses it before memory is touched.
    """
    ticket = cluster.ticket(decode, [1, 2])
    with contextlib.closing(RawSender(cluster, decode)) as rogue:
        decode.connector.expect(ticket, sender_deadline_s=30)
        rogue.send(frames.Begin(ticket.lease_token, ticket.generation))
        rogue.settle()
        untouched = decode.pool.copy()
        rogue.send(
            frames.Data(
                seq=0,
                lease_token=ticket.lease_token,
                generation=ticket.generation,
                layer=0,
                ordinals=(0, 1),
                runs=(),
                source_blocks=(0, block),
                sums=bytes(2 * 2 * frames.SUM_BYTES),
            )
        )
        assert f"source block {block}: the sender's pool has 4" in str(decode.wait_failed())
        assert any(isinstance(rogue.answer(), frames.Rejected) for _ in range(2))
        assert np.array_equal(decode.pool, untouched)


class _Dealer:
    def __init__(self, decode: Node) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self._socket.connect(decode.connector.endpoint)

    def send(self, parts: Parts) -> None:
        self._socket.send_multipart(parts)

    def receive(self) -> bytes:
        header: bytes = self._socket.recv()
        return header

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Loopback(LoopbackTransport):
    def __init__(self, cluster: Cluster, decode: Node) -> None:
        assert isinstance(cluster.kind, LoopbackKind)
        super().__init__(cluster.kind.network)
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._peer = Peer(decode.connector.endpoint, decode.incarnation)
        self.connect(self._peer)

    def arrive(self, connection: bytes, arrival: object) -> None:
        if isinstance(arrival, FromPeer):
            self._answers.put(bytes(arrival.parts[0]))

    def send(self, parts: Parts) -> None:  # type: ignore[override]
        super().send(self._peer, parts)

    def receive(self) -> bytes:
        return self._answers.get(timeout=WAIT_S)
