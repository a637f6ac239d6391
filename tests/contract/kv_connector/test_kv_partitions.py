"""A network that stops carrying between one pair, in one direction or both, and heals again."""

from __future__ import annotations

import contextlib
import dataclasses
import socket

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Landed, LandingFailed, Released, TransferEnded
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kv_cluster import (
    TIME_STEP_S,
    Cluster,
    Node,
    commit_for,
    endings,
    send,
    wait_until,
)
from tests.support.kv.tcp_proxy import TcpProxy, close_socket

TO_DECODE, TO_PREFILL = False, True
MOST_REFUSED = 50
MOST_S = 6 * DEFAULT_PEER_TIMEOUT_S
NUM_SLOW = 12


class Partition(TcpProxy):
    """Swallows what goes in the directions of `lost`; closes nothing."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.lost: frozenset[bool] = frozenset()
        self.open()

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if is_back not in self.lost:
                    sink.sendall(data)
        close_socket(source)
        close_socket(sink)


class Pair:
    """A prefill and a decode node behind a partition, on a clock of the test's."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, ManualClock()
        self.prefill = cluster.node("p", clock=self.clock)
        self.decode = cluster.node("d", clock=self.clock)
        self.network = Partition(self.decode.connector.endpoint)

    def open(self) -> int:
        """Open a handoff of blocks 4 and 5 to blocks 1 and 2; return its lease."""
        ticket = dataclasses.replace(
            self.cluster.ticket(self.decode, [1, 2]), kv_endpoint=self.network.endpoint
        )
        self.decode.connector.expect(ticket, sender_deadline_s=30)
        self.prefill.connector.open(ticket, deadline_s=self.clock.now_s() + 30)
        self.prefill.push_all(ticket, [4, 5])
        self.ticket = ticket
        return ticket.lease_token

    def commit(self) -> None:
        self.prefill.connector.commit(self.ticket.lease_token, commit_for(self.ticket))

    def pass_time_until_ended(self, token: int, *, is_timed: bool = False) -> TransferEnded:
        """Let time pass until both ends have ended this handoff; return how prefill's did.

        With `is_timed` no more time passes before they have done what is due.
        """

        def has_ended(node: Node, last: set[type]) -> bool:
            return bool(last & set(endings(node).get(token, ())))

        def pass_time() -> None:
            self.clock.advance(TIME_STEP_S)
            for node in (self.prefill, self.decode):
                node.have_seen_the_time() if is_timed else node.look_at_the_time()

        def have_ended() -> bool:
            return has_ended(self.prefill, {TransferEnded}) and has_ended(
                self.decode, {Landed, Released}
            )

        if is_timed:
            # Hundreds of steps, each of which waits for threads: only their own time is bounded.
            ends_at_s = self.clock.now_s() + MOST_S
            while not have_ended():
                assert self.clock.now_s() < ends_at_s, f"not within {MOST_S:g} s of the test's time"
                pass_time()
        else:
            wait_until(have_ended, pass_time)
        (ended,) = [event for event in self.prefill.events if event.lease_token == token]
        assert isinstance(ended, TransferEnded)
        return ended


@pytest.mark.covers("F81", "F121")
@pytest.mark.parametrize(
    "lost", [{TO_DECODE}, {TO_PREFILL}, {TO_DECODE, TO_PREFILL}], ids=["there", "back", "both"]
)
def test_both_ends_of_a_partition_free_what_they_hold_and_meet_again(
    zmq_cluster: Cluster, lost: set[bool]
) -> None:
    """Where answers alone are lost, the decode node hears the other until that gives up."""
    pair = Pair(zmq_cluster)
    with contextlib.closing(pair.network):
        first = pair.open()
        wait_until(lambda: pair.decode.connector.statistics().bytes_received > 0)
        pair.network.lost = frozenset(lost)
        pair.commit()
        lost_at_s = pair.clock.now_s()
        ended = pair.pass_time_until_ended(first, is_timed=True)
        assert isinstance(ended.error, HandoffFailed)
        num_silences = 2 if lost == {TO_PREFILL} else 1
        spent_s = pair.clock.now_s() - lost_at_s
        assert spent_s <= num_silences * DEFAULT_PEER_TIMEOUT_S + 2 * TIME_STEP_S
        # What still reaches it may be a whole handoff; else it fails and lets go of its blocks.
        assert endings(pair.decode)[first] in ([Landed], [LandingFailed, Released])
        for node in (pair.prefill, pair.decode):
            node.assert_books_are_empty()

        pair.network.lost = frozenset()
        for _ in range(MOST_REFUSED):
            again = pair.open()
            pair.commit()
            ended = pair.pass_time_until_ended(again)
            if ended.error is None:
                break
            assert isinstance(ended.error, HandoffFailed), "until it is tried again"
        assert ended.error is None
        wanted = pair.prefill.pool[:, :, [4, 5]]
        assert np.array_equal(pair.decode.pool[:, :, [1, 2]], wanted)
        for node in (pair.prefill, pair.decode):
            node.assert_books_are_empty()


@pytest.mark.covers("F27")
def test_many_decode_nodes_that_acknowledge_nothing_hold_up_no_other(
    zmq_cluster: Cluster,
) -> None:
    """More than there are full windows in what a prefill node may have under way."""
    clock = ManualClock()  # It stands still, so nobody is given up.
    prefill, healthy = zmq_cluster.node("p", clock=clock), zmq_cluster.node("d", clock=clock)
    with contextlib.ExitStack() as exits:
        for number in range(NUM_SLOW):
            slow = zmq_cluster.node(f"slow{number}", clock=clock)
            network = exits.enter_context(contextlib.closing(Partition(slow.connector.endpoint)))
            ticket = dataclasses.replace(
                zmq_cluster.ticket(slow, range(12)), kv_endpoint=network.endpoint
            )
            slow.connector.expect(ticket, sender_deadline_s=30)
            prefill.connector.open(ticket, deadline_s=30)
            wait_until(lambda: f"slow{number}" in prefill.connector.statistics().lanes)  # noqa: B023
            network.lost = frozenset({TO_PREFILL})
            prefill.push_all(ticket, range(12))
            wait_until(lambda: slow.connector.statistics().bytes_received > 0)  # noqa: B023
        for _ in range(3):
            ticket = zmq_cluster.ticket(healthy, range(12))
            send(prefill, healthy, ticket, range(12))
            assert isinstance(healthy.wait_event(), Landed)
            assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert np.array_equal(healthy.pool, prefill.pool)
        assert prefill.connector.statistics().transfers_open == NUM_SLOW
