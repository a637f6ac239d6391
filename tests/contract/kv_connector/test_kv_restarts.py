"""A decode node that restarted: connections and writes to its earlier life reach nobody."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from kv_transfer.contract import Landed, TransferEnded
from tests.support.kv.kinds import FakeRdmaKind
from tests.support.kv.kv_cluster import begin, cluster_of, error_of, send


@pytest.mark.covers("F68")
def test_writes_to_a_decode_node_that_restarted_reach_neither_life() -> None:
    """The same address: the pair makes a connection of its own, with the memory keys of now."""
    with contextlib.closing(cluster_of("fake-rdma")) as cluster:
        assert isinstance(cluster.kind, FakeRdmaKind)
        network, fabric = cluster.kind.network, cluster.kind.fabric
        prefill, first, old = begin(cluster)
        fabric.hold()
        prefill.push_all(old, [4, 5, 6])
        fabric.wait_under_way(1)
        network.hold()  # So its end is told to nobody, as that of a process that was killed.
        first.connector.close()
        network.release()
        second = cluster.node("d", epoch=2)
        network.nodes[old.kv_endpoint] = second.connector.transport  # type: ignore[assignment]
        before = first.pool.copy(), second.pool.copy()
        ticket = dataclasses.replace(cluster.ticket(second, [1, 2, 3]), kv_endpoint=old.kv_endpoint)
        fabric.release()
        error_of(prefill.wait_event())
        assert fabric.num_refused > 0
        assert np.array_equal(first.pool, before[0])
        assert np.array_equal(second.pool, before[1])

        cluster.kind.one_sided[0].mend()
        send(prefill, second, ticket, [7, 8, 9])
        assert isinstance(second.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert np.array_equal(second.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [7, 8, 9]])
        assert np.array_equal(first.pool, before[0])
        prefill.assert_books_are_empty()
