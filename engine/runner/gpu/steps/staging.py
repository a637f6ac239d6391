"""A step's numbers for the card: written into pinned memory, and sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.runner.gpu.cuda_driver import Device

_ALIGNMENT = 16


class Staging:
    """Arrays of fixed shapes, in two pinned buffers on the host and once on the card.

    `staging[name]` is an array's address on the card. Values that were put are on the card for work
    that is queued after `send`. Each `wait` switches to the other pinned buffer: the next values
    are written while the copy of the last ones waits for the step before.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate int32 arrays of these shapes."""
        self._device = device
        ends = np.cumsum([-(-4 * int(np.prod(shape)) // _ALIGNMENT) for shape in shapes.values()])
        self._num_bytes = int(ends[-1]) * _ALIGNMENT
        self._on_card = device.allocate(self._num_bytes)
        starts = [0, *(ends[:-1] * _ALIGNMENT).tolist()]
        self._offsets = dict(zip(shapes, starts, strict=True))
        self._sides = [_Side(device, self._num_bytes, shapes, self._offsets) for _ in range(2)]
        self._side = self._sides[0]
        self._first, self._end = self._num_bytes, 0

    def __getitem__(self, name: str) -> int:
        return self._on_card.address + self._offsets[name]

    def wait(self) -> None:
        """Wait until the copy before the last has read its buffer, to which `put` writes then."""
        self._sides.reverse()
        self._side = self._sides[0]
        if self._side.is_sent:
            self._side.sent.wait()
        self._first, self._end = self._num_bytes, 0

    def put(self, name: str, values: np.ndarray, padded: int = 0, padding: int = 0) -> None:
        """Write the first rows of an array, and those up to row `padded` as `padding`.

        Rows may be shorter than the array's `[rows, width]`; the rest of each keeps its values.
        """
        array, count = self._side.arrays[name], len(values)
        if array.ndim == 1:
            array[:count] = values
            array[count:padded] = padding
        else:
            array[:count, : values.shape[1]] = values
        self._include(name, 0, max(count, padded))

    def put_last(self, name: str, values: np.ndarray) -> int:
        """Write the last rows of an array; return the number of the first of them."""
        array = self._side.arrays[name]
        first = len(array) - len(values)
        array[first:] = values
        self._include(name, first, len(array))
        return first

    def _include(self, name: str, first: int, end: int) -> None:
        """Extend the copy to these rows of an array."""
        start, stride = self._offsets[name], self._side.arrays[name].strides[0]
        self._first = min(self._first, start + stride * first)
        self._end = max(self._end, start + stride * end)

    def send(self, stream: int) -> None:
        """Queue one copy from the first to the last value that was put."""
        if self._end > self._first:
            first, size = self._first, self._end - self._first
            self._device.copy(
                self._on_card.address + first, self._side.pinned.address + first, size, stream
            )
        self._side.sent.record(stream)
        self._side.is_sent = True

    def close(self) -> None:
        """Free all memory."""
        self._on_card.close()
        for side in self._sides:
            side.sent.close()
            side.pinned.close()


class _Side:
    """A pinned buffer with its arrays, and the event of the last copy from it."""

    def __init__(
        self, device: Device, num_bytes: int, shapes: Mapping[str, tuple[int, ...]],
        offsets: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.pinned = device.allocate_pinned(num_bytes)
        raw = self.pinned.host_bytes().view(np.int32)
        self.arrays: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            start, count = offsets[name] // 4, int(np.prod(shape))
            self.arrays[name] = raw[start : start + count].reshape(shape)
        self.sent = device.event()
        self.is_sent = False
