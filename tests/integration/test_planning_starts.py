"""Planning processes that start beside streams, many times: no request of anybody fails."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, running
from tests.support.cluster.topologies import handoff_spec
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(1200)]

NUM_STARTS = 200
NUM_ROUTERS = 50
NUM_STREAMS = 6
STREAM: Fields = {"prompt": prompt_tokens(60, salt=71), "max_tokens": 60, "temperature": 0}
numbers = itertools.count()


@pytest.fixture
def own_cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    """Killing its processes hurts no other test."""
    spec = handoff_spec("planning_starts", tiny_model)
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster
        cluster.check_settled(timeout_s=60)  # placements of killed routers last a while


@contextmanager
def streams(cluster: Cluster) -> Iterator[None]:
    """Streams of the first router go on meanwhile, and each has the same tokens."""
    stop = threading.Event()

    def read() -> set[str]:
        texts = set()
        with Api(cluster.url, "tiny") as api:
            while not stop.is_set():
                with api.stream(**STREAM) as stream:
                    texts.add(stream.read_rest().text)
        return texts

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(read) for _ in range(NUM_STREAMS)]
        try:
            yield
        finally:
            stop.set()
        assert len(set.union(*(one.result() for one in reading))) == 1


def ask_with_new_schema(api: Api) -> None:
    name = f"p{next(numbers)}"
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    answer = api.complete("Hi", guided_json=schema, max_tokens=4, temperature=0)
    assert answer.text.startswith('{"'), answer


def test_a_planning_process_starts_beside_streams(own_cluster: Cluster) -> None:
    (router, *_) = (p for p in own_cluster.processes.values() if p.name.startswith("router"))
    with Api(own_cluster.url, "tiny") as api, streams(own_cluster):
        for _ in range(NUM_STARTS):
            ask_with_new_schema(api)
            for child in router.children():
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(child, signal.SIGKILL)


def test_a_fresh_router_is_asked_for_a_schema_first(own_cluster: Cluster) -> None:
    router = own_cluster.processes["router-1"]
    for _ in range(NUM_ROUTERS):
        router.kill()
        own_cluster.mend()
        assert not router.children()
        with Api(own_cluster.url, "tiny") as api, ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(ask_with_new_schema, api) for _ in range(4)]:
                one.result()
