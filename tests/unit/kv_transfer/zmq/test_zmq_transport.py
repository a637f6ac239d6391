"""What the ZMQ transport asks of the kernel, and how long it keeps what it sends."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from common.ids import Incarnation
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import FromPeer, FromSession, NobodyListens, NoConnection
from kv_transfer.zmq import endpoints
from kv_transfer.zmq.transport import (
    KERNELS_CHOICE,
    LOCAL_SEND_BUFFER_BYTES,
    MAX_UNSENT,
    ZmqTransport,
)
from tests.support.kv.kv_cluster import LAYOUT

NOBODY = Peer("tcp://127.0.0.1:1", Incarnation("nobody", 1))


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [
        ("tcp://127.0.0.1:9001", LOCAL_SEND_BUFFER_BYTES),
        ("tcp://[::1]:9001", LOCAL_SEND_BUFFER_BYTES),
        ("tcp://192.0.2.7:9001", KERNELS_CHOICE),
        ("tcp://[2001:db8::7]:9001", KERNELS_CHOICE),
    ],
)
def test_only_towards_this_machine_the_kernel_holds_little(
    transport: ZmqTransport, endpoint: str, wanted: int
) -> None:
    peer = Peer(endpoint, Incarnation("d", 1))
    transport.connect(peer)
    assert transport._dealers[peer].getsockopt(zmq.SNDBUF) == wanted


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    transport = ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, Limits())
    yield transport
    transport.close()


def test_what_zmq_holds_of_a_closed_connection_is_kept(transport: ZmqTransport) -> None:
    part = np.ones(1 << 20, np.uint8)
    kept = weakref.ref(part)
    transport.connect(NOBODY)
    assert transport.send(NOBODY, [memoryview(b"header"), part.data])
    del part
    transport.disconnect(NOBODY)
    gc.collect()
    # ZMQ lets go of it in a thread of its own, and is not asked before the next wait.
    assert kept() is not None
    while kept() is not None:
        transport.wait(0.001)


def test_what_was_sent_during_a_wait_is_let_go_of_when_it_ends(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that an acknowledgement wakes sends again, in memory that it made free."""
    itself = Peer(transport.endpoint, Incarnation("itself", 1))
    part = np.ones(1 << 20, np.uint8)
    kept = weakref.ref(part)
    transport.connect(itself)
    assert transport.send(itself, [memoryview(b"header"), part.data])
    del part

    def until_it_is_sent(_: float) -> list[object]:
        while 0 in transport._part_senders[itself]._held[0][0]:
            pass
        return []

    monkeypatch.setattr(transport._readiness, "wait", until_it_is_sent)
    transport.wait(1.0)
    assert kept() is None


