"""The connectors' contract suite over real RDMA: pytest's `-p tests.rdma.contract_plugin`.

It adds the kind `rdma` and leaves the tests over other kinds to machines that need no devices.
Nodes of a test are on the two devices in turn. Engines are made once and used by test after test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

from common.kv_layout import KVLayout
from kv_transfer.lane import Lane
from kv_transfer.pieces import Pool
from kv_transfer.rdma.mooncake_engine import MooncakeEngine
from kv_transfer.rdma.rdma_lane import RdmaLane
from tests.contract.kv_connector.kinds import KINDS, ZmqKind

# As many blocks in a slab as the fake lane has.
MAX_SLABS = 3
DEVICES = os.environ["PDSERVE_RDMA_DEVICES"].split(",")
HOSTS = os.environ["PDSERVE_RDMA_HOSTS"].split(",")

_engines: list[MooncakeEngine] = []


def engine_of(number: int) -> MooncakeEngine:
    """The engine of the `number`th node of a test; neighbours are on different devices."""
    while len(_engines) <= number:
        at = len(_engines) % len(DEVICES)
        _engines.append(MooncakeEngine(HOSTS[at], DEVICES[at]))
    return _engines[number]


class RdmaKind(ZmqKind):
    """Frames over TCP, bytes by RDMA."""

    lane = "rdma"
    is_settled = False
    is_one_sided = True

    def __init__(self) -> None:
        super().__init__()
        self._num_nodes = 0

    def lanes(self, pool: Pool, layout: KVLayout) -> Sequence[Lane]:
        self._num_nodes += 1
        return [RdmaLane(pool, engine_of(self._num_nodes - 1), max_slabs=MAX_SLABS)]


KINDS["rdma"] = RdmaKind
settings.register_profile(
    "rdma",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rdma")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_over_rdma(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        return callspec is not None and callspec.params.get("cluster") == "rdma"

    rest = [item for item in items if "kv_connector" in item.nodeid and not is_over_rdma(item)]
    config.hook.pytest_deselected(items=rest)
    items[:] = [item for item in items if item not in rest]
