"""What a router tells Prometheus about the nodes."""

from __future__ import annotations

from dataclasses import replace

from common.nodes import Role
from router.cluster.view import scrape_targets
from tests.support.http.http_edge import make_edge
from tests.support.nodes.node_records import record


def test_each_node_with_metrics_is_a_target() -> None:
    decode = replace(record("d", Role.DECODE), metrics_address="[fd00::7]:9100")
    prefill = replace(record("p", Role.PREFILL), metrics_address="10.0.0.2:9100")
    silent = replace(record("old", Role.MIXED), metrics_address="")
    assert scrape_targets([decode, silent, prefill]) == [
        {"targets": ["[fd00::7]:9100"], "labels": {"role": "decode", "node_id": "d"}},
        {"targets": ["10.0.0.2:9100"], "labels": {"role": "prefill", "node_id": "p"}},
    ]


async def test_the_targets_are_json_as_prometheus_wants_it() -> None:
    edge = make_edge()
    async with edge.client() as client:
        reply = await client.get("/v1/cluster/targets")
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert reply.json() == edge.cluster.scrape_targets()
