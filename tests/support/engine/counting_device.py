"""A device played on a CPU that counts copies to it and reads from it.

Every read from a device waits for all work queued before it, so a read is a synchronisation. What
Paddle's own kernels copy cannot be seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.runner.paddle_import import paddle

READS = ("numpy", "cpu", "item", "tolist", "__array__", "__bool__", "__int__", "__float__")


class CountingDevice:
    """Counts from `install` on, in this process."""

    def __init__(self) -> None:
        self.copies_in: list[int] = []
        """Bytes of each copy from the host."""
        self.reads: list[int] = []
        """Bytes of each read."""
        self._is_inside = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count until the test ends."""
        monkeypatch.setattr(paddle, "to_tensor", self._counted_copy(paddle.to_tensor))
        for name in READS:
            read = getattr(paddle.Tensor, name)
            monkeypatch.setattr(paddle.Tensor, name, self._counted_read(read))

    def clear(self) -> None:
        """Count from zero."""
        self.copies_in.clear()
        self.reads.clear()

    def _counted_copy(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def to_tensor(data: Any, *args: Any, place: Any = None, **rest: Any) -> Any:
            if not isinstance(place, paddle.CPUPlace):
                self.copies_in.append(np.asarray(data).nbytes)
            return copy(data, *args, place=place, **rest)

        return to_tensor

    def _counted_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Any, *args: Any, **rest: Any) -> Any:
            if self._is_inside:  # one read may be made of another
                return read(tensor, *args, **rest)
            self._is_inside = True
            try:
                self.reads.append(tensor.size * tensor.element_size())
                return read(tensor, *args, **rest)
            finally:
                self._is_inside = False

        return counted
