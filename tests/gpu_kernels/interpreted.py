"""Triton's interpreter on numpy memory, with neither torch nor a card.

The interpreter of Triton 3.6 multiplies and rounds bfloat16 wrongly, rounds twice where a product
and a sum are fused, needs numpy before 2.4 for loops, and copies torch tensors: the patches below
are for these. The dot adds k after k, as the
matrix unit's chain along K does, so that an order that depends on a tile shows in the bits.

Every launch is checked as a card's memory checker would (`checked_launch.py`).

TRITON_INTERPRET is read when a kernel is decorated: import this before any kernel.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.runner.gpu.cuda_driver import DeviceProperties, GpuError, Memory
from engine.runner.gpu.launcher import KernelSpec, checked_address
from engine.runner.gpu.tensor_map import MatrixView
from tests.gpu_kernels.checked_launch import (
    CheckedLaunch,
    Touched,
    check_launches,
    checking,
    extents,
    tagged,
)
from tests.gpu_kernels.known_memory import known
from tests.gpu_kernels.less_computed import compute_less
from tests.gpu_kernels.played_sharing import PlayedSharing

_plain_patch = interpreter._patch_lang_tensor


def _patch_index(tensor: Any, scope: Any) -> None:
    _plain_patch(tensor, scope)
    scope.set_attr(
        tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
    )


_plain_patches = interpreter._patch_lang
_patched: set[str] = set()
"""The modules that are patched for the kernel that runs, if one does."""


def _patch_once(function: Any) -> Any:
    """Patch Triton's modules for a kernel, and for a function that it calls only those that are
    not: to patch them for each takes a fifth of the time."""
    seen = function.__globals__.values()
    named = {one.__name__ for one in seen if one is tl or one is tl.core}
    if named <= _patched:
        return interpreter._LangPatchScope()
    scope = _plain_patches(function)
    restore = scope.restore

    def restore_all() -> None:
        _patched.clear()
        restore()

    scope.restore = restore_all
    _patched.update(named)
    return scope


def widened(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16 bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _values(handle: Any) -> np.ndarray:
    data: np.ndarray = handle.data
    return widened(data) if handle.dtype.scalar == tl.bfloat16 else data.astype(np.float32)


def _chained_dot(_: Any, a: Any, b: Any, total: Any, __: Any, ___: Any) -> Any:
    left, right, result = _values(a), _values(b), total.data.copy()
    for k in range(left.shape[-1]):
        result += left[..., k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(result, total.dtype.scalar)


_plain_convert = interpreter._convert_float


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.float32 and target == tl.bfloat16:
        return rounded(data).reshape(data.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return widened(data).reshape(data.shape).view(np.uint32)
    converted: np.ndarray = _plain_convert(data, source, target, rounding)
    return converted


def _fused(_: Any, x: Any, y: Any, z: Any) -> Any:
    exact = x.data.astype(np.float64) * y.data
    return interpreter.TensorHandle((exact + z.data).astype(np.float32), z.dtype.scalar)


def _sorted(x: Any) -> Any:
    """Sort in one go: the 66 stages of 2,048 numbers take the interpreter a second."""
    return tl.core.tensor(interpreter.TensorHandle(np.sort(x.handle.data), x.handle.dtype), x.type)


class _ElementType(str):
    """A type's name in Triton, with the size that its descriptors ask for."""

    itemsize = 2


class _Array:
    """What the interpreter takes for an address."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


compute_less()
check_launches()
interpreter._patch_lang_tensor = _patch_index
interpreter._patch_lang = _patch_once
interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_dot = _chained_dot
interpreter.InterpreterBuilder.create_fma = _fused
tl.sort = _sorted
interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
interpreter.GridExecutor._restore_args_dev = lambda self, *_: None


_ONLY_COMPILED = ("PREFETCH", "HAS_PTX")
"""Constants of a kernel's parts that are PTX, which the interpreter does not know."""


_LARGEST_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)

_running = threading.Lock()
"""The interpreter patches Triton's modules while a kernel runs, so one runs at a time."""


