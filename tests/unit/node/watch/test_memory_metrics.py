"""A node shows its memory in the bytes that are stored."""

from __future__ import annotations

from common.kv.memory_plan import MemoryPlan
from node.watch.metrics import MemoryCollector


def shown(collector: MemoryCollector) -> dict[str, float]:
    (family,) = collector.collect()
    assert family.name == "pdserve_memory_bytes"
    return {sample.labels["part"]: sample.value for sample in family.samples}


def test_parts_of_a_plan() -> None:
    plan = MemoryPlan(
        max_chunk_tokens=8, step_buffer_bytes=30, peak_bytes=100, kv_bytes=7, shared_bytes=96
    )
    assert shown(MemoryCollector(plan, kv_bytes=7, swap_bytes=5)) == {
        "kv_cache": 7, "swapped_kv": 5, "step_buffers": 30, "shared_weights": 96,
    }  # fmt: skip


def test_without_a_plan() -> None:
    assert shown(MemoryCollector(None, kv_bytes=7, swap_bytes=0)) == {
        "kv_cache": 7, "swapped_kv": 0,
    }  # fmt: skip
