"""A step's numbers on their way to the card: written into pinned memory, sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.runner.gpu.cuda_driver import Device

_ALIGNMENT = 16


class Staging:
    """Arrays of fixed shapes in one pinned allocation, and the same on the card.

    `staging[name]` is an array's address on the card. What is put is on the card when `send` was
    called and the stream has come there.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate int32 arrays of these shapes."""
        self._device = device
        ends = np.cumsum([-(-4 * int(np.prod(shape)) // _ALIGNMENT) for shape in shapes.values()])
        self.num_bytes = int(ends[-1]) * _ALIGNMENT
        self._on_card = device.allocate(self.num_bytes)
        self._pinned = device.allocate_pinned(self.num_bytes)
        raw = self._pinned.host_bytes().view(np.int32)
        self._offsets: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        start = 0
        for (name, shape), end in zip(shapes.items(), ends.tolist(), strict=True):
            self._offsets[name] = start
            count = int(np.prod(shape))
            self._arrays[name] = raw[start // 4 : start // 4 + count].reshape(shape)
            start = end * _ALIGNMENT
        self._is_sent = device.event()
        self._first, self._end = self.num_bytes, 0

    def __getitem__(self, name: str) -> int:
        return self._on_card.address + self._offsets[name]

    def wait(self) -> None:
        """Wait until the last copy has read the pinned memory; new values may be put then."""
        if self._end:
            self._is_sent.wait()
        self._first, self._end = self.num_bytes, 0

    def put(self, name: str, values: np.ndarray, padded: int = 0, padding: int = 0) -> None:
        """Write the first rows of an array, and those up to row `padded` as `padding`.

        Of an array `[rows, width]`, rows may be shorter; what is behind them keeps its values.
        """
        array, count = self._arrays[name], len(values)
        if array.ndim == 1:
            array[:count] = values
            array[count:padded] = padding
        else:
            array[:count, : values.shape[1]] = values
        start = self._offsets[name]
        size = array.strides[0] * max(count, padded)
        self._first, self._end = min(self._first, start), max(self._end, start + size)

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
