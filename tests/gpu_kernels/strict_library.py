"""A driver that computes nothing and forgives nothing: it takes the place of libcuda.

Each call is compared with its declaration in NVIDIA's header, which Triton brings along: a number
without a type, where 64 bits are wanted, is one that ctypes would cut. Besides, the header's own
rules hold: a thread has made the context current; nothing is allocated and nobody waits in a thread
that records; addresses are of memory that was taken and not given back, events and graphs are not
used after their end; a launch has the parameters that its kernel was compiled with.

What comes back from the card is the same byte everywhere, and pinned memory has `TOKEN`, as on
`blank_card`.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from engine.runner.gpu.cuda_driver import Device, Driver
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu_kernels.blank_card import BYTE, TOKEN

HEADER = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
_WIDE = {
    "CUdeviceptr", "size_t", "unsigned long long", "cuuint64_t", "CUmemGenericAllocationHandle",
}  # fmt: skip
_HANDLES = {
    "CUstream", "CUevent", "CUcontext", "CUfunction", "CUmodule", "CUgraph", "CUgraphExec",
}  # fmt: skip
_POINTED = {
    "int": 4, "CUdevice": 4, "float": 4, "cuuint32_t": 4, "CUmemAllocationProp": 32,
    "CUmemAccessDesc": 12, "CUtensorMap": 128, "CUlaunchConfig": 56, "char *": 8,
} | dict.fromkeys(_WIDE | _HANDLES, 8)  # fmt: skip
_WITHOUT_CONTEXT = re.compile(r"cu(Init|Driver|Device|CtxSetCurrent|GetErrorString)")
_NOT_IN_A_RECORDING = re.compile(
    r"cu(MemAlloc|MemFree|MemHost|MemCreate|MemMap|MemUnmap|MemcpyHtoD|MemcpyDtoH|Module|Func"
    r"|\w*Synchronize|EventQuery)"
)
_MOST_PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_STATIC_SHARED = 48 << 10
_PAGE = 2 << 20
_NO_MEMORY = 2


def declared() -> dict[str, list[str]]:
    """Return the types of the parameters of every call of the driver, by the name of its symbol."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    names = text[: text.index("CUDAAPI cuGetErrorString")]
    symbols = dict(re.findall(r"#\s*define (cu\w+)\s+(?:__CUDA_API_\w+\()?(cu\w+)", names))
    found: dict[str, list[str]] = {}
    for name, parameters in re.findall(r"CUresult CUDAAPI\s+(cu\w+)\(([^)]*)\);", text):
        named = [] if parameters.strip() == "void" else parameters.split(",")
        kinds = [re.sub(r"\w+$", "", one.strip()).strip() for one in named]
        found.setdefault(symbols.get(name, name), kinds)
    return found


