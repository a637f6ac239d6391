"""Roles of real nodes move under load: no request fails, and every answer is the usual one."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.processes import role_environment
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import prompt_tokens

NUM_MOVES = 50
NUM_CLIENTS = 6
ROLES = ("prefill", "decode", "mixed")
PATH = "/v1/cluster/role"


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ClusterSpec:
    """Two routers; `fixed` was started without room for prompts in its steps."""
    return ClusterSpec(
        name="roles",
        model=tiny_model,
        nodes=(
            NodeSpec("mixed-1", Role.MIXED),
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, ("--speculative-method", "ngram")),
            NodeSpec("fixed", Role.DECODE, ("--local-prefill-threshold", "0")),
        ),
        flags=(*SMALL_NODES, "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
        routers=(("--placement-policy", "round_robin"),) * 2,
    )


def give(api: Api, node_id: str, role: str) -> httpx.Response:
    return api.http.post(PATH, json={"node_id": node_id, "role": role})


def roles_at(url: str) -> dict[str, str]:
    nodes = httpx.get(f"{url}/v1/cluster").json()["nodes"]
    return {node["node_id"]: node["role"] for node in nodes}


def shows(url: str, node_id: str, role: str) -> bool:
    return roles_at(url)[node_id] == role


def has_reached(ended: list[int], number: int) -> bool:
    return len(ended) >= number


def refusals(cluster: Cluster) -> set[str]:
    """The codes with which nodes have refused calls."""
    found = set()
    for node in cluster.live_nodes():
        text = httpx.get(f"http://{node.record.metrics_address}/metrics").text
        for family in text_string_to_metric_families(text):
            if family.name == "pdserve_refusals":
                found |= {one.labels["reason"] for one in family.samples if one.value}
    return found


def questions() -> list[Fields]:
    """Prompts of several blocks, greedy and sampled; two routers get every second one."""
    return [
        {
            "prompt": prompt_tokens(20 + 17 * i, salt=80 + i),
            "max_tokens": 10,
            "seed": i,
            "temperature": float(i % 2),
            "ignore_eos": True,
        }
        for i in range(NUM_CLIENTS)
    ]


@pytest.mark.covers("F117")
def test_roles_move_fifty_times_under_load(cluster: Cluster, api: Api) -> None:
    fields = questions()
    wanted = [api.complete(**one) for one in fields]
    is_over, ended = threading.Event(), list[int]()

    def ask(i: int) -> list[Answer | ApiFailure]:
        answers: list[Answer | ApiFailure] = []
        with Api(cluster.urls[i % 2], "tiny") as client:
            while not is_over.is_set():
                answers += client.complete_all([fields[i]])
                ended.append(i)
        return answers

    rng = random.Random(0)
    epochs = {node.record.incarnation for node in cluster.live_nodes()}
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking = [threads.submit(ask, i) for i in range(NUM_CLIENTS)]
        try:
            for number in range(NUM_MOVES):
                node_id = rng.choice(["mixed-1", "prefill-1", "decode-1"])
                with Api(cluster.urls[number % 2], "tiny") as admin:
                    reply = give(admin, node_id, rng.choice(ROLES))
                assert reply.status_code == 200, reply.text
                enough = len(ended) + 2
                wait_until(partial(has_reached, ended, enough), "more answers")
        finally:
            is_over.set()
        for i, one in enumerate(asking):
            answers = one.result(timeout=100)
            assert [answer for answer in answers if answer != wanted[i]] == []
    cluster.check_settled()
    assert refusals(cluster) <= {"overloaded"}, "nothing is refused because of a role"
    assert {node.record.incarnation for node in cluster.live_nodes()} == epochs, "none restarted"


def test_every_router_learns_of_it_and_the_node_shows_it(cluster: Cluster, api: Api) -> None:
    for role in ("decode", "prefill"):
        reply = give(api, "prefill-1", role)
        assert reply.json()["role"] == role, reply.text
        assert roles_at(cluster.url)["prefill-1"] == role, "at once"
        wait_until(
            partial(shows, cluster.urls[1], "prefill-1", role), "the store tells other routers"
        )
        text = httpx.get(f"http://{cluster.record('prefill-1').metrics_address}/metrics").text
        assert f'role="{role}"' in text


def test_the_command(cluster: Cluster) -> None:
    def role(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdserve", "role", *words, "--url", cluster.url]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=role_environment(), check=False
        )

    role("prefill-1", "prefill")
    done = role("prefill-1", "mixed")
    assert done.stdout == (
        "prefill-1 takes new work as a mixed node; what it has as a prefill node it finishes\n"
    )
    assert role("prefill-1", "mixed").stdout == "prefill-1 is a mixed node already\n"
    for words, code, wanted in (
        (("nobody", "mixed"), 1, "there is no node 'nobody': the nodes are "),
        (("prefill-1", "router"), 2, "ROLE is 'router': wanted prefill, decode or mixed"),
        (("fixed", "prefill"), 1, "local_prefill_threshold = 0"),
    ):
        refused = role(*words)
        assert (refused.returncode, wanted in refused.stderr) == (code, True), refused.stderr
    assert roles_at(cluster.url)["fixed"] == "decode"


def test_no_prefill_node_is_left_and_never_no_node_that_decodes(cluster: Cluster, api: Api) -> None:
    fields = questions()[0]
    wanted = api.complete(**fields)
    for node_id in ("prefill-1", "decode-1", "mixed-1"):
        assert give(api, node_id, "decode").status_code == 200
    assert api.complete(**fields) == wanted, "prompts are computed where they are answered"
    for node_id in ("prefill-1", "decode-1", "mixed-1"):
        assert give(api, node_id, "prefill").status_code == 200
    assert give(api, "decode-1", "decode").status_code == 200
    assert api.http.post("/v1/cluster/drain", json={"node_id": "fixed"}).status_code == 200
    refused = give(api, "decode-1", "prefill")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_decode_node")
    assert api.complete(**fields) == wanted
    both = [("decode-1", "mixed"), ("mixed-1", "mixed"), ("prefill-1", "prefill")]
    assert [give(api, *one).status_code for one in both] == [200] * 3
    urls = zip(("decode-1", "mixed-1"), cluster.urls, strict=True)
    with ThreadPoolExecutor() as askers:
        asked = [
            askers.submit(
                httpx.post, url + PATH, json={"node_id": node_id, "role": "prefill"}, timeout=60
            )
            for node_id, url in urls
        ]
    assert sorted(one.result().status_code for one in asked) == [200, 409]
    assert api.complete(**fields) == wanted