class InterpretedKernel:
    """A kernel that runs in the interpreter when it is launched."""

    only_compiled: tuple[str, ...] = _ONLY_COMPILED

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._constants = dict(spec.constants) | (
            {name: 0 for name in self.only_compiled if name in spec.constants}
        )
        self._is_programmatic = spec.is_programmatic

    def bind(self, grid: tuple[int, ...], *arguments: float | MatrixView) -> Callable[[int], None]:
        """Return a launch; `GpuError` for a grid that a driver refuses.

        `ValueError` for an address that is not aligned.
        """
        if not all(0 < size <= most for size, most in zip(grid, _LARGEST_GRID, strict=False)):
            raise GpuError(f"a grid of {grid}: invalid argument (1)")
        given: dict[str, Any] = {}
        addresses: dict[str, int] = {}
        for name, kind, value in self._with_types(arguments):
            if isinstance(value, MatrixView):
                addresses[name] = value.address
                given[name] = _described(value, kind, len(addresses))
            elif kind.startswith("*"):
                addresses[name] = checked_address(name, int(value))
                given[name] = _Array(tagged(addresses[name], len(addresses)), kind[1:])
            else:
                given[name] = value
        given |= self._constants

        def run(stream: int) -> None:
            self._run(stream, grid, addresses, given)

        return run

    def _run(
        self, stream: int, grid: tuple[int, ...], addresses: dict[str, int], given: dict[str, Any],
        touched: Touched | None = None,
    ) -> None:  # fmt: skip
        """Run all programs, and note in `touched` what they touch."""
        launch = CheckedLaunch(
            self._spec.function.__name__, grid, extents(addresses, given),
            is_programmatic=self._is_programmatic, touched=touched,
        )  # fmt: skip
        # Rows of padding and slots that nobody reads are NaN.
        with _running, np.errstate(all="ignore"), warnings.catch_warnings(), checking(launch):
            warnings.simplefilter("ignore", RuntimeWarning)
            self._spec.function[grid](**given)

    def addresses(self, *arguments: float | MatrixView) -> tuple[int, ...]:
        """Return where in memory a launch with these arguments reads and writes."""
        return tuple(
            value.address if isinstance(value, MatrixView) else int(value)
            for _, kind, value in self._with_types(arguments)
            if isinstance(value, MatrixView) or kind.startswith("*")
        )

    def _with_types(self, arguments: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield the name, the type and the value of each argument."""
        for (name, kind), value in zip(self._spec.arguments, arguments, strict=True):
            yield name, kind, value


def _described(view: MatrixView, kind: str, number: int) -> TensorDescriptor:
    block = [int(size) for size in kind.partition("[")[2].rstrip("]>").split(",")]
    shape = [view.num_rows, view.num_columns]
    return TensorDescriptor(
        _Array(tagged(view.address, number), _ElementType("bf16")),
        shape,
        [view.num_columns, 1],
        block,
    )


class InterpretedEvent:
    """A point in work that is done as soon as it is queued."""

    def record(self, stream: int) -> None:
        pass

    def delay(self, stream: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def is_reached(self) -> bool:
        return True

    def close(self) -> None:
        pass


class InterpretedGraph:
    """Launches that are made again whenever the graph is launched."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def launch(self, stream: int) -> None:
        self._work()

    def close(self) -> None:
        pass


class InterpretedDevice:
    """Host memory in the place of a card's."""

    properties = DeviceProperties("interpreter", 90, 2, 1 << 18, 1 << 30)

    allocated_bytes = most_allocated_bytes = 0

    def __init__(self, ordinal: int = 0, *, garbage: int = 0xFF) -> None:
        """Take the byte that is in memory which nobody has written: NaN in every type."""
        self._arrays: list[np.ndarray] = []
        self._garbage = garbage
        self._taken: list[tuple[int, int]] = []
        weakref.finalize(self, known.forget, self._taken)
        self.pinned: list[Memory] = []
        """Memory of the host."""
        self.call = PlayedSharing()
        self.ordinal = ordinal

    def allocate(self, num_bytes: int) -> Memory:
        array = np.full(num_bytes + 256, self._garbage, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self._arrays.append(array)
        self.allocated_bytes += num_bytes
        return self._known(address, num_bytes)

    def _known(self, address: int, num_bytes: int, host: int = 0) -> Memory:
        """Return memory that kernels may touch until it is closed."""
        known.add(address, num_bytes)
        self._taken.append((address, num_bytes))
        return Memory(address, num_bytes, partial(known.give_back, address, num_bytes), host)

    def use(self) -> None:
        pass

    def room_for(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate_pinned(self, num_bytes: int) -> Memory:
        memory = self.allocate(num_bytes)
        self.allocated_bytes -= num_bytes
        memory.host = memory.address
        self.pinned.append(memory)
        return memory

    def upload(self, to: int, data: bytes) -> None:
        known.require(to, len(data), "the target of an upload")
        ctypes.memmove(to, data, len(data))

    def upload_array(self, to: int, values: np.ndarray) -> None:
        known.require(to, values.nbytes, "the target of an upload")
        ctypes.memmove(to, values.ctypes.data, values.nbytes)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        known.require(to, num_bytes, "the target of a copy")
        known.require(source, num_bytes, "the source of a copy")
        ctypes.memmove(to, source, num_bytes)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        known.require(address, num_bytes, "a fill")
        ctypes.memset(address, value, num_bytes)

    def register(self, address: int, num_bytes: int) -> Memory:
        return self._known(address, num_bytes, address)

    def stream(self, *, is_urgent: bool = False) -> int:
        return 1

    def event(self) -> InterpretedEvent:
        return InterpretedEvent()

    def capture(self, stream: int, work: Callable[[], None]) -> InterpretedGraph:
        return InterpretedGraph(work)

    def download(self, source: int, num_bytes: int) -> bytearray:
        known.require(source, num_bytes, "the source of a download")
        return bytearray(ctypes.string_at(source, num_bytes))

    def synchronize(self, stream: int) -> None:
        pass

    def synchronize_all(self) -> None:
        pass
