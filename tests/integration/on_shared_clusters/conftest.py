"""Clusters of real processes that the tests of this folder share.

They start when a test first asks for them, and end with the last test of the folder. Every test
that uses one ends with the check that nothing is held for any request, on any node or in Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, running
from tests.support.cluster.topologies import handoff_spec, keyed_spec
from tests.support.stores.redis_server import RedisServer


@pytest.fixture(scope="package")
def _shared_tiny_cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    spec = handoff_spec("tiny", tiny_model)
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def tiny_cluster(_shared_tiny_cluster: Cluster) -> Iterator[Cluster]:
    """See `handoff_spec`; no test kills what it is made of."""
    _shared_tiny_cluster.wait_trusted()
    yield _shared_tiny_cluster
    _shared_tiny_cluster.check_settled()


@pytest.fixture
def tiny_api(tiny_cluster: Cluster) -> Iterator[Api]:
    """The first router of `tiny_cluster`."""
    with Api(tiny_cluster.url, "tiny") as api:
        yield api


@pytest.fixture(scope="package")
def _shared_keyed_cluster(
    keyed_redis: RedisServer, cluster_folder: Path, tiny_model: Path, keys: Path
) -> Iterator[Cluster]:
    spec = keyed_spec("keyed", tiny_model, keys)
    with running([spec], keyed_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def keyed_cluster(_shared_keyed_cluster: Cluster) -> Iterator[Cluster]:
    """See `keyed_spec`; what a test restarts serves again at its end."""
    _shared_keyed_cluster.wait_trusted()
    yield _shared_keyed_cluster
    _shared_keyed_cluster.check_settled()


@pytest.fixture
def keyed_api(keyed_cluster: Cluster) -> Iterator[Api]:
    """The router of `keyed_cluster`, with the client's key."""
    with Api(keyed_cluster.url, "tiny", keyed_cluster.headers) as api:
        yield api
