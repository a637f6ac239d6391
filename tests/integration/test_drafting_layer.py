"""The demo model in a cluster that drafts with a layer of it, whose keys and values travel too.

A prefill node hands over to two decode nodes, over shared memory and over ZMQ. The reference is one
node that computes everything itself and drafts nothing. That the layer's bytes are handed over is
shown in `test_layer_hook`: here a wrong draft would only be refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(400)]

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "Once upon a time there was a small village near a river, and in this village " * 5,
    "Water boils at one hundred degrees. " * 30 + "Water",
)
DRAFTING = ("--speculative-method", "mtp", "--num-speculative-tokens", "3")


def specs() -> list[ClusterSpec]:
    model = demo_model_folder()
    flags = (
        *("--block-size", "32", "--num-threads", "1", "--kv-cache-memory", "64MiB"),
        *("--kv-cache-dtype", "int8", "--local-prefill-threshold", "0"),
    )
    alone = NodeSpec("alone", Role.MIXED, ("--no-enable-prefix-caching",))
    # Less than the longer prompts: they are pushed in chunks.
    nodes = (
        NodeSpec("prefill", Role.PREFILL, (*DRAFTING, "--max-num-batched-tokens", "64")),
        NodeSpec("decode-shm", Role.DECODE, (*DRAFTING, "--kv-transport", "auto")),
        NodeSpec("decode-zmq", Role.DECODE, (*DRAFTING, "--kv-transport", "zmq")),
    )
    return [
        ClusterSpec(name="plain", model=model, nodes=(alone,), flags=flags),
        ClusterSpec(name="drafting", model=model, nodes=nodes, flags=flags),
    ]


@pytest.fixture
def clusters(cluster_redis: RedisServer, cluster_folder: Path) -> Iterator[list[Cluster]]:
    with running(specs(), cluster_redis, cluster_folder) as started:
        yield started


def requests() -> list[Fields]:
    """Greedy and sampled, each twice, so that each decode node has some of both."""
    ways: tuple[Fields, ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 5})
    return [
        {"prompt": f"{number}. {prompt}", "max_tokens": 40, "ignore_eos": True, **way}
        for number in range(2)
        for prompt in PROMPTS
        for way in ways
    ]


def counted(cluster: Cluster, node_id: str, pattern: str) -> float:
    """The sum of a node's metrics whose line begins with a pattern."""
    nodes = httpx.get(f"{cluster.url}/v1/cluster").json()["nodes"]
    (address,) = [n["metrics_address"] for n in nodes if n["node_id"] == node_id]
    text = httpx.get(f"http://{address}/metrics").text
    return sum(map(float, re.findall(rf"^{pattern}\S* (\S+)$", text, re.MULTILINE)))


def test_a_handoff_with_the_drafting_layer_changes_no_answer(clusters: list[Cluster]) -> None:
    plain, drafting = clusters
    with Api(plain.url, plain.spec.model.name) as api:
        wanted = [api.complete(**request) for request in requests()]
    with Api(drafting.url, drafting.spec.model.name) as api:
        assert api.complete_all(requests()) == wanted
    drafting.check_settled()
    for transport in ("shm", "zmq"):
        committed = f'pdserve_kv_transfers_total{{.*outcome="committed".*transport="{transport}"'
        assert counted(drafting, "prefill", committed) > 0
        node = f"decode-{transport}"
        assert counted(drafting, node, 'pdserve_accepted_tokens_total{method="mtp"') > 0
