"""Connections that break, stall or lie: right bytes or a typed failure, never a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import threading

import numpy as np
import pytest
import zmq

from common.errors import ConfigError
from common.ids import Incarnation
from kv_transfer.contract import Landed, Ticket, TransferEnded
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.sending.unreachable import FIRST_PAUSE_S
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S, Limits
from kv_transfer.zmq.connector import ZmqConnector
from tests.contract.kv_connector.proxy import Meddle, Proxy
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kinds import LoopbackKind
from tests.support.kv.kv_cluster import (
    LAYOUT,
    Cluster,
    Node,
    assert_ended_once,
    cluster_of,
    commit_for,
    endings,
    error_of,
    send,
    wait_until,
)

SOURCES = list(range(12))
# Of one handoff of 12 blocks, with headers and ZMTP framing, measured as a lower bound.
STREAM_BYTES = 12 * LAYOUT.block_bytes


def handoff_through(
    cluster: Cluster, meddle: Meddle, *, senders: ManualClock | None = None
) -> tuple[Node, Node, Proxy]:
    prefill, decode = cluster.node("p", clock=senders), cluster.node("d")
    proxy = Proxy(decode.connector.endpoint, meddle)
    ticket = dataclasses.replace(cluster.ticket(decode, range(12)), kv_endpoint=proxy.endpoint)
    send(prefill, decode, ticket, SOURCES)
    return prefill, decode, proxy


@pytest.mark.covers("F23", "F28")
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_connection_cut_in_the_middle_is_taken_up_again(
    zmq_cluster: Cluster, share: float
) -> None:
    """Chunks that the first two connections lost are sent again on the next."""

    def meddle(number: int, forwarded: int, data: bytes) -> bytes | None:
        is_cut = number < 2 and forwarded + len(data) > share * STREAM_BYTES
        return None if is_cut else data

    prefill, decode, proxy = handoff_through(zmq_cluster, meddle)
    with contextlib.closing(proxy):
        assert isinstance(decode.wait_event(), Landed)
        ended = prefill.wait_event()
        assert isinstance(ended, TransferEnded)
        assert ended.error is None
        assert np.array_equal(decode.pool, prefill.pool)
        assert proxy.num_connections >= 2


@pytest.mark.covers("F19")
@pytest.mark.parametrize("after", [0, 200, 2000])
def test_a_stalled_connection_fails_both_sides(zmq_cluster: Cluster, after: int) -> None:
    """Nothing is closed, nothing arrives any more."""

    def meddle(number: int, forwarded: int, data: bytes) -> bytes:
        return data if forwarded + len(data) <= after else b""

    senders = ManualClock()
    prefill, decode, proxy = handoff_through(zmq_cluster, meddle, senders=senders)
    with contextlib.closing(proxy):
        prefill.pass_time_until(lambda: prefill.events, senders)
        ended = prefill.wait_event()
        assert isinstance(ended, TransferEnded)
        assert "was silent" in str(ended.error)
        decode.connector.revoke(ended.lease_token)


@pytest.mark.covers("F24")
@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.35, 0.5, 0.77, 0.95, 0.99])
def test_a_flipped_bit_never_lands_wrong_bytes(zmq_cluster: Cluster, share: float) -> None:
    """In framing, header or payload."""
    at = int(share * STREAM_BYTES)

    def meddle(number: int, forwarded: int, data: bytes) -> bytes:
        if number == 0 and forwarded <= at < forwarded + len(data):
            changed = bytearray(data)
            changed[at - forwarded] ^= 0x10
            return bytes(changed)
        return data

    senders = ManualClock()
    prefill, decode, proxy = handoff_through(zmq_cluster, meddle, senders=senders)
    with contextlib.closing(proxy):
        prefill.pass_time_until(lambda: prefill.events, senders)
        ended = prefill.wait_event()
        assert isinstance(ended, TransferEnded)
        if ended.error is None:
            assert isinstance(decode.wait_event(), Landed)
        decode.connector.revoke(ended.lease_token)
        decode.connector.close()
        assert_ended_once(prefill, decode)
        if endings(decode)[ended.lease_token] == [Landed]:
            assert np.array_equal(decode.pool, prefill.pool)


@pytest.mark.covers("F64")
def test_a_dead_receiver_is_noticed_before_the_deadline(zmq_cluster: Cluster) -> None:
    """The connection breaks and nobody listens at the address any more."""

    def meddle(number: int, forwarded: int, data: bytes) -> bytes | None:
        return data if forwarded + len(data) <= 2000 else None

    senders = ManualClock()
    prefill, decode = zmq_cluster.node("p", clock=senders), zmq_cluster.node("d")
    proxy = Proxy(decode.connector.endpoint, meddle)
    ticket = dataclasses.replace(zmq_cluster.ticket(decode, range(12)), kv_endpoint=proxy.endpoint)
    decode.connector.expect(ticket, sender_deadline_s=20)
    prefill.connector.open(ticket, deadline_s=10_000)
    wait_until(lambda: proxy.num_connections)
    proxy.close()
    prefill.push_all(ticket, SOURCES)
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    prefill.pass_time_until(lambda: prefill.events, senders)
    assert f"was silent for {DEFAULT_PEER_TIMEOUT_S:g} s" in str(error_of(prefill.wait_event()))


@pytest.mark.covers("F30", "F67")
def test_a_dead_kv_port_stalls_one_transfer_and_is_used_again_when_it_answers(
    zmq_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The next ones end at once, and none waits to find out that it works again."""
    dead: set[int] = set()
    is_alive = threading.Event()

    def meddle(number: int, forwarded: int, data: bytes) -> bytes | None:
        if not is_alive.is_set():
            dead.add(number)
        return b"" if number in dead else data

    senders = ManualClock()
    prefill, decode = zmq_cluster.node("p", clock=senders), zmq_cluster.node("d")
    with contextlib.closing(Proxy(decode.connector.endpoint, meddle)) as proxy:

        def ticket() -> Ticket:
            ticket = zmq_cluster.ticket(decode, range(12))
            return dataclasses.replace(ticket, kv_endpoint=proxy.endpoint)

        prefill.connector.open(ticket(), deadline_s=10_000)
        prefill.pass_time_until(lambda: prefill.events, senders)
        assert f"was silent for {DEFAULT_PEER_TIMEOUT_S:g} s" in str(error_of(prefill.wait_event()))
        for _ in range(20):  # no time passes
            prefill.connector.open(ticket(), deadline_s=10_000)
            assert "did not answer" in str(error_of(prefill.wait_event()))
        ended = prefill.connector.statistics().measured.ended
        assert ended["none", "unreachable"] == 21
        assert "KV to d#1" in caplog.text
        assert "no answer, 1 in a row" in caplog.text
        assert prefill.connector.statistics().measured.num_silences >= 1
        assert prefill.connector.statistics().unreachable == (decode.incarnation,)
        is_alive.set()
        senders.advance(FIRST_PAUSE_S)
        prefill.look_at_the_time()
        wait_until(lambda: prefill.connector.statistics().lanes)
        assert prefill.connector.statistics().unreachable == ()
        send(prefill, decode, ticket(), SOURCES)
        assert isinstance(decode.wait_event(), Landed)
    assert np.array_equal(decode.pool[:, :, :12], prefill.pool[:, :, :12])


