"""Memory for weights: zeros on cache lines, apart from each other, whatever is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runner.cpu import weight_memory
from engine.runner.cpu.weight_memory import WeightMemory

FLOATS, BYTES = np.dtype(np.float32), np.dtype(np.int8)


def test_arrays_are_zeros_on_cache_lines() -> None:
    memory = WeightMemory()
    for shape, dtype in (((3, 5, 16), FLOATS), ((1, 7, 16), BYTES), ((2, 4, 16), FLOATS)):
        array = memory.zeros(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.ctypes.data % 64 == 0
        assert not array.any()


def test_nobody_gets_anothers_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_CHUNK_BYTES", 4096)
    memory = WeightMemory()
    sizes = [1, 100, 4000, 64, 4096, 70_000, 30, 2000]
    arrays = [memory.zeros((size,), BYTES) for size in sizes]
    for value, array in enumerate(arrays, 1):
        array.fill(value)
    del memory
    for value, array in enumerate(arrays, 1):
        assert (array == value).all()
