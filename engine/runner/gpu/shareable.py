"""Memory of a card that other processes map, by a file descriptor.

The driver counts mappings and descriptors, and frees the memory after the last of them, so a
process that has it mapped does not depend on the one that made it. (A mapping of
`cuIpcOpenMemHandle` is only defined as long as its exporter keeps the memory.)
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from engine.runner.gpu.cuda_driver import Device, GpuError, Memory

_PINNED, _ON_DEVICE, _BY_DESCRIPTOR = 1, 1, 1
_READ_WRITE = 3
_LEAST_GRANULARITY = 0


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("ordinal", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", c_int), ("handle_kinds", c_int), ("location", _Location),
        ("windows", c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("allowed", c_int))


class ShareableMemory(Memory):
    """Whole pages of a card, mapped at `address` of this process. The handle is its own."""

    def __init__(self, device: Device, handle: int, num_bytes: int) -> None:
        """Map the pages of a handle; on an error (`GpuError`) the handle is released."""
        self._device, self._handle = device, handle
        address = c_uint64()
        size, zero = c_size_t(num_bytes), c_size_t(0)
        try:
            device.call("cuMemAddressReserve", byref(address), size, zero, c_uint64(0), c_uint64(0))
            try:
                device.call("cuMemMap", address, size, zero, c_uint64(handle), c_uint64(0))
                try:
                    access = _Access(_Location(_ON_DEVICE, device.ordinal), _READ_WRITE)
                    device.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
                except GpuError:
                    device.call("cuMemUnmap", address, size)
                    raise
            except GpuError:
                device.call("cuMemAddressFree", address, size)
                raise
        except GpuError:
            device.call("cuMemRelease", c_uint64(handle))
            raise
        super().__init__(address.value, num_bytes, self._unmap)

    def export(self) -> int:
        """Return a new descriptor, which the caller closes; another process opens it by that."""
        descriptor = c_int(-1)
        self._device.call(
            "cuMemExportToShareableHandle", byref(descriptor), c_uint64(self._handle),
            _BY_DESCRIPTOR, c_uint64(0),
        )  # fmt: skip
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def _unmap(self) -> None:
        self._device.call("cuMemUnmap", c_uint64(self.address), c_size_t(self.num_bytes))
        self._device.call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.num_bytes))
        self._device.call("cuMemRelease", c_uint64(self._handle))


def allocate_shareable(device: Device, num_bytes: int) -> ShareableMemory:
    """Return memory of at least `num_bytes`, not initialised. Raises `GpuError`."""
    wanted = _Properties(_PINNED, _BY_DESCRIPTOR, _Location(_ON_DEVICE, device.ordinal))
    page = c_size_t()
    device.call("cuMemGetAllocationGranularity", byref(page), byref(wanted), _LEAST_GRANULARITY)
    size = -(-max(num_bytes, 1) // page.value) * page.value
    handle = c_uint64()
    device.call("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64(0))
    return ShareableMemory(device, handle.value, size)


def open_shareable(device: Device, descriptor: int, num_bytes: int) -> ShareableMemory:
    """Map another process's memory, or `num_bytes` of it, whole pages.

    The descriptor may be closed afterwards. Raises `GpuError` for a descriptor of anything else or
    of less memory, and for memory on a card that this one cannot read.
    """
    handle, found = c_uint64(), _Properties()
    device.call(
        "cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _BY_DESCRIPTOR
    )
    try:
        device.call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
        if found.location.kind != _ON_DEVICE:
            raise GpuError("the memory is not a card's")
        other, can_read = found.location.ordinal, c_int(1)
        if other != device.ordinal:
            device.call("cuDeviceCanAccessPeer", byref(can_read), c_int(device.ordinal), other)
        if not can_read.value:
            raise GpuError(f"card {device.ordinal} cannot read the memory of card {other}")
    except GpuError:
        device.call("cuMemRelease", handle)
        raise
    return ShareableMemory(device, handle.value, num_bytes)
