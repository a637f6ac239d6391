"""The driver's calls, through ctypes: neither a CUDA toolkit nor a framework is needed.

One `Device` is one card's primary context, which other libraries of the process share. Every call
raises `GpuError` with the driver's own name of the error. Addresses are plain integers; memory is
freed when its owner is closed. All methods may be called by one thread at a time, which has made
the context current (`Device.use`).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import ConfigError
from engine.core.runner_contract import DeviceLost

LEAST_CAPABILITY = 80
"""The first compute capability with matrix instructions in bfloat16: 8.0."""

LEAST_CUDA = 12000
"""The first version of CUDA whose drivers have all calls of this file and of `tensor_map`: 12.0."""

PROGRAMMATIC_GRAPHS_CUDA = 12030
"""The first version whose graphs have programmatic launches: 12.3."""

_LIBRARY = "libcuda.so.1"
_ATTRIBUTES = {
    "multiprocessors": 16,
    "capability_major": 75,
    "capability_minor": 76,
    "shared_bytes": 97,
}
"""Numbers of CUdevice_attribute."""

_MAX_DYNAMIC_SHARED = 8
_PROGRAMMATIC_LAUNCH = 6
_LARGEST_STATIC_SHARED = 48 << 10
_EVENT_DISABLE_TIMING = 2
_CAPTURE_THREAD_LOCAL = 1
_NON_BLOCKING_STREAM = 1
_DEFAULT_STREAM = 0
_MOST_URGENT = -100
"""A priority below all of the driver's, which takes its most urgent one for it."""
_HOST_PORTABLE_MAPPED = 3
_OUT_OF_MEMORY = 2
_NOT_READY = 600


class GpuError(DeviceLost):
    """A call of the driver failed. An error inside a kernel ends the context: no call succeeds
    afterwards."""


