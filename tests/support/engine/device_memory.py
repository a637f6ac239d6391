"""Memory of a device, played by memory that the processor is not given to read.

What registers it (`FakeEngine`) gets to its bytes by their addresses, as a device's engine does.
"""

from __future__ import annotations

import mmap

import numpy as np

from kv_transfer.lanes.pool_memory import Bytes, FurtherAddresses, MemoryKind
from kv_transfer.lanes.rdma.aliases import Aliases


class DeviceMemory:
    """A `PoolMemory`. `content` is for the test alone."""

    kind = MemoryKind.DEVICE

    def __init__(self, num_bytes: int) -> None:
        self.content: Bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.address = self.content.ctypes.data
        self.num_bytes = num_bytes
        self.num_aliases = 0

    def aliases(self) -> FurtherAddresses:
        self.num_aliases += 1
        return Aliases(self.address, self.num_bytes)

    def bytes(self) -> Bytes:
        raise ValueError("this memory is on a device")
