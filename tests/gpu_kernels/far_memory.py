"""Memory of more bytes than a machine has, and programs whose numbers are large.

The memory is mapped and, but for the pages that a test writes, not there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedKernel  # isort: skip

import numpy as np
from triton.runtime import interpreter

from engine.runner.gpu.tensor_map import MatrixView
from tests.gpu_kernels.known_memory import known

BEFORE = 17 << 30
"""Where a place would be sought that has become negative, in words of 8 bytes."""
_NO_RESERVE = 0x4000


@contextmanager
def sparse(num_bytes: int) -> Iterator[int]:
    """Give the address of memory that is zeros, with as much before it as `BEFORE` says."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    with mmap.mmap(-1, BEFORE + num_bytes, flags=flags) as memory:
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first) + BEFORE
        known.add(address, num_bytes)
        try:
            yield address
        finally:
            known.remove(address, num_bytes)
            del first


def array_at(address: int, count: int, kind: Any) -> np.ndarray:
    raw = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(address)
    return np.frombuffer(raw, kind)


def behind(stack: ExitStack, count: int, values: np.ndarray) -> int:
    """Return the address of an array of `count` zeros and then these values."""
    address = stack.enter_context(sparse(values.itemsize * count + values.nbytes))
    array_at(address + values.itemsize * count, values.size, values.dtype)[:] = values.ravel()
    return address


class LastProgram(InterpretedKernel):
    """A kernel of which only the last program of a grid's first direction is computed."""

    def bind(self, grid: tuple[int, ...], *arguments: float | MatrixView) -> Callable[[int], None]:
        super().bind(grid, *arguments)  # refuses what a driver refuses
        launch = super().bind((1, *grid[1:]), *arguments)
        plain = interpreter.InterpreterBuilder.create_get_program_id

        def number_of(builder: Any, axis: int) -> Any:
            number = plain(builder, axis)
            if axis:
                return number
            return interpreter.TensorHandle(number.data + np.int32(grid[0] - 1), number.dtype)

        def run(stream: int) -> None:
            name = "create_get_program_id"
            with mock.patch.object(interpreter.InterpreterBuilder, name, number_of):
                launch(stream)

        return run