class OutOfMemory(GpuError):
    """The card has not enough free memory. Earlier allocations are unchanged."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("kind", c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"grid_{axis}", c_uint) for axis in "xyz"),
        *((f"block_{axis}", c_uint) for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint),
    )


class Driver:
    """The driver library, with one method per kind of call."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call `name`; raise `GpuError` unless it returns success."""
        status = getattr(self._library, name)(*arguments)
        if status:
            kind = OutOfMemory if status == _OUT_OF_MEMORY else GpuError
            raise kind(f"{name}: {self._error_name(status)}")

    def status(self, name: str, *arguments: Any) -> int:
        """Call `name` and return its status."""
        return int(getattr(self._library, name)(*arguments))

    def _error_name(self, status: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(status, byref(text)) or text.value is None:
            return f"error {status}"
        return f"{text.value.decode()} ({status})"


def load_driver() -> Driver:
    """Return the driver; `ConfigError` for none, one that is too old, or one without a card."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(f"no NVIDIA driver: {_LIBRARY} cannot be loaded: {error}") from error
    driver = Driver(library)
    status = driver.status("cuInit", 0)
    if status:
        raise ConfigError(f"the NVIDIA driver finds no usable card: cuInit returns {status}")
    found = _cuda_of(driver)
    if found < LEAST_CUDA:
        raise ConfigError(
            f"the NVIDIA driver is too old, of CUDA {_version(found)}: wanted "
            f"{_version(LEAST_CUDA)} or later"
        )
    return driver


def _cuda_of(driver: Driver) -> int:
    version = c_int()
    driver("cuDriverGetVersion", byref(version))
    return version.value


def _version(number: int) -> str:
    """Return the driver's number of a version, 12080, as 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def capability_of(driver: Driver, ordinal: int) -> int:
    """Return a card's compute capability, 90 for 9.0, without opening it; 0: there is none."""
    device, value, found = c_int(), c_int(), 0
    if driver.status("cuDeviceGet", byref(device), ordinal):
        return 0
    for factor, name in ((10, "capability_major"), (1, "capability_minor")):
        driver("cuDeviceGetAttribute", byref(value), _ATTRIBUTES[name], device)
        found += factor * value.value
    return found


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties for which kernels are compiled and sized. `capability` is 90 for 9.0.

    `cuda` is the driver's version, 12080 for CUDA 12.8.
    """

    name: str
    capability: int
    num_multiprocessors: int
    shared_bytes: int
    memory_bytes: int
    cuda: int = PROGRAMMATIC_GRAPHS_CUDA


class Memory:
    """An allocation: `address` on the device, and `host` where the host may read and write it."""

    def __init__(
        self, address: int, num_bytes: int, free: Callable[[], None], host: int = 0
    ) -> None:
        self.address, self.num_bytes, self.host = address, num_bytes, host
        self._free: Callable[[], None] | None = free

    def host_bytes(self) -> np.ndarray:
        """Return the host's view, uint8 `[num_bytes]`, which must not outlive the memory."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.host))

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        free, self._free = self._free, None
        if free is not None:
            free()


class Device:
    """One card. `use` makes its context current in the calling thread."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.call = driver
        count = c_int()
        driver("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            raise ConfigError(f"card {ordinal}: wanted 0 to {count.value - 1}")
        self._device = c_int()
        driver("cuDeviceGet", byref(self._device), ordinal)
        self._context = c_void_p()
        driver("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self.use()
        self.allocated_bytes = self.most_allocated_bytes = 0
        self.properties = self._read_properties()

    def use(self) -> None:
        """Make the card's context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    @property
    def ordinal(self) -> int:
        """The card's number in this process."""
        return self._device.value

    def close(self) -> None:
        """Release the context, and with it all of its allocations."""
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _read_properties(self) -> DeviceProperties:
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self._device)
        found = {}
        for key, number in _ATTRIBUTES.items():
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), number, self._device)
            found[key] = value.value
        return DeviceProperties(
            name=name.value.decode(),
            capability=10 * found["capability_major"] + found["capability_minor"],
            num_multiprocessors=found["multiprocessors"],
            shared_bytes=found["shared_bytes"],
            memory_bytes=self.memory()[1],
            cuda=_cuda_of(self.call),
        )

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free and those that the card has."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    @contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Raise `ConfigError` where the card has no memory left: for a start, not for steps."""
        try:
            yield
        except OutOfMemory as error:
            free, total = self.memory()
            raise ConfigError(
                f"{what} does not fit: {self.properties.name} has {free >> 20} MiB left of "
                f"{total >> 20}; wanted a smaller memory_fraction or kv_cache_memory, fewer tokens "
                f"in max_num_batched_tokens, or a smaller model ({error})"
            ) from error

    def allocate(self, num_bytes: int) -> Memory:
        """Return device memory, aligned to 256 bytes and not initialised."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(max(num_bytes, 1)))
        found = address.value
        self.allocated_bytes += num_bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)

        def free() -> None:
            self.allocated_bytes -= num_bytes
            self.call("cuMemFree_v2", c_uint64(found))

        return Memory(found, num_bytes, free)

    def allocate_pinned(self, num_bytes: int) -> Memory:
        """Return host memory that the card reads and writes at `address`."""
        host, address = c_void_p(), c_uint64()
        self.call("cuMemHostAlloc", byref(host), c_size_t(num_bytes), _HOST_PORTABLE_MAPPED)
        self.call("cuMemHostGetDevicePointer_v2", byref(address), host, 0)
        return Memory(
            address.value, num_bytes, lambda: self.call("cuMemFreeHost", host), host.value or 0
        )

    def register(self, address: int, num_bytes: int) -> Memory:
        """Pin host memory of this process, so that the card reads and writes it at `address`.

        It begins on a page. Takes all of its pages from the system.
        """
        host, found = c_void_p(address), c_uint64()
        self.call("cuMemHostRegister_v2", host, c_size_t(num_bytes), _HOST_PORTABLE_MAPPED)
        self.call("cuMemHostGetDevicePointer_v2", byref(found), host, 0)
        return Memory(
            found.value, num_bytes, lambda: self.call("cuMemHostUnregister", host), address
        )

    def stream(self, *, is_urgent: bool = False) -> int:
        """Return a new stream that does not wait for the default one.

        Work on an urgent stream is started before that of other streams.
        """
        handle = c_void_p()
        priority = _MOST_URGENT if is_urgent else 0
        self.call("cuStreamCreateWithPriority", byref(handle), _NON_BLOCKING_STREAM, priority)
        return handle.value or 0

    def synchronize(self, stream: int) -> None:
        """Wait until all work of the stream has ended."""
        self.call("cuStreamSynchronize", c_void_p(stream))

    def synchronize_all(self) -> None:
        """Wait until all work of all streams has ended."""
        self.call("cuCtxSynchronize")

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between any two addresses, the host's pinned ones included, in stream order."""
        self.call(
            "cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(num_bytes), c_void_p(stream)
        )

    def upload(self, to: int, data: bytes | memoryview) -> None:
        """Copy host memory to the device and wait for it."""
        self.upload_array(to, np.frombuffer(data, np.uint8))

    def upload_array(self, to: int, values: np.ndarray) -> None:
        """Copy a contiguous array to the device and wait for it."""
        self.call(
            "cuMemcpyHtoD_v2", c_uint64(to), c_void_p(values.ctypes.data), c_size_t(values.nbytes)
        )
        # The call returns once the memory was read, and no other stream waits for the rest.
        self.synchronize(_DEFAULT_STREAM)

    def download(self, source: int, num_bytes: int) -> bytearray:
        """Copy device memory to the host and wait for it."""
        data = bytearray(num_bytes)
        target = (ctypes.c_char * num_bytes).from_buffer(data)
        self.call("cuMemcpyDtoH_v2", target, c_uint64(source), c_size_t(num_bytes))
        return data

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """Set bytes in stream order."""
        self.call(
            "cuMemsetD8Async", c_uint64(address), ctypes.c_ubyte(value), c_size_t(num_bytes),
            c_void_p(stream),
        )  # fmt: skip

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event; one that is not timed costs less."""
        flags = 0 if timed else _EVENT_DISABLE_TIMING
        handle = c_void_p()
        self.call("cuEventCreate", byref(handle), flags)
        return Event(self, handle)

    def load_function(self, cubin: bytes, name: str, shared_bytes: int) -> c_void_p:
        """Load a compiled kernel; raise `GpuError` when the card lacks its shared memory."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), cubin)
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        if shared_bytes > _LARGEST_STATIC_SHARED:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
        return function

    def capture(self, stream: int, work: Callable[[], None]) -> Graph:
        """Return a graph of the launches that `work` makes on the stream; nothing runs."""
        self.call("cuStreamBeginCapture_v2", c_void_p(stream), _CAPTURE_THREAD_LOCAL)
        graph, ready = c_void_p(), c_void_p()
        try:
            work()
        except BaseException:
            # The recording is invalid, and ending it fails too: the first error is raised.
            self.call.status("cuStreamEndCapture", c_void_p(stream), byref(graph))
            raise
        self.call("cuStreamEndCapture", c_void_p(stream), byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", byref(ready), graph, c_uint64(0))
        finally:
            self.call("cuGraphDestroy", graph)
        return Graph(self, ready)


class Event:
    """A point in a stream's work."""

    def __init__(self, device: Device, handle: c_void_p) -> None:
        self._device, self._handle = device, handle

    def record(self, stream: int) -> None:
        self._device.call("cuEventRecord", self._handle, c_void_p(stream))

    def is_reached(self) -> bool:
        """Return whether the work before the event has ended; `GpuError` if it failed."""
        if self._device.call.status("cuEventQuery", self._handle) == _NOT_READY:
            return False
        self._device.call("cuEventQuery", self._handle)
        return True

    def wait(self) -> None:
        """Block the thread until the work before the event has ended."""
        self._device.call("cuEventSynchronize", self._handle)

    def delay(self, stream: int) -> None:
        """Let the stream's later work wait for the event."""
        self._device.call("cuStreamWaitEvent", c_void_p(stream), self._handle, 0)

    def milliseconds_since(self, earlier: Event) -> float:
        """Return the time between two timed events that were reached."""
        found = ctypes.c_float()
        self._device.call("cuEventElapsedTime", byref(found), earlier._handle, self._handle)
        return found.value

    def close(self) -> None:
        self._device.call("cuEventDestroy_v2", self._handle)


class Graph:
    """Recorded launches, started as one."""

    def __init__(self, device: Device, handle: c_void_p) -> None:
        self._device, self._handle = device, handle

    def launch(self, stream: int) -> None:
        self._device.call("cuGraphLaunch", self._handle, c_void_p(stream))

    def close(self) -> None:
        self._device.call("cuGraphExecDestroy", self._handle)


class Launch:
    """One launch with its arguments in place: a repetition costs the driver's call alone."""

    def __init__(
        self, device: Device, function: c_void_p, grid: tuple[int, int, int], num_threads: int,
        shared_bytes: int, arguments: list[Any], *, is_programmatic: bool,
    ) -> None:  # fmt: skip
        self._device, self._function = device, function
        self.arguments = arguments
        """The memory from which each launch reads its parameters."""
        self._parameters = (c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(value), c_void_p) for value in arguments)
        )
        self._attribute = _LaunchAttribute()
        self._attribute.kind = _PROGRAMMATIC_LAUNCH
        self._attribute.value = struct.pack("i", 1)
        self._config = _LaunchConfig(
            *grid, num_threads, 1, 1, shared_bytes, None, ctypes.pointer(self._attribute),
            1 if is_programmatic else 0,
        )  # fmt: skip

    def __call__(self, stream: int) -> None:
        """Launch on the stream."""
        self._config.stream = stream
        self._device.call(
            "cuLaunchKernelEx", byref(self._config), self._function, self._parameters, None
        )