def why_wrong(kind: str, value: Any) -> str:
    """Return what is wrong with an argument where the header has this type; empty if nothing is."""
    plain = re.sub(r"\bconst\b", "", kind).strip()
    if plain.endswith("*"):
        pointed = plain[:-1].strip()
        if value is None or isinstance(value, bytes | ctypes.c_void_p):
            return ""
        target = getattr(value, "_obj", value)
        if not isinstance(target, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
            return "no pointer"
        size = ctypes.sizeof(
            target._type_ if isinstance(target, ctypes.Array) and pointed != "CUtensorMap"
            else target
        )  # fmt: skip
        return f"{size} bytes" if size != _POINTED.get(pointed, size) else ""
    if plain in _HANDLES:
        return "" if isinstance(value, ctypes.c_void_p) else "no handle"
    wanted = 8 if plain in _WIDE else 1 if plain == "unsigned char" else 4
    size = ctypes.sizeof(value) if isinstance(value, ctypes._SimpleCData) else 4
    return f"{size} bytes: wanted {wanted}" if size != wanted else ""


def _method(name: str) -> str:
    """Return the name here of what answers a call."""
    return "_" + re.sub(r"([A-Z])", r"_\1", name).lower()


class StrictLibrary:
    """Takes the place of libcuda. `faults` are what a driver would have refused, or worse."""

    def __init__(
        self, capability: int = 90, shared_bytes: int = 227 << 10, cuda: int = 12080,
        memory_bytes: int = 80 << 30,
    ) -> None:  # fmt: skip
        self.capability, self.shared_bytes, self.cuda = capability, shared_bytes, cuda
        self.faults: list[str] = []
        self.called: set[str] = set()
        self.launched: list[tuple[int, int]] = []
        """The kind and the value of each launch's attributes."""
        self.memory: dict[int, int] = {}
        """Sizes of what was taken, by address; memory of the host included."""
        self._starts: list[int] = []
        self.free_bytes = self._all_bytes = memory_bytes
        self._declared = declared()
        self._lock = threading.RLock()
        self._contexts = threading.local()
        self._next = 1 << 40
        self._host: dict[int, Any] = {}
        self._live: dict[str, set[int]] = {"stream": {0}, "event": set(), "graph": set(),
                                           "ready": set(), "module": set()}  # fmt: skip
        self._kinds: dict[int, list[str]] = {}
        self._allowed_shared: dict[int, int] = {}
        self._recording: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._exported: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            with self._lock:
                return self._called(name, arguments)

        return call

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.called.add(name)
        kinds = self._declared.get(name)
        if kinds is None:
            self.fail(f"{name} is no call of the driver")
        elif len(kinds) != len(arguments):
            self.fail(f"{name} has {len(arguments)} arguments: wanted {len(kinds)}")
        else:
            for kind, value in zip(kinds, arguments, strict=True):
                if wrong := why_wrong(kind, value):
                    self.fail(f"{name}: {value!r} for {kind}: {wrong}")
        if not _WITHOUT_CONTEXT.match(name) and not getattr(self._contexts, "current", 0):
            self.fail(f"{name}: no context is current in thread {threading.current_thread().name}")
        if threading.get_ident() in self._recording.values() and _NOT_IN_A_RECORDING.match(name):
            self.fail(f"{name} in a recording")
        answer: Callable[..., int | None] | None = type(self).__dict__.get(_method(name))
        return (answer(self, *arguments) if answer else 0) or 0

    def fail(self, fault: str) -> None:
        self.faults.append(fault)
        raise AssertionError(fault)

    def _new(self, kind: str, out: Any) -> None:
        self._next += 4096
        out._obj.value = self._next
        self._live[kind].add(self._next)

    def _need(self, kind: str, handle: Any) -> int:
        value = handle.value or 0
        if value not in self._live[kind]:
            self.fail(f"{kind} {value:#x} was not made, or has ended")
        return value

    def check_memory(self, address: int, num_bytes: int, what: str) -> None:
        """Note a fault unless these bytes lie in memory that was taken."""
        place = bisect.bisect_right(self._starts, address)
        first = self._starts[place - 1] if place else 0
        if first and address + num_bytes <= first + self.memory[first]:
            return
        self.fail(f"{what}: {num_bytes} bytes at {address:#x} are in no memory that was taken")

    # --- the card -------------------------------------------------------------------------------

    def _cu_driver_get_version(self, out: Any) -> None:
        out._obj.value = self.cuda

    def _cu_get_error_string(self, status: int, out: Any) -> None:
        out._obj.value = {_NO_MEMORY: b"out of memory"}.get(status, b"an error")

    def _cu_device_get_count(self, out: Any) -> None:
        out._obj.value = 1

    def _cu_device_get_attribute(self, out: Any, number: int, _: Any) -> None:
        out._obj.value = {
            16: 132, 75: self.capability // 10, 76: self.capability % 10, 97: self.shared_bytes,
        }[number]  # fmt: skip

    def _cu_device_primary_ctx_retain(self, out: Any, _: Any) -> None:
        out._obj.value = 0x600

    def _cu_ctx_set_current(self, context: Any) -> None:
        self._contexts.current = context.value

    def _cu_mem_get_info_v2(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.free_bytes, self._all_bytes

    # --- memory ---------------------------------------------------------------------------------

    def _add(self, address: int, num_bytes: int) -> None:
        self.memory[address] = num_bytes
        bisect.insort(self._starts, address)

    def _remove(self, address: int) -> int:
        if address not in self.memory:
            self.fail(f"memory at {address:#x} was not taken, or given back before")
        self._starts.remove(address)
        return self.memory.pop(address)

    def _take(self, num_bytes: int) -> int:
        if num_bytes > self.free_bytes:
            return 0
        self.free_bytes -= num_bytes
        address, self._next = self._next, self._next + -(-num_bytes // _PAGE) * _PAGE + _PAGE
        return address

    def _cu_mem_alloc_v2(self, out: Any, size: Any) -> int:
        address = self._take(size.value)
        out._obj.value = address
        if address:
            self._add(address, size.value)
        return 0 if address else _NO_MEMORY

    def _cu_mem_free_v2(self, address: Any) -> None:
        if address.value in self._host:
            self.fail("memory of the host is given back as the card's")
        self.free_bytes += self._remove(address.value)

    def _cu_mem_host_alloc(self, out: Any, size: Any, _: int) -> None:
        array = (ctypes.c_int32 * (-(-size.value // 4) + 4))()
        array[:] = [TOKEN] * len(array)
        address = -(-ctypes.addressof(array) // 16) * 16
        self._host[address] = array
        self._add(address, size.value)
        out._obj.value = address

    def _cu_mem_host_get_device_pointer_v2(self, out: Any, host: Any, _: int) -> None:
        self.check_memory(host.value, 1, "host memory of the card")
        out._obj.value = host.value

    def _cu_mem_free_host(self, host: Any) -> None:
        if self._host.pop(host.value, None) is None:
            self.fail(f"host memory at {host.value:#x} was not taken")
        self._remove(host.value)

    def _cu_mem_host_register_v2(self, host: Any, size: Any, _: int) -> None:
        self._host[host.value] = self
        self._add(host.value, size.value)

    _cu_mem_host_unregister = _cu_mem_free_host

    def _cu_memcpy_async(self, to: Any, source: Any, size: Any, stream: Any) -> None:
        self._need("stream", stream)
        self.check_memory(to.value, size.value, "the target of a copy")
        self.check_memory(source.value, size.value, "the source of a copy")

    def _cu_memcpy_hto_d_v2(self, to: Any, _: Any, size: Any) -> None:
        self.check_memory(to.value, size.value, "the target of an upload")

    def _cu_memcpy_dto_h_v2(self, to: Any, source: Any, size: Any) -> None:
        self.check_memory(source.value, size.value, "the source of a download")
        ctypes.memset(to, BYTE, size.value)

    def _cu_memset_d8_async(self, address: Any, _: Any, size: Any, stream: Any) -> None:
        self._need("stream", stream)
        self.check_memory(address.value, size.value, "a fill")

    # --- memory that other processes map --------------------------------------------------------

    def _cu_mem_get_allocation_granularity(self, out: Any, *_: Any) -> None:
        out._obj.value = _PAGE

    def _cu_mem_create(self, out: Any, size: Any, *_: Any) -> int:
        address = self._take(size.value)
        out._obj.value = address
        if size.value % _PAGE:
            self.fail(f"cuMemCreate of {size.value} bytes: no whole pages")
        self._pages |= {address: size.value} if address else {}
        return 0 if address else _NO_MEMORY

    def _cu_mem_release(self, handle: Any) -> None:
        self.free_bytes += self._pages.pop(handle.value)

    def _cu_mem_address_reserve(self, out: Any, size: Any, *_: Any) -> None:
        out._obj.value, self._next = self._next, self._next + size.value + _PAGE
        self._reserved[out._obj.value] = size.value

    def _cu_mem_address_free(self, address: Any, size: Any) -> None:
        if self._reserved.pop(address.value) != size.value or address.value in self.memory:
            self.fail("addresses are given back that have memory, or others than were taken")

    def _cu_mem_map(self, address: Any, size: Any, _: Any, handle: Any, __: Any) -> None:
        if size.value % _PAGE or size.value > self._pages[handle.value]:
            self.fail(f"{size.value} bytes are mapped: wanted whole pages that there are")
        self._add(address.value, size.value)

    def _cu_mem_unmap(self, address: Any, size: Any) -> None:
        if self._remove(address.value) != size.value:
            self.fail("another size is unmapped than was mapped")

    def _cu_mem_export_to_shareable_handle(self, out: Any, handle: Any, *_: Any) -> None:
        out._obj.value = os.memfd_create("strict-card")
        self._exported[os.fstat(out._obj.value).st_ino] = self._pages[handle.value]

    def _cu_mem_import_from_shareable_handle(self, out: Any, descriptor: Any, _: int) -> None:
        self._next += _PAGE
        out._obj.value = self._next
        self._pages[self._next] = self._exported[os.fstat(descriptor.value).st_ino]
        self.free_bytes -= self._pages[self._next]  # given back with the handle

    def _cu_mem_get_allocation_properties_from_handle(self, found: Any, _: Any) -> None:
        found._obj.location.kind = 1

    # --- streams, events and graphs -------------------------------------------------------------

    def _cu_stream_create_with_priority(self, out: Any, flags: int, _: int) -> None:
        if flags != 1:
            self.fail("a stream that waits for the default one")
        self._new("stream", out)

    def _cu_stream_synchronize(self, stream: Any) -> None:
        if self._need("stream", stream) in self._recording:
            self.fail("a wait for a stream that is recorded")

    def _cu_ctx_synchronize(self) -> None:
        if self._recording:
            self.fail("a wait for all streams while one is recorded")

    def _cu_event_create(self, out: Any, _: int) -> None:
        self._new("event", out)

    def _cu_event_record(self, event: Any, stream: Any) -> None:
        self._need("event", event)
        self._need("stream", stream)

    def _cu_stream_wait_event(self, stream: Any, event: Any, _: int) -> None:
        self._need("stream", stream)
        self._need("event", event)

    def _cu_event_query(self, event: Any) -> None:
        self._need("event", event)

    _cu_event_synchronize = _cu_event_query

    def _cu_event_elapsed_time(self, out: Any, first: Any, last: Any) -> None:
        out._obj.value = 1.0
        self._need("event", first)
        self._need("event", last)

    def _cu_event_destroy_v2(self, event: Any) -> None:
        self._live["event"].remove(self._need("event", event))

    def _cu_stream_begin_capture_v2(self, stream: Any, mode: int) -> None:
        if not self._need("stream", stream) or mode != 1:
            self.fail(
                "a recording of the default stream, or one that other threads may not disturb"
            )
        self._recording[stream.value] = threading.get_ident()

    def _cu_stream_end_capture(self, stream: Any, out: Any) -> None:
        if self._recording.pop(stream.value, None) != threading.get_ident():
            self.fail("a recording ends in another thread than it began, or did not begin")
        self._new("graph", out)

    def _cu_graph_instantiate_with_flags(self, out: Any, graph: Any, _: Any) -> None:
        self._need("graph", graph)
        self._new("ready", out)

    def _cu_graph_destroy(self, graph: Any) -> None:
        self._live["graph"].remove(self._need("graph", graph))

    def _cu_graph_exec_destroy(self, ready: Any) -> None:
        self._live["ready"].remove(self._need("ready", ready))

    def _cu_graph_launch(self, ready: Any, stream: Any) -> None:
        self._need("ready", ready)
        if self._need("stream", stream) in self._recording:
            self.fail("a graph in a recording")

    # --- kernels --------------------------------------------------------------------------------

    def _cu_module_load_data(self, out: Any, image: bytes) -> None:
        self._new("module", out)
        self._kinds[out._obj.value] = json.loads(image)

    def _cu_module_get_function(self, out: Any, module: Any, _: bytes) -> None:
        out._obj.value = self._need("module", module)
        self._allowed_shared[out._obj.value] = _STATIC_SHARED

    def _cu_func_set_attribute(self, function: Any, kind: int, value: int) -> None:
        if kind != 8 or value > self.shared_bytes:
            self.fail(f"{value} bytes of shared memory, of {self.shared_bytes}")
        self._allowed_shared[function.value] = value

    def _cu_launch_kernel_ex(self, config: Any, function: Any, parameters: Any, _: Any) -> None:
        given, kinds = config._obj, self._kinds[function.value]
        self._need("stream", ctypes.c_void_p(given.stream))
        grid = (given.grid_x, given.grid_y, given.grid_z)
        if not all(0 < one <= most for one, most in zip(grid, _MOST_PROGRAMS, strict=True)):
            self.fail(f"a grid of {grid}")
        threads = given.block_x * given.block_y * given.block_z
        if not 0 < threads <= 1024 or given.shared_bytes > self._allowed_shared[function.value]:
            self.fail(f"{threads} threads and {given.shared_bytes} bytes of shared memory")
        if given.num_attributes and self._recording and self.cuda < 12030:
            self.fail("a programmatic launch in a recording, before CUDA 12.3")
        for place in range(given.num_attributes):
            one = given.attributes[place]
            self.launched.append((one.kind, int.from_bytes(one.value, "little")))
        if len(parameters) != len(kinds):
            self.fail(f"a launch has {len(parameters)} parameters: wanted {kinds}")
        for kind, place in zip(kinds, parameters, strict=True):
            self._check_parameter(kind, place)

    def _check_parameter(self, kind: str, place: int) -> None:
        if kind == "map" and place % 64:
            self.fail("a description of a matrix that is not aligned to 64 bytes")
        if not kind.startswith("*"):
            return
        address = ctypes.c_uint64.from_address(place).value
        if address % 16:
            self.fail(f"an address of {kind} that is not aligned: {address:#x}")
        if address:
            self.check_memory(address, 0, f"an argument of {kind}")


def device_on(library: StrictLibrary) -> Device:
    """Return the card of such a driver, as `open_card` makes it."""
    return Device(Driver(library), 0)


def compiled_blank(spec: KernelSpec, capability: int) -> Any:
    """Take the place of `KernelSpec.compile`: the image is a list of the kernel's parameters."""
    kinds: list[str] = []
    metas: list[dict[str, Any]] = []
    for _, kind in spec.arguments:
        if not kind.startswith("tensordesc"):
            kinds.append(kind)
            continue
        block = [int(one) for one in kind.partition("[")[2].rstrip("]>").split(",")]
        metas.append({"elem_size": 2, "elem_type": 10, "block_size": block, "swizzle": 3})
        kinds += ["map", "i32", "i32", "i64", "i64"]
    name = spec.function.__name__
    metadata = SimpleNamespace(
        name=name, shared=64 << 10, num_warps=spec.num_warps, tensordesc_meta=metas
    )
    return SimpleNamespace(
        metadata=metadata, asm={"cubin": json.dumps([*kinds, "*scratch", "*scratch"]).encode()}
    )
