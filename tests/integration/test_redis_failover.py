"""The Redis that takes writes dies under a whole cluster: no client sees it, and new nodes join."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, Fields
from tests.support.cluster.cluster import START_TIMEOUT_S, Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_topologies import FailoverPair, redis_cluster, watched_redis

pytestmark = pytest.mark.endurance

NUM_CLIENTS = 4
NUM_MORE = 2
"""Requests of each client that begin after the failover."""
FAILOVER_S = 100.0
RENEWED_BY_S = 0.5
"""More than two readings of the same end of a lease differ by."""
NEWCOMER = "decode-2"


@contextmanager
def cluster_without_newcomer(
    pair: FailoverPair, name: str, model: Path, folder: Path
) -> Iterator[Cluster]:
    """A router, a prefill and a decode node that run, and a decode node that has yet to start."""
    decode = ("--local-prefill-threshold", "16")
    spec = ClusterSpec(
        name=name,
        model=model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, decode),
            NodeSpec(NEWCOMER, Role.DECODE, decode),
        ),
        flags=SMALL_NODES,
        can_be_slow=True,
    )
    cluster = Cluster(spec, pair, folder)
    try:
        for process in cluster.processes.values():
            if process.name != NEWCOMER:
                process.start()
        wait_until(lambda: has_begun(cluster), "two nodes serve", timeout_s=START_TIMEOUT_S)
        yield cluster
    finally:
        cluster.close()


def has_begun(cluster: Cluster) -> bool:
    for process in cluster.processes.values():
        if process.name != NEWCOMER:
            process.require_running()
    return len(cluster.chosen_nodes(cluster.url)) == 2


def fields(number: int) -> Fields:
    """A request that takes some seconds on slow nodes; half of them are handed over."""
    prompt = prompt_tokens(10 + 40 * (number % 2), salt=700 + number)
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def ask_on(url: str, number: int, is_over: threading.Event) -> list[Answer]:
    """Stream one answer after another, and some more when `is_over`."""
    answers: list[Answer] = []
    num_more = NUM_MORE
    with Api(url, "tiny") as api:
        while num_more:
            num_more -= is_over.is_set()
            with api.stream(logprobs=0, **fields(number)) as stream:
                answers.append(stream.read_rest())
    return answers


def survives_the_primary(pair: FailoverPair, name: str, model: Path, folder: Path) -> None:
    """Kill it under load: the answers stay, the records move, and a further node is found."""
    with cluster_without_newcomer(pair, name, model, folder) as cluster:
        with Api(cluster.url, "tiny") as api:
            right = [api.complete(**fields(number)) for number in range(NUM_CLIENTS)]
        is_over = threading.Event()
        with cluster.slow(), ThreadPoolExecutor(NUM_CLIENTS) as threads:
            asking = [
                threads.submit(ask_on, cluster.url, number, is_over)
                for number in range(NUM_CLIENTS)
            ]
            try:
                wait_until(lambda: placements(pair, name), "requests are recorded")
                assert pair.primary() is pair.main
                pair.main.kill()
                wait_until(
                    lambda: listed(cluster) == {"prefill-1", "decode-1"},
                    "the nodes are in the promoted server",
                    timeout_s=FAILOVER_S,
                )
                assert pair.primary() is pair.replica
                first_ends_s = lease_ends_s(pair, name)
                wait_until(
                    lambda: all(
                        lease_ends_s(pair, name).get(key, 0.0) > ends_s + RENEWED_BY_S
                        for key, ends_s in first_ends_s.items()
                    ),
                    "the nodes renew their leases there",
                )
                wait_until(lambda: placements(pair, name), "requests are recorded there")
                cluster.processes[NEWCOMER].start()
                cluster.wait_ready()
            finally:
                is_over.set()
            answers = [future.result(timeout=120.0) for future in asking]
        for number, of_client in enumerate(answers):
            assert of_client == [right[number]] * len(of_client)
            assert len(of_client) > NUM_MORE, "some were asked before the failover was over"
        cluster.check_settled()


def listed(cluster: Cluster) -> set[str]:
    return {node.record.node_id for node in cluster.live_nodes()}


def lease_ends_s(pair: FailoverPair, name: str) -> dict[str, float]:
    """When each lease ends, on this process's clock."""
    with pair.client() as client:
        keys = pair.keys(pair.prefix(name) + "node:")
        return {key: time.monotonic() + client.pttl(key) / 1000 for key in keys}


def placements(pair: FailoverPair, name: str) -> list[str]:
    return pair.keys(pair.prefix(name) + "placement:")


@pytest.mark.covers("F72")
def test_a_redis_behind_sentinels_fails_over_under_load(
    tiny_model: Path, cluster_folder: Path
) -> None:
    with watched_redis() as servers:
        survives_the_primary(servers.pair(), "sentinel", tiny_model, cluster_folder)


@pytest.mark.covers("F72")
def test_a_redis_cluster_fails_over_under_load(tiny_model: Path, cluster_folder: Path) -> None:
    with redis_cluster() as servers:
        survives_the_primary(
            servers.pair("redis_cluster"), "redis_cluster", tiny_model, cluster_folder
        )
