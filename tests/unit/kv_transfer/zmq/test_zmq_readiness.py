"""Which sockets can be read: all that can, and nobody else is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from kv_transfer.zmq.readiness import Readiness, Socket

SOON_S = 10.0
"""Never waited for in a test that passes."""
NUM_PEERS = 40


class Network:
    """A ROUTER, and DEALERs that connect to it."""

    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        self._dealers: list[Socket] = []

    def dealer(self, name: bytes) -> Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.connect(self.router.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        self._dealers.append(dealer)
        return dealer

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def network() -> Iterator[Network]:
    with closing(Network()) as network:
        yield network


def wait_for(readiness: Readiness, wanted: Socket | int) -> None:
    """Wait until `wanted` is reported; other events of ZMQ may end a wait before."""
    while wanted not in readiness.wait(SOON_S):
        pass


def drain(source: Socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(source.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return found


def test_a_socket_is_reported_until_it_was_read(network: Network) -> None:
    readiness, router = Readiness(), network.router
    readiness.watch(router)
    assert readiness.wait(0.0) == []
    dealer = network.dealer(b"a")
    for number in range(3):
        dealer.send(b"%d" % number)
        wait_for(readiness, router)
        assert drain(router) == [b"%d" % number]
    readiness.close()


def test_what_arrived_is_reported_though_a_send_took_its_signal(network: Network) -> None:
    """ZMQ takes news of arrivals in every call on a socket, and signals them once."""
    dealer = network.dealer(b"a")
    readiness, router = Readiness(), network.router
    readiness.watch(dealer)
    dealer.send(b"hello")
    readiness.used(dealer)
    router.recv_multipart()
    for _ in range(50):
        router.send_multipart([b"a", b"answer"])
        dealer.send(b"again")
        readiness.used(dealer)
        router.recv_multipart()
        wait_for(readiness, dealer)
        assert drain(dealer) == [b"answer"]
    readiness.close()


def test_files_are_reported_and_forgotten_sockets_are_not(network: Network) -> None:
    readiness, router = Readiness(), network.router
    read, write = os.pipe()
    readiness.watch_file(read)
    readiness.watch(router)
    dealer = network.dealer(b"a")
    dealer.send(b"hello")
    wait_for(readiness, router)
    readiness.forget(router)
    os.write(write, b"x")
    assert readiness.wait(SOON_S) == [read]
    readiness.close()
    os.close(read)
    os.close(write)


@pytest.mark.covers("F120")
def test_only_sockets_with_news_are_asked(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many idle connections cost nothing in a turn."""
    readiness, router = Readiness(), network.router
    dealers = [network.dealer(b"%d" % number) for number in range(NUM_PEERS)]
    for dealer in dealers:
        dealer.send(b"hello")
        router.recv_multipart()
        readiness.watch(dealer)
    while readiness.wait(0.1):
        pass  # News of the connections.
    asked: list[Socket] = []
    getsockopt = zmq.Socket.getsockopt

    def asking(source: Socket, option: int) -> object:
        asked.append(source)
        return getsockopt(source, option)

    monkeypatch.setattr(zmq.Socket, "getsockopt", asking)
    router.send_multipart([b"7", b"answer"])
    wait_for(readiness, dealers[7])
    assert set(asked) == {dealers[7]}
    readiness.close()
