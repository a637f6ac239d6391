"""Turns of a conversation on changing prefill nodes, which take from each other what they lack.

The decode node caches nothing, so another prefill node is the only one that has it. Shared memory
is the only lane. The reference is a mixed node alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel
from tests.support.clocks.patience import PATIENT
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

PROSE_PATH = Path(__file__).parents[2] / "LICENSE"
BLOCK_SIZE = 64
NUM_ANSWERED = 6
NUM_SAID = 110
"""Tokens of a turn: so many of the demo model take longer to compute than to pull."""
WAYS: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 20240607},
}
MODEL = "SmolLM2-135M-Instruct"
FLAGS = ("--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--num-threads", "1")
NO_CACHE = "--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def clusters(cluster_redis: RedisServer, cluster_folder: Path) -> Iterator[dict[str, Cluster]]:
    model = demo_model_folder()
    alone = ClusterSpec(
        name="reference", model=model, nodes=(NodeSpec("mixed-1", Role.MIXED),), flags=FLAGS
    )
    pulls = ClusterSpec(
        name="pulls",
        model=model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL, environ={PATIENT: "yes"}),
            NodeSpec("prefill-2", Role.PREFILL, environ={PATIENT: "yes"}),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0", NO_CACHE)),
        ),
        routers=(("--placement-policy", "round_robin"),),
        has_patient_routers=True,
        flags=(*FLAGS, "--kv-transport", "shm"),
    )
    with running([alone, pulls], cluster_redis, cluster_folder) as started:
        yield {cluster.spec.name: cluster for cluster in started}


@pytest.fixture(autouse=True)
def _settled(clusters: dict[str, Cluster]) -> Iterator[None]:
    for cluster in clusters.values():
        cluster.wait_trusted()
    yield
    for cluster in clusters.values():
        cluster.check_settled()


def words(way: str) -> list[int]:
    text_model = TextModel.load(demo_model_folder(), MODEL, 0)
    prose = text_model.encode(PROSE_PATH.read_text(), add_special_tokens=False, param="prompt")
    return list(prose)[700 * list(WAYS).index(way) :]


def known_blocks(cluster: Cluster) -> int:
    """How many blocks of all nodes the router knows."""
    text = httpx.get(f"{cluster.url}/metrics").text
    found = re.search(r"^pdserve_router_known_blocks (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def complete(cluster: Cluster, prompt: list[int], way: str) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were found in a cache."""
    fields = {"prompt": prompt, "max_tokens": NUM_ANSWERED, "ignore_eos": True, **WAYS[way]}
    with Api(cluster.url, MODEL) as api:
        body = {"model": MODEL, "return_token_ids": True, **fields}
        reply = api.http.post("/v1/completions", json=body).raise_for_status().json()
    details: dict[str, Any] = reply["usage"]["prompt_tokens_details"]
    return reply["choices"][0]["token_ids"], details["cached_tokens"]


def last_prefill(cluster: Cluster) -> str:
    """The node of the latest placement, without its epoch."""
    latest = httpx.get(f"{cluster.url}/v1/cluster").json()["recent_placements"][0]
    name: str = latest["prefill"].partition("#")[0]
    return name


def test_each_turn_pulls_from_the_prefill_node_of_the_one_before(
    clusters: dict[str, Cluster],
) -> None:
    alone, pulls = clusters["reference"], clusters["pulls"]
    said, history, nodes = words("sampled"), [], []
    before = known_blocks(pulls)
    for turn in range(3):
        history += said[NUM_SAID * turn :][:NUM_SAID]
        wanted, _ = complete(alone, history, "sampled")
        found, num_cached = complete(pulls, history, "sampled")
        assert found == wanted
        nodes.append(last_prefill(pulls))
        num_before = len(history) - NUM_SAID - (NUM_ANSWERED if turn else 0)
        assert num_cached == num_before // BLOCK_SIZE * BLOCK_SIZE
        num_blocks = len(history) // BLOCK_SIZE
        wait_until(lambda: known_blocks(pulls) >= before + num_blocks, "its blocks are known")  # noqa: B023
        history += found
    assert nodes[0] != nodes[1] != nodes[2]


def test_what_a_node_had_that_was_drained_is_found_on_the_other_one(
    clusters: dict[str, Cluster],
) -> None:
    alone, pulls = clusters["reference"], clusters["pulls"]
    history = list(reversed(words("sampled")))[1000:1270]
    complete(pulls, history, "sampled")
    leaving = last_prefill(pulls)
    with Api(pulls.url, MODEL) as api:
        reply = api.http.post("/v1/cluster/drain", json={"node_id": leaving})
        assert reply.status_code == 200, reply.text
    wait_until(lambda: not pulls.processes[leaving].is_running, f"{leaving} has left")
    wanted, _ = complete(alone, history, "sampled")
    found, num_cached = complete(pulls, history, "sampled")
    assert found == wanted
    assert num_cached == len(history) // BLOCK_SIZE * BLOCK_SIZE
    pulls.mend()


def test_a_source_that_is_killed_and_comes_back_under_its_name(
    clusters: dict[str, Cluster],
) -> None:
    alone, pulls = clusters["reference"], clusters["pulls"]
    history = list(reversed(words("greedy")))[:200]
    complete(pulls, history, "greedy")
    source = last_prefill(pulls)
    pulls.processes[source].kill()
    wanted, _ = complete(alone, history, "greedy")
    found, num_cached = complete(pulls, history, "greedy")
    assert (found, num_cached) == (wanted, 0), "nobody has it any more: it was computed"
    pulls.mend()
    asked = 0
    while last_prefill(pulls) != source:
        found, num_cached = complete(pulls, history, "greedy")
        assert found == wanted
        asked += 1
        assert asked < 4
    assert num_cached == len(history) // BLOCK_SIZE * BLOCK_SIZE, "it has pulled from the other one"


def test_a_pull_is_a_link_between_its_nodes_with_the_bytes_that_moved(
    clusters: dict[str, Cluster],
) -> None:
    """The live page draws its arrows from these."""
    pulls = clusters["pulls"]
    history = words("greedy")[1500:][:200]
    before = known_blocks(pulls)
    complete(pulls, history, "greedy")
    num_blocks = len(history) // BLOCK_SIZE
    wait_until(lambda: known_blocks(pulls) >= before + num_blocks, "its blocks are known")
    _, num_cached = complete(pulls, [*history, 5, 6, 7], "greedy")
    assert num_cached == num_blocks * BLOCK_SIZE

    def links() -> list[tuple[str, str, str]]:
        nodes = httpx.get(f"{pulls.url}/v1/cluster").json()["nodes"]
        found = [(node["node_id"], link) for node in nodes for link in node["kv_links"]]
        return [
            (name, link["decode"], link["transport"]) for name, link in found if link["num_bytes"]
        ]

    between = {("prefill-1", "prefill-2", "shm"), ("prefill-2", "prefill-1", "shm")}
    wait_until(lambda: between.intersection(links()), "a prefill node sent KV to the other one")
