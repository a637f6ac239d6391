"""A step's numbers on their way to the card: written into pinned memory, sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.runner.gpu.cuda_driver import Device

_ALIGNMENT = 16


class Staging:
    """Arrays of fixed sizes in one pinned allocation, and the same on the card.

    `staging[name]` is an array's address on the card. What is put is on the card when `send` was
    called and the stream has come there.
    """

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        """Allocate room for `sizes` bytes of each array."""
        self._device = device
        self._offsets: dict[str, int] = {}
        end = 0
        for name, num_bytes in sizes.items():
            self._offsets[name] = end
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end
        self._on_card, self._pinned = device.allocate(end), device.allocate_pinned(end)
        self._bytes = self._pinned.host_bytes()
        self._is_sent = device.event()
        self._first, self._end = end, 0

    def __getitem__(self, name: str) -> int:
        return self._on_card.address + self._offsets[name]

    def wait(self) -> None:
        """Wait until the last copy has read the pinned memory; new values may be put then."""
        if self._end:
            self._is_sent.wait()
        self._first, self._end = self.num_bytes, 0

    def put(self, name: str, values: np.ndarray) -> None:
        """Write the beginning of an array; what lies behind it keeps its values."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        start = self._offsets[name]
        self._bytes[start : start + len(raw)] = raw
        self._first, self._end = min(self._first, start), max(self._end, start + len(raw))

    def send(self, stream: int) -> None:
        """Queue the copy of all that was put, and of what lies between."""
        if self._end > self._first:
            first, size = self._first, self._end - self._first
            self._device.copy(
                self._on_card.address + first, self._pinned.address + first, size, stream
            )
        self._is_sent.record(stream)

    def close(self) -> None:
        """Free both memories."""
        self._is_sent.close()
        self._on_card.close()
        self._pinned.close()
