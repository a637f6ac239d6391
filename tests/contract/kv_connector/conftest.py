"""Clusters over each connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.kv_connector.cluster import Cluster


@pytest.fixture(params=["loopback", "zmq"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def zmq_cluster() -> Iterator[Cluster]:
    cluster = Cluster("zmq")
    yield cluster
    cluster.close()
