"""What clusters of real processes need: Redis, models, keys, a folder for their logs.

A module whose fixture `spec` describes a cluster gets it as `cluster`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.keys.keys_init import init_keys
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, running
from tests.support.models.tiny_model import make_tiny_model
from tests.support.stores.redis_server import RedisServer, redis_server


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
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys; tests that change it put back what they found."""
    folder = tmp_path_factory.mktemp("keys") / "cluster"
    init_keys(folder, datetime.now(UTC), days=7)
    return folder


@pytest.fixture(scope="session")
def keyed_redis(keys: Path) -> Iterator[RedisServer]:
    """A Redis with the users of `keys`."""
    with redis_server(keys=keys) as server:
        yield server


@pytest.fixture(scope="module")
def _own_cluster(
    spec: ClusterSpec, cluster_redis: RedisServer, cluster_folder: Path
) -> Iterator[Cluster]:
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def cluster(_own_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster of the module's `spec`: it serves when a test begins, and holds nothing at its
    end."""
    _own_cluster.mend()
    yield _own_cluster
    _own_cluster.mend()
    _own_cluster.check_settled()


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    """The first router of `cluster`."""
    with Api(cluster.url, "tiny") as api:
        yield api
