"""A node that sheds: what cannot be answered in time is refused with 429, and the rest is not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

TIMEOUT_S = 4


@pytest.fixture(scope="module")
def cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    """One seat, and four seconds for each request."""
    spec = ClusterSpec(
        name="shedding",
        model=tiny_model,
        nodes=(NodeSpec("mixed-1", Role.MIXED, ("--shed", "--max-num-seqs", "1")),),
        flags=("--block-size", "16", "--num-threads", "1"),
        routers=(("--request-timeout-s", str(TIMEOUT_S)),),
    )
    with running([spec], cluster_redis, cluster_folder) as (only,):
        yield only


def test_what_would_be_late_is_refused_with_429_and_a_time_to_come_back(cluster: Cluster) -> None:
    def ask(number: int) -> httpx.Response:
        body = {
            "model": "tiny",
            "prompt": prompt_tokens(20 + number % 7, salt=number),
            "max_tokens": 300,
            "ignore_eos": True,
        }
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)

    refused: list[httpx.Response] = []
    answered = 0
    with ThreadPoolExecutor(48) as threads:
        # The first ones find a queue that has not moved yet.
        for wave in range(10):
            for response in threads.map(ask, range(100 * wave, 100 * wave + 96)):
                answered += response.status_code == 200
                if response.status_code == 429:
                    refused.append(response)
            if refused:
                break
    assert answered
    assert refused, "nobody was refused"
    assert {response.json()["error"]["code"] for response in refused} == {"deadline_unreachable"}
    assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)
    cluster.check_settled()
    assert ask(999).status_code != 429, "an idle node refuses nobody"
