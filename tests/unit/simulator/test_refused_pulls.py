"""A simulated node that sends nothing for a pull says so, also when it has nothing else to say."""

from __future__ import annotations

import pytest

from common.ids import AttemptId
from kv_transfer.contract import Ticket
from node.flow.messages import RefusePull, SendBlocks
from simulator.cluster import SimulatedCluster
from simulator.node import NodeSaid
from simulator.router import SimulatedRouter
from tests.unit.simulator.clusters import D, P, setup_of


def test_a_pull_that_does_not_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[NodeSaid] = []
    monkeypatch.setattr(SimulatedRouter, "on_said", lambda router, one: said.append(one))
    cluster = SimulatedCluster(setup_of({P: 1, D: 1}))
    source, puller = cluster.nodes
    ticket = Ticket(
        attempt=AttemptId("a", 1),
        decode_node=puller.me,
        kv_endpoint=puller.me.node_id,
        lease_token=7,
        generation=1,
        target_block_ids=(),
        num_cached_tokens=0,
        fingerprint="another",
        lease_s=1.0,
    )
    source.put(SendBlocks(cluster.router.me, ticket, (b"h" * 16,)))
    cluster.timeline.run()
    refused = [one for told in said for one in told.refused_pulls]
    assert refused == [RefusePull(cluster.router.me, puller.me, 7)]
