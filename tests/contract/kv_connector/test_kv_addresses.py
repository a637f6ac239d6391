"""The addresses that a node binds and announces, and that other nodes find it there."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from kv_transfer.connector import Landed
from tests.contract.kv_connector.cluster import Cluster, commit_for
from tests.contract.kv_connector.kinds import ZmqKind


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
