"""The metrics that every process has, whatever its role: its version, memory, CPU and files."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.nodes import Role
from common.version import PROTOCOL_VERSION, VERSION


class BuildInfo(Collector):
    """A constant, whose labels say what runs."""

    def __init__(self, role: Role) -> None:
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Yield the one sample."""
        info = GaugeMetricFamily(
            "pdserve_build_info",
            "1; its labels: the version of pdserve, the role, the protocol of routers and nodes",
            labels=["version", "role", "protocol"],
        )
        info.add_metric([VERSION, self._role.value, str(PROTOCOL_VERSION)], 1)
        yield info


def process_registry(role: Role) -> CollectorRegistry:
    """Return a registry of what every process shows, to which a role adds its own metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BuildInfo(role))
    ProcessCollector(registry=registry)
    return registry
