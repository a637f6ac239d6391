"""What the ZMQ transport asks of the kernel, and how long it keeps what it sends."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
import zmq

from common.ids import Incarnation
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import FromPeer, FromSession, NobodyListens, NoConnection
from kv_transfer.zmq import endpoints
from kv_transfer.zmq.first_tries import FirstTries
from kv_transfer.zmq.name_lookup import Found, NameLookup
from kv_transfer.zmq.parts import PartSender
from kv_transfer.zmq.readiness import Readiness
from kv_transfer.zmq.transport import (
    KERNELS_CHOICE,
    LOCAL_SEND_BUFFER_BYTES,
    MAX_UNSENT,
    ZmqTransport,
)
from tests.support.kv.kv_cluster import LAYOUT

NOBODY = Peer("tcp://127.0.0.1:1", Incarnation("nobody", 1))


class NotedContext(zmq.Context[zmq.Socket[bytes]]):
    """A context that notes each DEALER which it opens."""

    opened: ClassVar[list[zmq.Socket[bytes]]]

    def socket(self, socket_type: int, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(socket_type, *arguments, **options)
        if socket_type == zmq.DEALER:
            self.opened.append(made)
        return made


@pytest.fixture
def dealers(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Socket[bytes]]:
    """The DEALERs that transports open, in order; requested before the transport is made."""
    monkeypatch.setattr(NotedContext, "opened", [], raising=False)
    monkeypatch.setattr(zmq, "Context", NotedContext)
    return NotedContext.opened


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
    dealers: list[zmq.Socket[bytes]], transport: ZmqTransport, endpoint: str, wanted: int
) -> None:
    transport.connect(Peer(endpoint, Incarnation("d", 1)))
    [dealer] = dealers
    assert dealer.getsockopt(zmq.SNDBUF) == wanted


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
    transport.connect(itself)
    assert transport.send(itself, [memoryview(b"header"), memoryview(b"part")])
    order: list[str] = []
    forget_sent = PartSender.forget_sent

    def waited(_: Readiness, timeout_s: float) -> list[object]:
        order.append("waited")
        return []

    def forgot(self: PartSender) -> bool:
        order.append("forgot what was sent")
        return forget_sent(self)

    monkeypatch.setattr(Readiness, "wait", waited)
    monkeypatch.setattr(PartSender, "forget_sent", forgot)
    transport.wait(1.0)
    assert order == ["waited", "forgot what was sent"]


def test_an_address_that_is_found_too_late_is_used_the_next_time(
    dealers: list[zmq.Socket[bytes]], transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a name server that is slower than the peer timeout is never heard."""
    asked: list[str] = []
    may_answer = threading.Event()

    def addresses_of(host: str) -> list[str]:
        asked.append(host)
        assert may_answer.wait(20.0)
        return ["127.0.0.1"]

    monkeypatch.setattr(endpoints, "addresses_of", addresses_of)
    peer = Peer("tcp://d.example:1", Incarnation("d", 1))
    transport.connect(peer)
    assert transport.send(peer, [memoryview(b"hello")])
    transport.disconnect(peer)
    assert not transport.send(peer, [memoryview(b"hello")])
    may_answer.set()
    transport.wait(20.0)  # Ended by the address.
    assert not dealers
    transport.connect(peer)
    assert len(dealers) == 1
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

    def noted(_: Readiness, timeout_s: float) -> list[object]:
        timeouts.append(timeout_s)
        return []

    monkeypatch.setattr(Readiness, "wait", noted)
    transport.wait(1.0)
    # There is nothing more to read, which only the next look finds out.
    assert transport.receive_nowait() is None
    transport.wait(1.0)
    assert timeouts == [0.0, 1.0]


def test_what_waits_for_a_name_is_bounded(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(
        endpoints, "addresses_of", lambda _: may_answer.wait(20.0) and ["127.0.0.1"]
    )
    peer = Peer("tcp://d.example:1", Incarnation("d", 1))
    transport.connect(peer)
    for _ in range(MAX_UNSENT):
        assert transport.send(peer, [memoryview(b"hello")])
    assert not transport.send(peer, [memoryview(b"hello")])
    may_answer.set()


def test_the_connections_of_a_pair_are_moved_by_different_threads(
    dealers: list[zmq.Socket[bytes]],
) -> None:
    limits = Limits(max_channels=3)
    with closing(ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, limits)) as transport:
        for channel in range(3):
            transport.connect(Peer(NOBODY.endpoint, NOBODY.incarnation, channel=channel))
        threads = [dealer.getsockopt(zmq.AFFINITY) for dealer in dealers]
        assert threads == [0b001, 0b010, 0b100]
        assert {dealer.context.get(zmq.IO_THREADS) for dealer in dealers} == {3}


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port where nobody listens, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[Peer]:
    """The peers whose names were not found, or whose ports refused, as the transport learns it."""
    peers: list[Peer] = []
    take, end = NameLookup.take, FirstTries.end

    def taken(self: NameLookup) -> list[tuple[Peer, Found]]:
        found = take(self)
        peers.extend(peer for peer, address in found if not isinstance(address, str))
        return found

    def ended(self: FirstTries, source: zmq.Socket[bytes]) -> Peer | None:
        refused = end(self, source)
        peers.extend([] if refused is None else [refused])
        return refused

    monkeypatch.setattr(NameLookup, "take", taken)
    monkeypatch.setattr(FirstTries, "end", ended)
    return peers


@pytest.mark.parametrize(("is_found", "wanted"), [(False, NoConnection), (True, NobodyListens)])
def test_a_connection_that_failed_is_not_told_of_when_it_is_over(
    transport: ZmqTransport,
    monkeypatch: pytest.MonkeyPatch,
    failed: list[Peer],
    refusing: int,
    is_found: bool,
    wanted: type[NoConnection | NobodyListens],
) -> None:
    """It would end the next one, whose name may be found, or whose port may be open."""

    def addresses_of(host: str) -> list[str]:
        if is_found:
            return ["127.0.0.1"]
        raise OSError(f"{host} is unknown")

    monkeypatch.setattr(endpoints, "addresses_of", addresses_of)
    names = [f"{name}.example" for name in "de"]
    peers = [Peer(f"tcp://{name}:{refusing}", Incarnation(name, 1)) for name in names]
    for peer in peers:
        transport.connect(peer)
    while len(failed) < 2:
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


def test_those_that_have_something_to_read_take_turns(
    dealers: list[zmq.Socket[bytes]], transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that sends without end stops no other one."""
    readable = set[object]()
    wait = Readiness.wait

    def noted(self: Readiness, timeout_s: float) -> list[zmq.Socket[bytes] | int]:
        arrived = wait(self, timeout_s)
        readable.update(arrived)
        return arrived

    monkeypatch.setattr(Readiness, "wait", noted)
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
        while not readable.issuperset(dealers):
            transport.wait(1.0)
        while len(order) < 6:
            if (arrival := transport.receive_nowait()) is None:
                transport.wait(1.0)
            elif isinstance(arrival, FromPeer):
                order.append(arrival.peer)
        assert order[0] != order[1]
