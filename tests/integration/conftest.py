"""Clusters of real processes that several test files share.

They start when a test first asks for them and run to the end of the session; every test that uses
one ends with the check that nothing is held for any request, on any node or in Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.keys.keys_init import init_keys
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, running
from tests.support.cluster.topologies import handoff_spec, keyed_spec
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
def _shared_tiny_cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    spec = handoff_spec("tiny", tiny_model)
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def tiny_cluster(_shared_tiny_cluster: Cluster) -> Iterator[Cluster]:
    """See `handoff_spec`; no test kills what it is made of."""
    yield _shared_tiny_cluster
    _shared_tiny_cluster.check_settled()


@pytest.fixture
def tiny_api(tiny_cluster: Cluster) -> Iterator[Api]:
    """The first router of `tiny_cluster`."""
    with Api(tiny_cluster.url, "tiny") as api:
        yield api


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


@pytest.fixture(scope="session")
def _shared_keyed_cluster(
    keyed_redis: RedisServer, cluster_folder: Path, tiny_model: Path, keys: Path
) -> Iterator[Cluster]:
    spec = keyed_spec("keyed", tiny_model, keys)
    with running([spec], keyed_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def keyed_cluster(_shared_keyed_cluster: Cluster) -> Iterator[Cluster]:
    """See `keyed_spec`; what a test restarts serves again at its end."""
    yield _shared_keyed_cluster
    _shared_keyed_cluster.check_settled()


@pytest.fixture
def keyed_api(keyed_cluster: Cluster) -> Iterator[Api]:
    """The router of `keyed_cluster`, with the client's key."""
    with Api(keyed_cluster.url, "tiny", keyed_cluster.headers) as api:
        yield api
