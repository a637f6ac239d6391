"""Roles of real nodes follow the load: one of two routers with `--auto-roles` moves one node, every
answer is the usual one, and nothing moves that the load does not want."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

NUM_SEATS = 4
NUM_CLIENTS = 6
"""More than one decode node has seats for, and not more than two have."""
NUM_TURNS = 6
"""Readings of the leader, a quarter of a lease apart: more time than a change of a role waits."""


def spec(model: Path) -> ClusterSpec:
    """Targets that no machine misses: seats alone say how many nodes decode. The last prefill node
    stays, so one change is all that there can be, however late a report of a node comes."""
    patient = ("--auto-roles", "--target-ttft-s", "3600", "--target-tpot-s", "3600")
    return ClusterSpec(
        name="by_load",
        model=model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("prefill-2", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE),
        ),
        flags=(
            *(*SMALL_NODES, "--max-num-seqs", str(NUM_SEATS)),
            *("--local-prefill-threshold", "16"),
        ),
        routers=(patient,) * 2,
        can_be_slow=True,
    )


@pytest.fixture
def cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    with running([spec(tiny_model)], cluster_redis, cluster_folder) as (cluster,):
        yield cluster


def scaling(url: str) -> dict[str, Any]:
    """What a router answers; changes without their ages, so that two answers can be compared."""
    answer: dict[str, Any] = httpx.get(f"{url}/v1/scaling").json()
    for change in answer["changes"]:
        del change["age_s"]
    return answer


def roles(url: str) -> dict[str, int]:
    return {role: found["nodes"] for role, found in scaling(url)["roles"].items()}


def node_roles(url: str) -> dict[str, str]:
    nodes = httpx.get(f"{url}/v1/cluster").json()["nodes"]
    return {node["node_id"]: node["role"] for node in nodes}


def needs(url: str) -> list[float]:
    return [found["needed"] for found in scaling(url)["roles"].values()]


def metrics(url: str) -> dict[tuple[str, str], float]:
    """The values that go with `/v1/scaling`, by name and role."""
    text = httpx.get(f"{url}/metrics").text
    return {
        (one.name, one.labels.get("role", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name.startswith(("pdserve_scaling_", "pdserve_role_changes_total"))
    }


def check_agrees(cluster: Cluster) -> None:
    """Every router's metrics say what its answer does of what does not change with each reading,
    and both soon name the same leader: one that a machine holds up is replaced."""
    for number, url in enumerate(cluster.urls, 1):
        answer, values = scaling(url), metrics(url)
        for role, found in answer["roles"].items():
            assert values["pdserve_scaling_nodes", role] == found["nodes"]
        assert values["pdserve_scaling_leader", ""] == (answer["leader"] == f"router-{number}")
        for role in ("prefill", "decode"):
            changes = [one for one in answer["changes"] if one["role"] == role]
            assert values["pdserve_role_changes_total", role] == len(changes)
    wait_until(lambda: len(leaders(cluster)) == 1, "both routers name one leader")


def leaders(cluster: Cluster) -> set[str]:
    """Whom the routers name; nobody until all do."""
    named = [scaling(url)["leader"] for url in cluster.urls]
    return set(named) if all(named) else set()


def watch_turns(cluster: Cluster, check: Callable[[], None]) -> None:
    """Call `check` while the leader reads the nodes `NUM_TURNS` times: each renews its lease."""
    left_ms = [0]
    num_turns = [-1]  # the first value is no renewal
    with cluster.store.client() as client:

        def have_passed() -> bool:
            check()
            left = client.pttl(cluster.store.prefix(cluster.spec.name) + "leader")
            assert isinstance(left, int)
            num_turns[0] += left > left_ms[0]
            left_ms[0] = left
            return num_turns[0] >= NUM_TURNS

        wait_until(have_passed, f"{NUM_TURNS} readings of the leader", timeout_s=60.0)


def questions() -> list[Fields]:
    """Short prompts and long answers, greedy and sampled."""
    return [
        {
            "prompt": prompt_tokens(20 + 7 * i, salt=90 + i),
            "max_tokens": 300,
            "seed": i,
            "temperature": float(i % 2),
            "ignore_eos": True,
        }
        for i in range(NUM_CLIENTS)
    ]


@contextlib.contextmanager
def load(cluster: Cluster, fields: list[Fields]) -> Iterator[list[list[Answer | ApiFailure]]]:
    """Each client asks its question again and again; at the end, all that was answered."""
    is_over = threading.Event()
    answers: list[list[Answer | ApiFailure]] = [[] for _ in fields]

    def ask(i: int) -> None:
        with Api(cluster.urls[i % 2], "tiny") as client:
            while not is_over.is_set():
                answers[i] += client.complete_all([fields[i]])

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking = [threads.submit(ask, i) for i in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            is_over.set()
    for one in asking:
        one.result()


def test_one_node_gets_the_role_that_the_load_wants(cluster: Cluster) -> None:
    wait_until(lambda: len(leaders(cluster)) == 1, "both routers name one leader")

    def changes() -> list[dict[str, Any]]:
        return [change for url in cluster.urls for change in scaling(url)["changes"]]

    def has_seen(num_changes: int, **nodes: int) -> bool:
        """Both routers, whichever of them made the changes."""
        are_read = all(roles(url) == {"mixed": 0, **nodes} for url in cluster.urls)
        return are_read and len(changes()) == num_changes

    def stays(num_changes: int) -> None:
        """No node that a router knows has another role; a late one may be missing."""
        assert len(changes()) == num_changes
        assert all(node_roles(url).items() <= given.items() for url in cluster.urls)

    given = {node.node_id: node.role.value for node in cluster.spec.nodes}
    wait_until(lambda: has_seen(0, prefill=2, decode=1), "both have read every node")
    watch_turns(cluster, lambda: stays(0))
    assert not any(needs(cluster.url))
    check_agrees(cluster)
    fields = questions()
    with Api(cluster.url, "tiny") as api:
        wanted = [api.complete(**one) for one in fields]
    # Answers that wait for their steps take seats, and leave the cores to the routers.
    with load(cluster, fields) as answers, cluster.slow():
        wait_until(lambda: has_seen(1, prefill=1, decode=2), "a second decode node", timeout_s=90.0)
        (change,) = changes()
        assert (change["role_before"], change["role"]) == ("prefill", "decode")
        given[change["node_id"]] = "decode"
        watch_turns(cluster, lambda: stays(1))
        check_agrees(cluster)
    for i, got in enumerate(answers):
        assert got
        assert [one for one in got if one != wanted[i]] == []
    assert f"answers run or wait, a node has {NUM_SEATS} seats" in change["why"]

    wait_until(lambda: not any(needs(cluster.url)), "the load is over", timeout_s=60.0)
    watch_turns(cluster, lambda: stays(1))
    check_agrees(cluster)
    cluster.wait_ready()
    assert [node_roles(url) for url in cluster.urls] == [given] * 2
    cluster.check_settled()
