"""What a node's memory is for, as Prometheus samples in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.kv.memory_plan import MemoryPlan
from node.watch.metric_families import gauges


class MemoryCollector(Collector):
    """Shows the parts of a `MemoryPlan`, which do not change; without one the KV cache alone."""

    def __init__(self, plan: MemoryPlan | None, *, kv_bytes: int, swap_bytes: int) -> None:
        self._parts = {"kv_cache": kv_bytes, "swapped_kv": swap_bytes}
        if plan is not None:
            self._parts["step_buffers"] = plan.step_buffer_bytes
            self._parts["shared_weights"] = plan.shared_bytes

    def collect(self) -> Iterable[Metric]:
        """Yield one gauge."""
        yield gauges(
            "memory_bytes",
            "Bytes as they are stored: the KV cache, host memory for swapped blocks and prefixes, "
            "buffers of a step, and the packed weights, of which all nodes of a machine map one "
            "copy",
            "part",
            self._parts,
        )
