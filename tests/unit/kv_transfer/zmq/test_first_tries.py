"""How the first try to connect ends is told once, and nothing of a monitor is left."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from common.ids import Incarnation
from kv_transfer.shared.effects import Peer
from kv_transfer.zmq.first_tries import FirstTries
from kv_transfer.zmq.readiness import Readiness, Socket

WAIT_S = 20.0
PEERS = [Peer("tcp://there", Incarnation("d", epoch)) for epoch in range(40)]


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address at which nobody listens, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


class Tries:
    """Those of one context, which has no more sockets than `most`."""

    def __init__(self, most: int = 1000) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, most)
        self._readiness = Readiness()
        self.tries = FirstTries(self._context, self._readiness)
        self._dealers: dict[Peer, Socket] = {}
        self._ended: list[Socket] = []

    def connect(self, peer: Peer, address: str) -> None:
        dealer = self._dealers[peer] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 1)
        self.tries.watch(peer, dealer)
        dealer.connect(address)

    def ended(self) -> Socket:
        """Wait until a first try has ended, and return what tells how."""
        while not self._ended:
            self._ended += [one for one in self._readiness.wait(WAIT_S) if not isinstance(one, int)]
        return self._ended.pop()

    def disconnect(self, peer: Peer) -> None:
        self.tries.forget(peer)
        self._dealers.pop(peer).close(0)

    def close(self) -> None:
        """End everything; ZMQ waits here for sockets that were not closed, and for its thread."""
        for peer in list(self._dealers):
            self.disconnect(peer)
        self._readiness.close()
        thread = threading.Thread(target=self._context.term, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a socket was left, or ZMQ's thread waits"


@pytest.fixture
def made() -> Iterator[Tries]:
    made = Tries()
    yield made
    made.close()


def test_a_port_where_nobody_listens_is_told(made: Tries, refusing: str) -> None:
    made.connect(PEERS[0], refusing)
    source = made.ended()
    assert source in made.tries
    assert made.tries.end(source) == PEERS[0]
    assert source not in made.tries
    assert source.closed


def test_a_port_that_listens_is_not_told_and_not_watched(made: Tries, listening: str) -> None:
    made.connect(PEERS[0], listening)
    source = made.ended()
    assert made.tries.end(source) is None
    assert source not in made.tries
    assert source.closed


def test_each_try_is_told_for_its_peer(made: Tries, refusing: str, listening: str) -> None:
    for number, peer in enumerate(PEERS[:6]):
        made.connect(peer, refusing if number % 2 else listening)
    ended = [made.tries.end(made.ended()) for _ in range(6)]
    assert set(ended) == {None, *PEERS[1:6:2]}


def test_connections_that_are_closed_meanwhile_leave_nothing(made: Tries, refusing: str) -> None:
    """ZMQ's thread tells of a try a thousand times a second, to whom nobody listens any more."""
    for peer in PEERS:
        made.connect(peer, refusing)
    for peer in PEERS[::2]:
        made.disconnect(peer)
    assert made.tries.end(made.ended()) in PEERS[1::2]


@pytest.mark.parametrize("most", [1, 2])
def test_without_room_for_its_sockets_a_connection_is_not_watched(most: int, refusing: str) -> None:
    """It takes one to read, and ZMQ takes one to tell."""
    made = Tries(most)
    made.connect(PEERS[0], refusing)
    made.disconnect(PEERS[0])
    made.close()
