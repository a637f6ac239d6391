"""A new node warms itself with what the other one has cached, and answers with it.

Two mixed nodes share the prompts of a cluster; a third one alone is the reference. The new node is
the second one in its next life.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

BLOCK_SIZE = 64
NUM_PROMPT = 600
NUM_WHOLE = (NUM_PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE
FLAGS = ("--kv-cache-memory", "16MiB", "--num-threads", "1", "--max-num-batched-tokens", "256")
FETCHED = "pdserve_prefix_fetched_tokens_total"


@pytest.fixture(scope="module")
def cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    spec = ClusterSpec(
        name="warming",
        model=tiny_model,
        nodes=(
            NodeSpec("mixed-1", Role.MIXED),
            NodeSpec("mixed-2", Role.MIXED, ("--warm-from", "auto")),
            NodeSpec("other-layout", Role.MIXED, ("--warm-from", "mixed-1", "--block-size", "32")),
        ),
        flags=FLAGS,
    )
    with running([spec], cluster_redis, cluster_folder) as (started,):
        yield started


@pytest.fixture(autouse=True)
def _settled(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.mend()
    cluster.check_settled()


def num_fetched(cluster: Cluster, node_id: str) -> int:
    """How many tokens a node has fetched in its present life; 0 until it answers."""
    records = {node.record.node_id: node.record for node in cluster.live_nodes()}
    if node_id not in records:
        return 0
    try:
        text = httpx.get(f"http://{records[node_id].metrics_address}/metrics").text
    except httpx.TransportError:
        return 0
    found = re.search(rf"^{FETCHED} (\S+)$", text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def start(cluster: Cluster, *node_ids: str) -> None:
    for node_id in node_ids:
        cluster.processes[node_id].start()
    wait_until(
        lambda: cluster.chosen_nodes(cluster.url).keys() >= set(node_ids),
        f"the router can choose {node_ids}",
        timeout_s=200.0,
    )


def complete(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were found in a cache."""
    body = {"model": "tiny", "return_token_ids": True, "prompt": prompt, "max_tokens": 8}
    with Api(cluster.url, "tiny") as api:
        whole = {**body, "temperature": 0, "ignore_eos": True}
        reply = api.http.post("/v1/completions", json=whole).raise_for_status().json()
    details: dict[str, Any] = reply["usage"]["prompt_tokens_details"]
    return reply["choices"][0]["token_ids"], details["cached_tokens"]


def fill(cluster: Cluster, prompt: list[int]) -> list[int]:
    """Have a prompt cached by the first node, as the router knows; return the answer's tokens.

    A node that starts is warmed by one of which a heartbeat has told that it has cached blocks.
    """
    found, _ = complete(cluster, prompt)

    def is_told() -> bool:
        nodes = httpx.get(f"{cluster.url}/v1/cluster", timeout=60.0).json()["nodes"]
        return any(
            node["node_id"] == "mixed-1" and node["num_cached_blocks"] >= NUM_WHOLE // BLOCK_SIZE
            for node in nodes
        )

    wait_until(is_told, "a heartbeat tells what mixed-1 has cached")
    return found


def kill(cluster: Cluster, *node_ids: str) -> None:
    for node_id in node_ids:
        cluster.processes[node_id].kill()
    wait_until(
        lambda: not cluster.chosen_nodes(cluster.url).keys() & set(node_ids),
        f"the router knows that {node_ids} are gone",
    )


def test_a_new_node_answers_with_what_it_has_not_computed(cluster: Cluster) -> None:
    prompt = prompt_tokens(NUM_PROMPT, salt=95)
    kill(cluster, "mixed-2", "other-layout")
    wanted = fill(cluster, prompt)
    start(cluster, "mixed-2", "other-layout")
    wait_until(lambda: num_fetched(cluster, "mixed-2") >= NUM_WHOLE, "it is warm")
    (router,) = (one for name, one in cluster.processes.items() if "router" in name)
    life = f"other-layout#{cluster.chosen_nodes(cluster.url)['other-layout']}"
    cold = f"{life} starts cold: warm_from is 'mixed-1', and no such node can send it"
    wait_until(lambda: cold in router.log(), "it is refused")
    assert num_fetched(cluster, "other-layout") == 0
    kill(cluster, "mixed-1", "other-layout")
    found, num_cached = complete(cluster, prompt)
    assert (found, num_cached) == (wanted, NUM_WHOLE)


def test_a_source_that_is_killed_meanwhile_costs_nothing_but_its_blocks(cluster: Cluster) -> None:
    prompt = prompt_tokens(NUM_PROMPT, salt=96)
    kill(cluster, "mixed-2", "other-layout")
    wanted = fill(cluster, prompt)
    start(cluster, "mixed-2")
    kill(cluster, "mixed-1")
    found, num_cached = complete(cluster, prompt)
    assert found == wanted
    assert num_cached <= num_fetched(cluster, "mixed-2")
