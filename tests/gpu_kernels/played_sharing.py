"""The driver's calls for memory that other processes map, played by files in host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
from collections.abc import Callable
from typing import Any

from engine.runner.gpu.cuda_driver import GpuError
from tests.gpu_kernels.known_memory import known

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class PlayedSharing:
    """Takes the place of `cuda_driver.Driver`. `failing` names calls that fail.

    `live` counts what was made and not given back: handles, addresses, mappings. `on_mapped` and
    `on_unmapped` are told the address and the size of what comes, and of what goes before it does.
    """

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.live = {"handles": 0, "addresses": 0, "mappings": 0}
        self.location = (1, 0)
        self.can_read_peers = True
        self.on_mapped: Callable[[int, int], None] = lambda address, num_bytes: None
        self.on_unmapped = self.on_mapped

    def __call__(self, name: str, *arguments: Any) -> None:
        if name in self.failing:
            raise GpuError(f"{name}: not supported (801)")
        # cuMemCreate is `cu_mem_create` here.
        call: Callable[..., None] = getattr(self, re.sub(r"([A-Z])", r"_\1", name).lower())
        call(*arguments)

    def cu_mem_get_allocation_granularity(self, page: Any, *_: Any) -> None:
        page._obj.value = mmap.PAGESIZE

    def cu_mem_create(self, handle: Any, size: Any, *_: Any) -> None:
        handle._obj.value = os.memfd_create("played-card")
        os.ftruncate(handle._obj.value, size.value)
        self.live["handles"] += 1

    def cu_mem_release(self, handle: Any) -> None:
        os.close(handle.value)
        self.live["handles"] -= 1

    def cu_mem_address_reserve(self, address: Any, size: Any, *_: Any) -> None:
        address._obj.value = _LIBC.mmap(None, size.value, 0, _NO_MEMORY, -1, 0)
        self.live["addresses"] += 1

    def cu_mem_address_free(self, address: Any, size: Any) -> None:
        _LIBC.munmap(address.value, size.value)
        self.live["addresses"] -= 1

    def cu_mem_map(self, address: Any, size: Any, _: Any, handle: Any, __: Any) -> None:
        if os.fstat(handle.value).st_size < size.value:
            raise GpuError("cuMemMap: invalid argument (1)")
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _LIBC.mmap(address.value, size.value, _READ_WRITE, flags, handle.value, 0)
        self.live["mappings"] += 1
        known.add(address.value, size.value)
        self.on_mapped(address.value, size.value)

    def cu_mem_unmap(self, address: Any, size: Any) -> None:
        self.on_unmapped(address.value, size.value)
        known.remove(address.value, size.value)
        _LIBC.mmap(address.value, size.value, 0, _NO_MEMORY | _MAP_FIXED, -1, 0)
        self.live["mappings"] -= 1

    def cu_mem_set_access(self, *_: Any) -> None:
        pass

    def cu_mem_export_to_shareable_handle(self, descriptor: Any, handle: Any, *_: Any) -> None:
        descriptor._obj.value = os.dup(handle.value)

    def cu_mem_import_from_shareable_handle(self, handle: Any, descriptor: Any, _: Any) -> None:
        if not stat.S_ISREG(os.fstat(descriptor.value).st_mode):
            raise GpuError("cuMemImportFromShareableHandle: invalid argument (1)")
        handle._obj.value = os.dup(descriptor.value)
        self.live["handles"] += 1

    def cu_mem_get_allocation_properties_from_handle(self, found: Any, _: Any) -> None:
        found._obj.location.kind, found._obj.location.ordinal = self.location

    def cu_device_can_access_peer(self, can_read: Any, *_: Any) -> None:
        can_read._obj.value = self.can_read_peers
