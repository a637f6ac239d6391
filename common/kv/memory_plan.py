"""How the memory of a node is divided: what its largest step takes, and the KV cache beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ConfigError

_FRACTION_DIGITS = 3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that a node computes in, in bytes, and what it is, for messages.

    `default_fraction` is the share that one node takes unless `memory_fraction` is set.
    """

    total_bytes: int
    name: str
    default_fraction: float

    def share_bytes(self, memory_fraction: float) -> int:
        """Return the share of one node; `memory_fraction` 0 means the default."""
        return int(self.total_bytes * (memory_fraction or self.default_fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a node, in bytes.

    `peak_bytes` is what the node takes without a KV cache while it computes its largest step, of
    `max_chunk_tokens` tokens: the process, the weights, and `step_buffer_bytes` of step buffers
    (0 where the framework allocates them). 0: not measured, because `kv_cache_memory` is set.
    Of them `shared_bytes` are a mapped file of weights, which all nodes of the machine have once.
    """

    max_chunk_tokens: int
    step_buffer_bytes: int
    peak_bytes: int
    kv_bytes: int
    shared_bytes: int = 0

    @property
    def description(self) -> str:
        """The plan in words, for a line of the log."""
        kv, buffers = _size(self.kv_bytes), _size(self.step_buffer_bytes)
        planned = f"beside at most {_size(self.peak_bytes)}" if self.peak_bytes else "as configured"
        shared = f"; {_size(self.shared_bytes)} of weights are shared" if self.shared_bytes else ""
        return (
            f"{kv} of KV cache, {planned}; steps of up to {self.max_chunk_tokens} tokens, "
            f"for which {buffers} of buffers are allocated{shared}"
        )


def kv_cache_bytes(
    memory: DeviceMemory,
    memory_fraction: float,
    *,
    peak_bytes: int,
    host_space: int,
    least_bytes: int,
    max_chunk_tokens: int,
) -> int:
    """Return what the node's share of `memory` leaves for the KV cache, in bytes.

    `peak_bytes` is as in `MemoryPlan`; `host_space` is the part of this memory that holds swapped
    blocks and prefixes. `memory_fraction` 0 means the default. Raises `ConfigError` when less than
    `least_bytes` is left.
    """
    share = memory.share_bytes(memory_fraction)
    left = share - peak_bytes - host_space
    if left >= least_bytes:
        return left
    taken = (
        f"the weights and the largest step of {max_chunk_tokens} tokens take {_size(peak_bytes)}"
    )
    if host_space:
        taken += f", and swap_space and prefix_host_memory {_size(host_space)}"
    needed = (peak_bytes + host_space + least_bytes) / memory.total_bytes
    raised = math.ceil(needed * 10**_FRACTION_DIGITS) / 10**_FRACTION_DIGITS
    wanted = f"wanted at least {raised}" if raised <= 1 else "wanted more memory"
    smaller = "a smaller max_num_batched_tokens or max_num_seqs"
    raise ConfigError(
        f"memory_fraction is {memory_fraction or memory.default_fraction:g}"
        f"{'' if memory_fraction else ' by default'}: "
        f"{_size(share)} of {memory.name}, {_size(memory.total_bytes)}; {taken}, and the smallest "
        f"KV cache {_size(least_bytes)}; {wanted}, {smaller}, or kv_cache_memory"
    )


def check_configured(memory: DeviceMemory, kv_bytes: int, host_space: int) -> None:
    """Raise `ConfigError` where a configured KV cache is larger than the whole of `memory`.

    `host_space` is as in `kv_cache_bytes`. What is less may be too much still, beside other
    processes: the system decides.
    """
    left = memory.total_bytes - host_space
    if kv_bytes <= left:
        return
    told = _size(kv_bytes)
    if host_space:
        told += f" beside {_size(host_space)} of swap_space and prefix_host_memory"
    raise ConfigError(
        f"kv_cache_memory is {told}: wanted less than {memory.name} has, "
        f"{_size(memory.total_bytes)}, or none, for a share of it"
    )


def _size(num_bytes: int) -> str:
    """Return a size with a unit in which it has at least one digit before the point."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
