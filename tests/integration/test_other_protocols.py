"""Routers and nodes of other protocol versions: which of them work together, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.files.keys_folder import Keys
from common.ids import AttemptId
from common.nodes import Role
from common.request import FinishReason
from common.version import PROTOCOL_VERSION
from placement.store import PlacementStore
from protos import pdserve_node_pb2 as pb
from tests.integration.fake_node import IDLE, FakeNode, record_of
from tests.integration.scripted_cluster import (
    Cluster,
    asked,
    ids,
    start,
    tokens,
    wait_until,
)
from tests.integration.scripted_cluster import scripted_cluster as scripted_cluster


class VersionedNode(FakeNode):
    """Takes messages of its own protocol version alone, as releases up to protocol 2 did."""

    def __init__(self, node_id: str, protocol: int) -> None:
        super().__init__(node_id, Role.MIXED)
        self.protocol = protocol
        self.received: set[int] = set()

    async def start(
        self, store: PlacementStore, *, port: int = 0, keys: Keys | None = None
    ) -> None:
        await super().start(store, port=port, keys=keys)
        record = record_of(self.incarnation, self.role, f"127.0.0.1:{self.port}")
        await store.heartbeat(replace(record, protocol=self.protocol), IDLE, lease_s=600)

    async def _check(self, envelope: pb.Envelope, context: Any) -> None:
        self.received.add(envelope.protocol_version)
        if envelope.protocol_version == self.protocol:
            await super()._check(envelope, context)


async def add(cluster: Cluster, protocol: int) -> VersionedNode:
    node = VersionedNode(f"m{protocol}", protocol)
    await node.start(cluster.store)
    return node


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION])
async def test_a_node_is_spoken_to_in_its_own_version(cluster: Cluster, protocol: int) -> None:
    node = await add(cluster, protocol)
    cluster.nodes.append(node)
    answer = start(await cluster.router())
    request = await asked(node)
    attempt = AttemptId(request.id.choice_id, request.id.attempt)
    node.push(tokens(attempt, 0, 5, 6, finish_reason=FinishReason.LENGTH, is_started=True))
    assert ids(await answer) == [5, 6]
    assert node.received == {protocol}


async def test_a_newer_node_is_spoken_to_in_the_router_s_version(cluster: Cluster) -> None:
    node = await add(cluster, PROTOCOL_VERSION + 1)
    router = await cluster.router()
    try:
        await wait_until(lambda: node.received == {PROTOCOL_VERSION}, "the router calls")
        assert len(router.pool.membership.records()) == 1
    finally:
        await node.die()


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2])
async def test_a_node_of_a_version_further_away_is_left_out_with_a_reason(
    cluster: Cluster, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    node = await add(cluster, protocol)
    try:
        with caplog.at_level("WARNING", "pdserve.router.nodes"):
            router = await cluster.router()
            await router.pool.wait_heard()
            await cluster.refresh()
        assert router.pool.membership.records() == []
        assert caplog.messages == [
            f"m{protocol}#1 is left out: its protocol version is {protocol}, this router's "
            f"{PROTOCOL_VERSION}"
        ]
    finally:
        await node.die()
