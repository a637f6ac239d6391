"""The addresses that a node binds and announces, and that other nodes find it there."""

from __future__ import annotations

import socket
import threading
from functools import partial

import numpy as np
import pytest

from common.errors import ConfigError
from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.zmq import endpoints
from tests.support.kv.kinds import ZmqKind
from tests.support.kv.kv_cluster import (
    WAIT_S,
    Cluster,
    Node,
    commit_for,
    error_of,
    wait_until,
)


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "advertised_host", "wanted"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1:"),
        ("0.0.0.0", "localhost", "tcp://localhost:"),
        ("::1", None, "tcp://[::1]:"),
        ("::", "127.0.0.1", "tcp://127.0.0.1:"),
    ],
)
def test_a_handoff_reaches_the_advertised_endpoint(
    zmq_cluster: Cluster, host: str, advertised_host: str | None, wanted: str
) -> None:
    if ":" in host and not has_ipv6_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    assert isinstance(zmq_cluster.kind, ZmqKind)
    zmq_cluster.kind.host, zmq_cluster.kind.advertised_host = host, advertised_host
    prefill, decode = zmq_cluster.node("p"), zmq_cluster.node("d")
    assert decode.connector.endpoint.startswith(wanted)
    ticket = zmq_cluster.ticket(decode, range(12))
    decode.connector.expect(ticket, sender_deadline_s=20)
    prefill.connector.open(ticket, deadline_s=20)
    prefill.push_all(ticket, range(12))
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert np.array_equal(decode.pool, prefill.pool)


def fake_names(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]) -> list[str]:
    """Let these names be known and no others; return the list of what is asked for."""
    asked: list[str] = []

    def addresses_of(host: str) -> list[str]:
        asked.append(host)
        if host not in addresses:
            raise OSError("Name or service not known")
        return addresses[host]

    monkeypatch.setattr(endpoints, "addresses_of", addresses_of)
    return asked


def hand_over(cluster: Cluster, prefill: Node, decode: Node) -> None:
    ticket = cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=20)
    prefill.connector.open(ticket, deadline_s=20)
    prefill.push_all(ticket, [3, 4])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)


def named(cluster: Cluster, node: str, name: str, host: str = "127.0.0.1") -> Node:
    """A node that listens on `host` and announces a name."""
    assert isinstance(cluster.kind, ZmqKind)
    cluster.kind.host, cluster.kind.advertised_host = host, name
    return cluster.node(node)


def test_a_name_with_an_ipv6_address_only(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_ipv6_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    fake_names(monkeypatch, {"d.example": ["::1"]})
    prefill = zmq_cluster.node("p")
    hand_over(zmq_cluster, prefill, named(zmq_cluster, "d", "d.example", host="::1"))


@pytest.mark.covers("F137")
@pytest.mark.parametrize("elsewhere", [["127.0.0.1"], ["127.0.0.1", "127.0.0.3"]])
def test_a_name_with_several_addresses_is_reached_where_its_node_listens(
    elsewhere: list[str], zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As routers reach it: a machine in two networks, or with IPv4 and IPv6 of which one is
    used."""
    fake_names(monkeypatch, {"d.example": [*elsewhere, "127.0.0.2"]})
    prefill = zmq_cluster.node("p")
    hand_over(zmq_cluster, prefill, named(zmq_cluster, "d", "d.example", host="127.0.0.2"))


def test_a_slow_name_server_stops_no_other_peer(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the peer whose name it is starts when the answer has come."""
    may_answer, is_asked = threading.Event(), threading.Event()

    def addresses_of(host: str) -> list[str]:
        if host == "slow.example":
            is_asked.set()
            assert may_answer.wait(WAIT_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(endpoints, "addresses_of", addresses_of)
    prefill = zmq_cluster.node("p")
    slow = named(zmq_cluster, "slow", "slow.example")
    quick = named(zmq_cluster, "quick", "quick.example")
    number = named(zmq_cluster, "number", "127.0.0.1")
    late = zmq_cluster.ticket(slow, [1, 2])
    slow.connector.expect(late, sender_deadline_s=20)
    prefill.connector.open(late, deadline_s=20)
    assert is_asked.wait(WAIT_S)
    for decode in (quick, number, quick):
        hand_over(zmq_cluster, prefill, decode)
    may_answer.set()
    prefill.push_all(late, [3, 4])
    prefill.connector.commit(late.lease_token, commit_for(late))
    assert isinstance(slow.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(late.lease_token, None)


def test_a_peer_that_has_answered_is_not_looked_up_again(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when its link was closed because it was idle; a name server may be away then."""
    asked = fake_names(monkeypatch, {"d.example": ["127.0.0.1"]})
    prefill, decode = zmq_cluster.node("p"), named(zmq_cluster, "d", "d.example")
    sending = prefill.connector.sending
    for _ in range(3):
        hand_over(zmq_cluster, prefill, decode)
        (peer,) = sending.machine.in_flight_bytes
        now_s = zmq_cluster.clock.now_s()
        sending.calls.add(partial(sending.machine.on_link_lost, peer, now_s))
        prefill.look_at_the_time()
        wait_until(lambda: not sending.machine.in_flight_bytes)
    assert asked == ["d.example"]


def test_a_name_that_nobody_knows_fails_its_transfer_at_once(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_names(monkeypatch, {})
    prefill, decode = zmq_cluster.node("p"), named(zmq_cluster, "d", "d.example")
    prefill.connector.open(zmq_cluster.ticket(decode, [1]), deadline_s=20)
    error = error_of(prefill.wait_event())
    assert "d.example cannot be resolved: Name or service not known" in str(error)
    assert isinstance(error, PeerUnreachable)


def test_a_host_to_listen_on_may_be_a_name(
    zmq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_names(monkeypatch, {"data-network.example": ["127.0.0.1"]})
    decode = named(zmq_cluster, "d", "127.0.0.1", host="data-network.example")
    hand_over(zmq_cluster, zmq_cluster.node("p"), decode)
    with pytest.raises(ConfigError, match=r"KV host nowhere.example cannot be resolved"):
        named(zmq_cluster, "e", "127.0.0.1", host="nowhere.example")
