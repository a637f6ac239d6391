"""A real node that is frozen, busy or hung under streams: how long their clients wait."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from node.flow.step_progress import LEAST_LIMIT_S
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.cluster.slow_serve import HELD_S
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.cluster.watching import TICK_S, CoreQueue
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

pytestmark = pytest.mark.endurance

NUM_STREAMS = 4
SALTS = itertools.count(80)
FROZEN_GAP_S = 2.0
HUNG_GAP_S = 5.0
READING_S = 120.0
COMPUTING_S = 3.0
"""For the recomputation of four short contexts, beside what waits for a core."""


@pytest.fixture(scope="module", params=["clear", "keyed"])
def cluster(
    request: pytest.FixtureRequest, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    """Two nodes, whose connections to the router are in clear or TLS."""
    is_keyed = request.param == "keyed"
    redis: RedisServer = request.getfixturevalue("keyed_redis" if is_keyed else "cluster_redis")
    spec = ClusterSpec(
        name=f"frozen_{request.param}",
        model=tiny_model,
        keys=request.getfixturevalue("keys") if is_keyed else None,
        nodes=(NodeSpec("mixed-1", Role.MIXED), NodeSpec("mixed-2", Role.MIXED)),
        flags=SMALL_NODES,
        can_be_slow=True,
    )
    with running([spec], redis, cluster_folder) as (cluster,):
        yield cluster


class Reader:
    """Reads one answer and notes the longest time between two of its events."""

    def __init__(self, api: Api) -> None:
        self.fields: Fields = {
            # New to both nodes, so that what is cached does not send all streams to one.
            "prompt": prompt_tokens(40, salt=next(SALTS)),
            "max_tokens": 100,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._api = api
        self.num_events = 0
        self.longest_gap_s = 0.0
        self.gap_ended_s = 0.0

    def read(self) -> Answer:
        with self._api.stream(logprobs=0, **self.fields) as stream:
            stream.read_tokens(1)
            heard_at_s = time.monotonic()
            while stream.read_event() is not None:
                self.num_events += 1
                now_s = time.monotonic()
                if now_s - heard_at_s > self.longest_gap_s:
                    self.longest_gap_s, self.gap_ended_s = now_s - heard_at_s, now_s
                heard_at_s = now_s
            return stream.read_rest()


class Streams:
    """Answers that are being read while something happens to a node."""

    def __init__(self, cluster: Cluster, api: Api, threads: ThreadPoolExecutor) -> None:
        # Otherwise all of them may be placed on one node.
        cluster.wait_seen_idle()
        self._api = api
        pids = [process.pid for process in cluster.processes.values()]
        self._queue = CoreQueue(pids)
        self.readers = [Reader(api) for _ in range(NUM_STREAMS)]
        self._answers = [threads.submit(reader.read) for reader in self.readers]
        wait_until(self._are_all_under_way, "every stream has tokens")
        for node in cluster.spec.nodes:
            cluster.wait_status(node.node_id, lambda books: books.num_running > 0, "has streams")

    def _are_all_under_way(self) -> bool:
        return all(reader.num_events > 2 for reader in self.readers)

    def finish(self) -> tuple[float, float]:
        """Read every answer to its end; return the longest gap of them.

        The second is what is left of it without the time in which processes waited for a core.
        """
        ends_at_s = time.monotonic() + READING_S
        while wait(self._answers, timeout=TICK_S).not_done and time.monotonic() < ends_at_s:
            self._queue.sample()
        for answer in self._answers:
            answer.result(timeout=0)
        slowest = max(self.readers, key=lambda reader: reader.longest_gap_s)
        gap_s, ended_s = slowest.longest_gap_s, slowest.gap_ended_s
        return gap_s, gap_s - self._queue.queued_s(ended_s - gap_s, ended_s)

    def compare(self) -> None:
        """Every answer is that of an undisturbed cluster."""
        answers = [answer.result() for answer in self._answers]
        assert answers == [self._api.complete(**reader.fields) for reader in self.readers]


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    with Api(cluster.url, "tiny", cluster.headers) as api:
        yield api
    cluster.wait_ready()
    cluster.check_settled()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield pool


def num_suspected(cluster: Cluster) -> int:
    headers = {}
    if cluster.spec.keys:
        token = (cluster.spec.keys / "client/metrics.token").read_text()
        headers["authorization"] = f"Bearer {token}"
    text = httpx.get(f"{cluster.url}/metrics", headers=headers).text
    found = re.search(r"^pdserve_router_nodes_suspected_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return round(float(found[1]))


@pytest.mark.covers("F87")
def test_streams_of_a_frozen_node_go_on_within_two_seconds(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    before = num_suspected(cluster)
    with cluster.slow():
        streams = Streams(cluster, api, threads)
        cluster.processes["mixed-1"].freeze()
        try:
            longest_gap_s, own_gap_s = streams.finish()
        finally:
            cluster.processes["mixed-1"].thaw()
    assert num_suspected(cluster) > before
    streams.compare()
    assert longest_gap_s > 1.0
    assert own_gap_s < FROZEN_GAP_S + COMPUTING_S


def test_a_node_whose_python_stands_still_for_two_seconds_is_not_suspected(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    before = num_suspected(cluster)
    with cluster.slow():
        streams = Streams(cluster, api, threads)
        cluster.hold_lock("mixed-1")
        assert streams.finish()[0] > 0.8 * HELD_S
    streams.compare()
    assert num_suspected(cluster) == before


@pytest.mark.covers("F71")
def test_streams_of_a_hung_step_go_on_and_its_node_serves_again_when_the_step_ends(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    with cluster.slow():
        streams = Streams(cluster, api, threads)
        with cluster.hung("mixed-1"):
            longest_gap_s, own_gap_s = streams.finish()
    streams.compare()
    assert longest_gap_s > LEAST_LIMIT_S
    assert own_gap_s < HUNG_GAP_S + COMPUTING_S
    assert "a step has lasted" in cluster.processes["mixed-1"].log()
