"""Clusters of real processes that several test files share.

They start when a test first asks for them and run to the end of the session; every test that uses
one ends with the check that nothing is held for any request, on any node or in Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.nodes import Role
from tests.cluster.api import Api
from tests.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.cluster.tiny_model import make_tiny_model
from tests.redis_server import RedisServer, redis_server

TINY_FLAGS = ("--block-size", "16", "--num-threads", "1", "--kv-cache-memory", "16MiB")


@pytest.fixture(scope="session")
def cluster_redis() -> Iterator[RedisServer]:
    """A Redis for clusters that no test empties or stops."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def cluster_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of clusters write their logs."""
    return tmp_path_factory.mktemp("clusters")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that loads in no time; its answers mean nothing."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def _shared_tiny_cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    spec = ClusterSpec(
        name="tiny",
        model=tiny_model,
        nodes=(
            # Short steps, so that a long prompt takes many of them.
            NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "32")),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
        ),
        flags=TINY_FLAGS,
        num_routers=2,
    )
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def tiny_cluster(_shared_tiny_cluster: Cluster) -> Iterator[Cluster]:
    """Two routers, a prefill node with steps of 32 tokens, a decode node that prefills nothing."""
    yield _shared_tiny_cluster
    _shared_tiny_cluster.check_settled()


@pytest.fixture
def tiny_api(tiny_cluster: Cluster) -> Iterator[Api]:
    """The first router of `tiny_cluster`."""
    with Api(tiny_cluster.url, "tiny") as api:
        yield api
