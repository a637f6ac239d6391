"""Silence and time: every wait ends, and its error names the peer."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest

from common.observing.clock import MonotonicClock
from kv_transfer.contract import Landed, TransferEnded
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kv_cluster import (
    Cluster,
    assert_ended_once,
    commit_for,
    error_of,
    send,
    wait_until,
)

YEAR_S = 365 * 86400.0


@pytest.mark.covers("F55")
def test_abort_before_anybody_answers(cluster: Cluster) -> None:
    prefill = cluster.node("p")
    ticket = dataclasses.replace(
        cluster.ticket(cluster.node("d"), [1]), kv_endpoint=cluster.silent_endpoint()
    )
    # Nothing was sent, so there is nothing to wait for.
    prefill.connector.open(ticket, deadline_s=30)
    prefill.connector.abort(ticket.lease_token)
    assert "aborted by its sender" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


@pytest.mark.covers("F19", "F32")
def test_a_silent_peer_fails_the_transfer_at_its_deadline(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = dataclasses.replace(cluster.ticket(decode, [1]), kv_endpoint=cluster.silent_endpoint())
    prefill.connector.open(ticket, deadline_s=0.1)
    prefill.push_all(ticket, [0])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


@pytest.mark.covers("F19")
def test_a_silent_peer_is_noticed_long_before_the_deadline(cluster: Cluster) -> None:
    clock = ManualClock()
    prefill = cluster.node("p", clock=clock)
    ticket = dataclasses.replace(
        cluster.ticket(cluster.node("d"), [1]), kv_endpoint=cluster.silent_endpoint()
    )
    prefill.connector.open(ticket, deadline_s=10_000)
    prefill.pass_time_until(lambda: prefill.events, clock)
    assert "d#1" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


def test_a_commit_nobody_can_fulfil_ends_at_the_deadline(cluster: Cluster) -> None:
    """The receiver answers pings, but the transfer makes no progress: there is no commit."""
    clock = ManualClock()
    prefill, decode = cluster.node("p", clock=clock), cluster.node("d", clock=clock)
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=1.0)
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    wait_until(lambda: decode.connector.statistics().bytes_received)
    clock.advance(1.0)
    prefill.look_at_the_time()
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    assert "aborted the transfer" in str(decode.wait_failed())
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F03")
def test_a_landing_without_a_sender_expires(cluster: Cluster) -> None:
    decode = cluster.node("d")
    ticket = cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=0.1)
    assert "the sender was silent for 0.1 s" in str(decode.wait_failed())
    assert_ended_once(decode)


def test_an_open_transfer_keeps_its_landing(cluster: Cluster) -> None:
    """A long prompt computes far longer than `sender_deadline_s` between two pushes."""
    clock, expires_after_s = ManualClock(), 3.0
    prefill, decode = (cluster.node(name, peer_timeout_s=4.0, clock=clock) for name in "pd")
    ticket = cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=expires_after_s)
    prefill.connector.open(ticket, deadline_s=30)
    token = ticket.lease_token
    for _ in range(10):
        clock.advance(1.0)  # A ping is due.
        prefill.look_at_the_time()
        wait_until(lambda: decode.lease_ends_at_s(token) == clock.now_s() + expires_after_s)
    prefill.push_all(ticket, [0])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)


@pytest.mark.covers("F70")
def test_a_wall_clock_that_jumps_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year back or forth between any two looks; nobody waits for the length of a lease."""
    jumps = itertools.cycle([YEAR_S, -YEAR_S, 0.0])
    base_s = time.time()
    monkeypatch.setattr(time, "time", lambda: base_s + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (base_s + next(jumps))))
    # And a machine that stalls ends nothing either.
    nodes = (cluster.node(name, peer_timeout_s=600, clock=MonotonicClock()) for name in "pd")
    prefill, decode = nodes
    for _ in range(3):
        ticket = cluster.ticket(decode, [1, 2, 3])
        send(prefill, decode, ticket, [4, 5, 6])
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert_ended_once(prefill, decode)
