"""Silence and time: every wait ends, and says for whom it waited."""

from __future__ import annotations

import dataclasses

from kv_transfer.connector import Landed
from tests.contract.kv_connector.cluster import (
    Cluster,
    assert_ended_once,
    commit_for,
    error_of,
)


def test_abort_before_anybody_answers(cluster: Cluster) -> None:
    prefill = cluster.node("p", peer_timeout_s=0.3)
    ticket = dataclasses.replace(
        cluster.ticket(cluster.node("d"), [1]), kv_endpoint=cluster.silent_endpoint()
    )
    prefill.connector.open(ticket, deadline_s=30)
    prefill.connector.abort(ticket.lease_token)
    assert "said nothing" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


def test_a_silent_peer_fails_the_transfer_at_its_deadline(cluster: Cluster) -> None:
    """F19, F32."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = dataclasses.replace(cluster.ticket(decode, [1]), kv_endpoint=cluster.silent_endpoint())
    prefill.connector.open(ticket, deadline_s=0.1)
    prefill.push_all(ticket, [0])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


def test_a_silent_peer_is_noticed_long_before_the_deadline(cluster: Cluster) -> None:
    prefill = cluster.node("p", peer_timeout_s=0.3)
    ticket = dataclasses.replace(
        cluster.ticket(cluster.node("d"), [1]), kv_endpoint=cluster.silent_endpoint()
    )
    prefill.connector.open(ticket, deadline_s=10_000)
    assert "d#1" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


def test_a_commit_nobody_can_fulfil_ends_at_the_deadline(cluster: Cluster) -> None:
    """The receiver lives and answers pings, yet the transfer goes nowhere: no commit was made."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=1.0)
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    assert "gave the transfer up" in str(decode.wait_failed())
    assert_ended_once(prefill, decode)


def test_a_landing_without_a_sender_expires(cluster: Cluster) -> None:
    """F03."""
    decode = cluster.node("d")
    ticket = cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=0.1)
    assert "no sender was heard for 0.1 s" in str(decode.wait_failed())
    assert_ended_once(decode)


def test_an_open_transfer_keeps_its_landing(cluster: Cluster) -> None:
    """A long prompt computes far longer than `sender_deadline_s` between two pushes."""
    prefill = cluster.node("p", peer_timeout_s=0.4)
    decode = cluster.node("d", peer_timeout_s=0.4)
    ticket, short = cluster.ticket(decode, [1]), cluster.ticket(decode, [2])
    decode.connector.expect(ticket, sender_deadline_s=0.8)
    prefill.connector.open(ticket, deadline_s=30)
    for _ in range(3):
        # Each of these takes 0.5 s of the connector's own time.
        decode.connector.expect(short, sender_deadline_s=0.5)
        assert "no sender was heard for 0.5 s" in str(decode.wait_failed())
        short = cluster.ticket(decode, [2])
    prefill.push_all(ticket, [0])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
