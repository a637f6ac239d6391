"""The memory of a GPU, as Paddle's allocator counts it.

What the driver takes for itself is not counted, so a share of the GPU must leave room for it.
"""

from __future__ import annotations

from typing import Any

from common.kv.memory_plan import DeviceMemory
from engine.runner.memory_meter import SHARE_OF_ITS_OWN


class PaddleMeter:
    """A `memory_meter.MemoryMeter` of the current GPU. `cuda` is `paddle.device.cuda`."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def memory(self) -> DeviceMemory:
        total_bytes = int(self._cuda.get_device_properties().total_memory)
        return DeviceMemory(total_bytes, "the GPU's memory", SHARE_OF_ITS_OWN)

    def reset_peak(self) -> None:
        # Loading converts weights: without this, memory that only loading used would count.
        self._cuda.synchronize()
        self._cuda.empty_cache()
        self._cuda.reset_max_memory_reserved()

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        # Reserved, not allocated: memory that the allocator holds between tensors is gone as well.
        self._cuda.synchronize()
        return int(self._cuda.max_memory_reserved())
