"""Whichever way KV takes between two nodes, a request answers the same, token for token.

Two prefill and two decode nodes that do not allow the same transports: their pairs take different
lanes at the same time. The reference is one node that computes everything itself. All of them store
KV as int8, whose scales must travel; other tests hand over float32.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

BLOCK_SIZE = 32
NUM_TOKENS = 8
# What a prefill and a decode node allow, and the lane that the two then take.
LANES = {
    ("auto", "auto"): "shm",
    ("auto", "zmq"): "zmq",
    ("zmq", "auto"): "zmq",
    ("zmq", "zmq"): "zmq",
}


def specs(model: Path) -> list[ClusterSpec]:
    flags = (
        *("--block-size", str(BLOCK_SIZE), "--num-threads", "1"),
        *("--kv-cache-memory", "16MiB", "--local-prefill-threshold", "0"),
        *("--kv-cache-dtype", "int8"),
    )
    alone = NodeSpec("alone", Role.MIXED, ("--no-enable-prefix-caching",))
    # Two connections where both have it, else one.
    zmq = ("--kv-transport", "zmq", "--kv-verify", "commit", "--kv-lanes", "2")
    nodes = (
        NodeSpec("prefill-auto", Role.PREFILL, ("--max-num-batched-tokens", "64")),
        NodeSpec("prefill-zmq", Role.PREFILL, zmq),
        NodeSpec("decode-auto", Role.DECODE),
        NodeSpec("decode-zmq", Role.DECODE, zmq),
    )
    return [
        ClusterSpec(name="lanes_alone", model=model, nodes=(alone,), flags=flags),
        ClusterSpec(name="lanes", model=model, nodes=nodes, flags=flags, has_patient_routers=True),
    ]


@pytest.fixture(scope="module")
def clusters(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[list[Cluster]]:
    with running(specs(tiny_model), cluster_redis, cluster_folder) as started:
        yield started


def requests() -> list[Fields]:
    """Prompts of every length that means something to blocks, greedy and sampled."""
    lengths = (2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 7, 400)
    ways: tuple[Fields, ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 11})
    free = [
        {
            "prompt": prompt_tokens(length, salt=salt),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **ways[(salt + index) % 2],
        }
        for salt in range(4)
        for index, length in enumerate(lengths)
    ]
    under_a_schema = [
        {
            "prompt": prompt_tokens(length, salt=9),
            "max_tokens": 200,
            **schemas.asked(schemas.PERSON),
            **way,
        }
        for way in ways
        for length in lengths[2:]
    ]
    # The page that tells which pair had which request shows the last 32.
    return free + under_a_schema


def transfers(cluster: Cluster, node_id: str) -> Counter[tuple[str, str]]:
    """How many transfers of a node ended, by transport and outcome."""
    nodes = httpx.get(f"{cluster.url}/v1/cluster").json()["nodes"]
    (address,) = [n["metrics_address"] for n in nodes if n["node_id"] == node_id]
    text = httpx.get(f"http://{address}/metrics").text
    return Counter(
        {
            (sample.labels["transport"], sample.labels["outcome"]): int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pdserve_kv_transfers_total"
        }
    )


def allowed(node: str) -> str:
    """What a node, named with its epoch, allows."""
    return node.partition("#")[0].partition("-")[2]


def test_every_pair_answers_as_one_node_alone(clusters: list[Cluster]) -> None:
    alone, cluster = clusters
    with Api(alone.url, "tiny") as api:
        wanted = [api.complete(**request) for request in requests()]
    with Api(cluster.url, "tiny") as api:
        assert api.complete_all(requests()) == wanted
    for fields, answer in zip(requests(), wanted, strict=True):
        if "structured_outputs" in fields:
            schemas.check(answer, schemas.PERSON)
        else:
            assert len(answer.tokens) == NUM_TOKENS
    cluster.check_settled()

    placements = httpx.get(f"{cluster.url}/v1/cluster").json()["recent_placements"]
    pairs = Counter((placed["prefill"], placed["decode"]) for placed in placements)
    used = Counter[tuple[str, str]]()
    for name in ("prefill-auto", "prefill-zmq"):
        used += transfers(cluster, name)
    expected = Counter[tuple[str, str]]()
    for (prefill, decode), count in pairs.items():
        expected[LANES[allowed(prefill), allowed(decode)], "committed"] += count
    assert used == expected, json.dumps([f"{pair}: {count}" for pair, count in pairs.items()])
    assert set(used) == {("shm", "committed"), ("zmq", "committed")}
    nodes = httpx.get(f"{cluster.url}/v1/cluster").json()["nodes"]
    assert all(", int8, " in node["kv_description"] for node in nodes)