def test_an_address_that_is_found_too_late_is_used_the_next_time(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a name server that is slower than the peer timeout is never heard."""
    asked: list[str] = []
    may_answer = threading.Event()

    def look_up(host: str) -> str:
        asked.append(host)
        assert may_answer.wait(20.0)
        return "127.0.0.1"

    monkeypatch.setattr(endpoints, "look_up", look_up)
    peer = Peer("tcp://d.example:1", Incarnation("d", 1))
    transport.connect(peer)
    assert transport.send(peer, [memoryview(b"hello")])
    transport.disconnect(peer)
    assert not transport.send(peer, [memoryview(b"hello")])
    may_answer.set()
    while not transport._names._known:
        transport.wait(1.0)
    assert peer not in transport._dealers
    transport.connect(peer)
    assert peer in transport._dealers
    assert asked == ["d.example"]


def test_nobody_waits_while_something_that_arrived_was_not_read(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn reads a part of many messages; ZMQ does not signal the others again."""
    itself = Peer(transport.endpoint, Incarnation("itself", 1))
    transport.connect(itself)
    assert transport.send(itself, [memoryview(b"hello")])
    while transport.receive_nowait() is None:
        transport.wait(1.0)
    timeouts: list[float] = []

    def noted(timeout_s: float) -> list[object]:
        timeouts.append(timeout_s)
        return []

    monkeypatch.setattr(transport._readiness, "wait", noted)
    transport.wait(1.0)
    # There is nothing more to read, which only the next look finds out.
    assert transport.receive_nowait() is None
    transport.wait(1.0)
    assert timeouts == [0.0, 1.0]


def test_what_waits_for_a_name_is_bounded(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(endpoints, "look_up", lambda _: may_answer.wait(20.0) and "127.0.0.1")
    peer = Peer("tcp://d.example:1", Incarnation("d", 1))
    transport.connect(peer)
    for _ in range(MAX_UNSENT):
        assert transport.send(peer, [memoryview(b"hello")])
    assert not transport.send(peer, [memoryview(b"hello")])
    may_answer.set()


def test_the_connections_of_a_pair_are_moved_by_different_threads() -> None:
    limits = Limits(max_channels=3)
    with closing(ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, limits)) as transport:
        peers = [Peer(NOBODY.endpoint, NOBODY.incarnation, channel=n) for n in range(3)]
        for peer in peers:
            transport.connect(peer)
        threads = [transport._dealers[peer].getsockopt(zmq.AFFINITY) for peer in peers]
        assert threads == [0b001, 0b010, 0b100]
        assert transport._context.get(zmq.IO_THREADS) == 3


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port where nobody listens, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(("is_found", "wanted"), [(False, NoConnection), (True, NobodyListens)])
def test_a_connection_that_failed_is_not_told_of_when_it_is_over(
    transport: ZmqTransport,
    monkeypatch: pytest.MonkeyPatch,
    refusing: int,
    is_found: bool,
    wanted: type[NoConnection | NobodyListens],
) -> None:
    """It would end the next one, whose name may be found, or whose port may be open."""

    def look_up(host: str) -> str:
        if is_found:
            return "127.0.0.1"
        raise OSError(f"{host} is unknown")

    monkeypatch.setattr(endpoints, "look_up", look_up)
    names = [f"{name}.example" for name in "de"]
    peers = [Peer(f"tcp://{name}:{refusing}", Incarnation(name, 1)) for name in names]
    for peer in peers:
        transport.connect(peer)
    while len(transport._failed) < 2:
        transport.wait(1.0)
    transport.disconnect(peers[0])
    told = transport.receive_nowait()
    assert isinstance(told, wanted)
    assert told.peer == peers[1]
    assert transport.receive_nowait() is None


def test_a_port_where_nobody_listens_is_told_of_once(
    transport: ZmqTransport, refusing: int
) -> None:
    itself = Peer(transport.endpoint, Incarnation("itself", 1))
    peer = Peer(f"tcp://127.0.0.1:{refusing}", Incarnation("d", 1))
    for one in (itself, peer):
        transport.connect(one)
        assert transport.send(one, [memoryview(b"hello")])
    told: set[type[object]] = set()
    while len(told) < 2:
        transport.wait(1.0)
        while (arrival := transport.receive_nowait()) is not None:
            assert arrival == NobodyListens(peer) or isinstance(arrival, FromSession)
            assert type(arrival) not in told
            told.add(type(arrival))


def test_those_that_have_something_to_read_take_turns(transport: ZmqTransport) -> None:
    """A peer that sends without end stops no other one."""
    with closing(ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, Limits())) as other:
        peers = [Peer(one.endpoint, Incarnation(f"d{n}", 1)) for n, one in enumerate((other,) * 2)]
        sessions = []
        for peer in peers:
            transport.connect(peer)
            assert transport.send(peer, [memoryview(b"hello")])
            while not isinstance(hello := other.receive_nowait(), FromSession):
                other.wait(1.0)
            sessions.append(hello.session)
        for session in sessions:
            for _ in range(3):
                other.reply(session, [memoryview(b"answer")])
        order: list[Peer] = []
        while len(transport._ready) < 2:
            transport.wait(1.0)
        while len(order) < 6:
            if (arrival := transport.receive_nowait()) is None:
                transport.wait(1.0)
            elif isinstance(arrival, FromPeer):
                order.append(arrival.peer)
        assert order[0] != order[1]
