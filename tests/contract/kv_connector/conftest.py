"""Clusters over each connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kv.kinds import KINDS
from tests.support.kv.kv_cluster import Cluster, cluster_of


@pytest.fixture(params=list(KINDS))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = cluster_of(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def zmq_cluster() -> Iterator[Cluster]:
    cluster = cluster_of("zmq")
    yield cluster
    cluster.close()
