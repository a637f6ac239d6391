"""The metrics that every process has, whatever its role: its version, certificate, memory, CPU
and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.files.keys_folder import Keys
from common.nodes import Role
from common.version import PROTOCOL_VERSION, VERSION


class BuildInfo(Collector):
    """A constant, whose labels say what runs."""

    def __init__(self, role: Callable[[], Role]) -> None:
        """Make it; `role` returns the present one."""
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Yield the one sample."""
        info = GaugeMetricFamily(
            "pdserve_build_info",
            "1; its labels: the version of pdserve, the role, the protocol of routers and nodes",
            labels=["version", "role", "protocol"],
        )
        info.add_metric([VERSION, self._role().value, str(PROTOCOL_VERSION)], 1)
        yield info


class CertificateEnd(Collector):
    """When the certificates end that the process and Redis show to others of the cluster."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        """Yield a sample of each certificate; none without keys."""
        end = GaugeMetricFamily(
            "pdserve_certificate_end_timestamp_seconds",
            "End of the certificate in the folder of --keys, in seconds since 1970; without keys "
            "there is no sample",
        )
        redis_end = GaugeMetricFamily(
            "pdserve_redis_certificate_end_timestamp_seconds",
            "End of the certificate that Redis showed last, in seconds since 1970; without --keys "
            "or without TLS to Redis there is no sample",
        )
        if self._keys is not None:
            end.add_metric([], self._keys.tls.expires_at_s)
            if self._keys.redis_expires_at_s is not None:
                redis_end.add_metric([], self._keys.redis_expires_at_s)
        yield end
        yield redis_end


def process_registry(role: Callable[[], Role], keys: Keys | None = None) -> CollectorRegistry:
    """Return a registry of what every process shows, to which a role adds its own metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BuildInfo(role))
    registry.register(CertificateEnd(keys))
    ProcessCollector(registry=registry)
    return registry
