"""The part of a node's memory that its KV cache gets, and what is said when there is none."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.kv.memory_plan import DeviceMemory, MemoryPlan, kv_cache_bytes

GIB = 1 << 30
HOST = DeviceMemory(16 * GIB, "the memory of this machine", 0.3)


def left(fraction: float, peak_bytes: int = GIB, host_space: int = 0, least: int = 4096) -> int:
    return kv_cache_bytes(
        HOST,
        fraction,
        peak_bytes=peak_bytes,
        host_space=host_space,
        least_bytes=least,
        max_chunk_tokens=512,
    )


def test_the_cache_gets_what_the_largest_step_and_swapped_blocks_leave() -> None:
    assert left(0.5) == 7 * GIB
    assert left(0.5, host_space=2 * GIB) == 5 * GIB
    assert left(1.0, peak_bytes=0) == 16 * GIB


def test_without_a_fraction_it_is_that_of_the_device() -> None:
    assert left(0.0) == int(16 * GIB * 0.3) - GIB
    assert left(0.3) == left(0.0)


def test_exactly_the_least_is_enough() -> None:
    assert left(0.5, least=7 * GIB) == 7 * GIB
    with pytest.raises(ConfigError):
        left(0.5, least=7 * GIB + 1)


def test_too_little_memory_is_told_with_the_numbers_and_what_to_set() -> None:
    with pytest.raises(ConfigError) as caught:
        left(0.05, host_space=GIB // 4, least=3 << 20)
    assert str(caught.value) == (
        "memory_fraction is 0.05: 819.2 MiB of the memory of this machine, 16.00 GiB; the weights "
        "and the largest step of 512 tokens take 1.00 GiB, and swap_space and prefix_host_memory "
        "256.0 MiB, and the smallest KV cache 3.0 MiB; wanted at least 0.079, a smaller "
        "max_num_batched_tokens or max_num_seqs, or kv_cache_memory"
    )
    assert left(0.079, host_space=GIB // 4, least=3 << 20) >= 3 << 20


def test_more_than_all_memory_cannot_be_set() -> None:
    with pytest.raises(
        ConfigError, match=r"is 0\.3 by default: 4\.80 GiB .* wanted more memory, a"
    ):
        left(0.0, peak_bytes=17 * GIB)


def test_a_plan_in_words() -> None:
    plan = MemoryPlan(
        max_chunk_tokens=192, step_buffer_bytes=12 << 20, peak_bytes=GIB, kv_bytes=3 * GIB
    )
    assert plan.description == (
        "3.00 GiB of KV cache, beside at most 1.00 GiB; steps of up to 192 tokens, for which "
        "12.0 MiB of buffers are allocated"
    )
    given = MemoryPlan(max_chunk_tokens=1, step_buffer_bytes=0, peak_bytes=0, kv_bytes=GIB)
    assert given.description.startswith("1.00 GiB of KV cache, as configured; steps")
