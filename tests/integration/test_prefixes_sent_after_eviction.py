"""A prefill node whose pool has evicted a prompt sends it to another one out of its host memory.

The decode node caches nothing. The reference is the answer that the first node has given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.clocks.patience import PATIENT
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

MODEL = "SmolLM2-135M-Instruct"
BLOCK_SIZE = 64
NUM_SHARED = 4 * BLOCK_SIZE
NO_CACHE = "--no-enable-prefix-caching"
MEMORY = ("--kv-cache-memory", "30MiB", "--prefix-host-memory", "90MiB", "--max-model-len", "512")
"""A pool of ten blocks in float32, and three times as many in host memory."""


@pytest.fixture(scope="module")
def cluster(cluster_redis: RedisServer, cluster_folder: Path) -> Iterator[Cluster]:
    spec = ClusterSpec(
        name="host_pulls",
        model=demo_model_folder(),
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL, MEMORY, {PATIENT: "yes"}),
            NodeSpec("prefill-2", Role.PREFILL, MEMORY, {PATIENT: "yes"}),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0", NO_CACHE)),
        ),
        routers=(("--placement-policy", "round_robin"),),
        has_patient_routers=True,
        flags=("--num-threads", "1"),
    )
    with running([spec], cluster_redis, cluster_folder) as started:
        yield started[0]


def complete(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int, str]:
    """The tokens of an answer, how many of its prompt were cached, and the node that had it."""
    cluster.wait_trusted()
    fields = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    with Api(cluster.url, MODEL) as api:
        body = {"model": MODEL, "return_token_ids": True, **fields}
        reply = api.http.post("/v1/completions", json=body).raise_for_status().json()
    latest = httpx.get(f"{cluster.url}/v1/cluster").json()["recent_placements"][0]
    node: str = latest["prefill"].partition("#")[0]
    num_cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["token_ids"], num_cached, node


def count(cluster: Cluster, node: str, name: str) -> int:
    """One sample of a node's metrics."""
    url = f"http://{cluster.record(node).metrics_address}/metrics"
    text = httpx.get(url).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


def other(number: int) -> list[int]:
    """A prompt of its own."""
    return [100 + (number * 37 + place * 11) % 5000 for place in range(NUM_SHARED)]


def test_what_a_pool_has_evicted_is_pulled_out_of_host_memory(cluster: Cluster) -> None:
    shared = [200 + place * 7 % 3000 for place in range(NUM_SHARED)]
    wanted, _, source = complete(cluster, [*shared, 5])
    complete(cluster, other(1))
    complete(cluster, [*shared, 5])  # used twice
    for number in range(2, 10):
        complete(cluster, other(number))
    sent = 'pdserve_prefix_blocks_sent_total{tier="host"}'
    assert count(cluster, source, sent) == 0
    found, num_cached, node = complete(cluster, [*shared, 5])
    assert node != source
    assert (found, num_cached) == (wanted, NUM_SHARED)
    wait_until(lambda: count(cluster, source, sent) > 0, "blocks of host memory were sent")
    cluster.check_settled()
