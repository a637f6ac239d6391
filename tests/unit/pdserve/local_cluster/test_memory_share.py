"""The nodes of a local cluster share one machine's memory."""

from __future__ import annotations

import pytest

from common.config import Config, EngineConfig
from common.nodes import Role
from pdserve.configuration.flags import UP_MEMORY_FRACTION
from pdserve.local_cluster.cluster_plan import ClusterSize, plan_cluster


def shares(fraction: float, size: ClusterSize) -> list[float]:
    base = Config(role=Role.ROUTER, engine=EngineConfig(memory_fraction=fraction))
    planned = plan_cluster(base, size, "redis://127.0.0.1:1/0")
    nodes = [one.config for one in planned if one.config.role is not Role.ROUTER]
    return [node.engine.memory_fraction for node in nodes]


@pytest.mark.parametrize(
    ("fraction", "size", "wanted"),
    [
        (0.3, ClusterSize(prefill=1, decode=1, mixed=0), [0.15] * 2),
        (0.8, ClusterSize(prefill=2, decode=1, mixed=1), [0.2] * 4),
        (0.5, ClusterSize(prefill=0, decode=0, mixed=1), [0.5]),
        # Each node's own default would be of the whole machine.
        (0.0, ClusterSize(prefill=1, decode=1, mixed=0), [UP_MEMORY_FRACTION / 2] * 2),
    ],
)
def test_each_node_gets_an_equal_part(
    fraction: float, size: ClusterSize, wanted: list[float]
) -> None:
    assert shares(fraction, size) == wanted
