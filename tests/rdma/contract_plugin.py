"""The connectors' contract suite over real RDMA: pytest's `-p tests.rdma.contract_plugin`.

It adds the kind `rdma` and leaves the tests over other kinds to machines that need no devices.
Nodes of a test are on the two devices in turn; engines are used by test after test.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.rdma.rdma_kind import RdmaKind
from tests.support.kv.kinds import KINDS

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