@pytest.mark.covers("F30")
@pytest.mark.parametrize("kind", ["zmq", "zmq-4", "shm"])
def test_a_kv_port_where_nobody_listens_fails_its_transfers_at_once(kind: str) -> None:
    with contextlib.closing(cluster_of(kind)) as cluster, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        prefill, decode = cluster.node("p", clock=ManualClock()), cluster.node("d")
        endpoint = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        for _ in range(3):
            ticket = dataclasses.replace(cluster.ticket(decode, [1]), kv_endpoint=endpoint)
            prefill.connector.open(ticket, deadline_s=10_000)
            error = error_of(prefill.wait_event())  # no time has passed
            assert isinstance(error, PeerUnreachable)
        assert prefill.connector.statistics().unreachable == (decode.incarnation,)
        prefill.assert_books_are_empty()
        send(prefill, decode, cluster.ticket(decode, range(12)), SOURCES)
        assert isinstance(decode.wait_event(), Landed)


@pytest.mark.covers("F81")
def test_a_dead_sender_is_noticed_before_the_lease_ends(cluster: Cluster) -> None:
    """It stands still after half a handoff, and learns what became of it when it goes on."""
    senders, receivers = ManualClock(), ManualClock()
    prefill, decode = cluster.node("p", clock=senders), cluster.node("d", clock=receivers)
    ticket = cluster.ticket(decode, range(12))
    decode.connector.expect(ticket, sender_deadline_s=10_000)
    prefill.connector.open(ticket, deadline_s=10_000)
    prefill.push_all(ticket, SOURCES, layers=[0])
    wait_until(lambda: decode.connector.statistics().bytes_received)
    decode.pass_time_until(lambda: len(decode.events) == 2, receivers)
    span_s = Limits().patience_s(cluster.kind.lane)
    assert f"p#1 was silent for {span_s:g} s" in str(decode.wait_failed())
    prefill.pass_time_until(lambda: prefill.events, senders)
    assert error_of(prefill.wait_event())


def test_a_cut_loopback_is_taken_up_again() -> None:
    with contextlib.closing(cluster_of("loopback")) as cluster:
        assert isinstance(cluster.kind, LoopbackKind)
        network = cluster.kind.network
        prefill, decode = cluster.node("p"), cluster.node("d")
        ticket = cluster.ticket(decode, range(12))
        network.hold()
        send(prefill, decode, ticket, SOURCES)
        for _ in range(3):
            network.cut(decode.connector.endpoint)
        network.release()
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert np.array_equal(decode.pool, prefill.pool)


@pytest.mark.parametrize(
    "endpoint",
    ["ipc://somewhere", "tcp://", "tcp://host:port", "nonsense", "tcp://[host", "tcp://\u2100:1"],
)
def test_an_endpoint_that_cannot_be(zmq_cluster: Cluster, endpoint: str) -> None:
    prefill, decode = zmq_cluster.node("p"), zmq_cluster.node("d")
    ticket = dataclasses.replace(zmq_cluster.ticket(decode, [1]), kv_endpoint=endpoint)
    prefill.connector.open(ticket, deadline_s=20)
    ended = prefill.wait_event()
    assert isinstance(ended, TransferEnded)
    assert endpoint in str(ended.error)


def test_no_room_for_another_connection(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ran out of file descriptors fails the transfer, and goes on."""
    prefill, decode = zmq_cluster.node("p"), zmq_cluster.node("d")
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", _no_socket)
        ticket = zmq_cluster.ticket(decode, [1])
        prefill.connector.open(ticket, deadline_s=20)
        assert "Too many open files" in str(error_of(prefill.wait_event()))
    send(prefill, decode, ticket := zmq_cluster.ticket(decode, [1, 2]), [3, 4])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)


def _no_socket(context: object, kind: int) -> None:
    raise zmq.ZMQError(errno.EMFILE)


def test_a_port_in_use(zmq_cluster: Cluster) -> None:
    node = zmq_cluster.node("d")
    port = int(node.connector.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"{port} cannot be bound"):
        ZmqConnector(node.pool, LAYOUT, Incarnation("e", 1), lambda _: None, port=port)
