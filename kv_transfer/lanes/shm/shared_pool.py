"""A KV pool in shared memory: one process allocates it, others on the same host read it.

It is an anonymous file (`memfd_create`) that has no name in any file system: the kernel frees it
with the last process that has it open or mapped, however that process ended. A reader opens it as
`/proc/PID/fd/FD`. If process ids mean other processes (another container), or the file may not be
opened (another user), the reader finds no such pool, and the two use another lane.

    page 0      magic, version, nonce, size of the pool in bytes
    page 1 …    the pool

An offer consists of integers, so a hostile sender can at most name a file that some process has
open. The reader inspects it without opening it (`O_PATH`). It must be an anonymous file that can
never shrink (its seals guarantee that), since otherwise reading it could kill the reader. Then its
first page must hold the nonce of the offer, which proves that the numbers still name the offered
pool.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import numpy as np

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.pool_memory import Bytes, Pool, host_pool, ring_pool, slot_bytes
from kv_transfer.lanes.shm.huge_pages import FileMapping

_UNPACKING_ERRORS = (
    ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException,
)  # fmt: skip
_HEADER = struct.Struct("<16sI16sQ")
_MAGIC = b"pdserve KV pool\0"
_VERSION = 1
_RING_VERSION = 2
"""The version of offers of a ring; releases that know the first one alone refuse them."""
_NONCE_BYTES = 16
_FILE_NAME = "pdserve-kv"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23
_LARGEST_INT = (1 << 63) - 1


class NotShared(Exception):
    """A pool that was offered cannot be read from here; the text gives the reason."""


class SharedPool:
    """The owner's side. `memory`: uint8 `[num_bytes]`, zeros, page-aligned, writable.

    The memory is freed when this object and all arrays made of it are gone.
    """

    def __init__(self, num_bytes: int, *, is_touched: bool) -> None:
        """Allocate; with `is_touched` all of the memory now, not when it is first written.

        Raises `OSError` where the system has no such memory, or not enough.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        if is_touched:
            # This checks the size alone, as for private memory. Otherwise a size that the machine
            # does not have would only show when the kernel kills this process.
            mmap.mmap(-1, num_bytes).close()
        self._num_bytes = num_bytes
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            whole = self._map(fd, is_touched)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.memory: Bytes = whole.memory[mmap.PAGESIZE :]

    def _map(self, fd: int, is_touched: bool) -> FileMapping:
        size = mmap.PAGESIZE + self._num_bytes
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        whole = FileMapping(fd, size, is_writable=True)
        whole.want_huge_pages()
        if is_touched:
            _touch(whole, fd)
            whole.join_pages()
        header = _HEADER.pack(_MAGIC, _VERSION, self._nonce, self._num_bytes)
        whole.memory[: _HEADER.size] = np.frombuffer(header, np.uint8)
        return whole

    def __del__(self) -> None:
        # The file stays alive in its mappings.
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def offer(self, num_blocks: int, *, is_ring: bool = False) -> bytes:
        """Return what a process on this host needs to find the pool, which holds `num_blocks`.

        With `is_ring` these are slots.
        """
        version = _RING_VERSION if is_ring else _VERSION
        packed: bytes = msgpack.packb(
            [version, os.getpid(), self._fd, self._nonce, self._num_bytes, num_blocks]
        )
        return packed


def _touch(whole: FileMapping, fd: int) -> None:
    """Allocate all of the memory and map it in this process. Raises `OSError`."""
    try:
        whole.advise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14 does not support it.
            raise
        os.posix_fallocate(fd, 0, whole.memory.size)


@dataclass(frozen=True, slots=True)
class _Offer:
    pid: int
    fd: int
    nonce: bytes
    num_bytes: int
    num_blocks: int
    is_ring: bool


def pack_offers(offers: Sequence[bytes]) -> bytes:
    """Return the offers of a pool and, if there is one, of other memory, as one."""
    packed: bytes = offers[0] if len(offers) == 1 else msgpack.packb(offers)
    return packed


def unpacked_offers(offer: bytes) -> list[bytes]:
    """Return the offers that `pack_offers` made one of; any other bytes are those of one pool."""
    with contextlib.suppress(*_UNPACKING_ERRORS):
        match msgpack.unpackb(offer):
            case [bytes(pool), bytes(beside)]:
                return [pool, beside]
    return [offer]


def map_pool(offer: bytes, layout: KVLayout) -> Pool:
    """Return the offered pool, read-only.

    Raises `NotShared`, whatever `offer` is. The memory stays readable until the pool and all views
    of it are gone, also when its owner dies.
    """
    offered = _unpack(offer)
    block_bytes = slot_bytes(layout) if offered.is_ring else layout.block_bytes
    if offered.num_bytes != offered.num_blocks * block_bytes:
        raise NotShared(
            f"a pool of {offered.num_bytes} bytes is not {offered.num_blocks} blocks "
            f"of {block_bytes}"
        )
    try:
        fd = _open_sealed(offered)
        try:
            size = mmap.PAGESIZE + offered.num_bytes
            whole = FileMapping(fd, size, is_writable=False).memory
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        raise NotShared(f"process {offered.pid} shares no such memory: {error}") from None
    wanted = _HEADER.pack(_MAGIC, _VERSION, offered.nonce, offered.num_bytes)
    if whole[: _HEADER.size].tobytes() != wanted:
        raise NotShared(f"process {offered.pid} shares another pool")
    as_pool = ring_pool if offered.is_ring else host_pool
    return as_pool(whole[mmap.PAGESIZE :], layout)


def _unpack(offer: bytes) -> _Offer:
    try:
        fields = msgpack.unpackb(offer)
    except _UNPACKING_ERRORS:
        raise NotShared("the offer is not msgpack") from None
    is_known = type(fields) is list and len(fields) == 6
    if not is_known or fields[0] not in (_VERSION, _RING_VERSION):
        raise NotShared(f"the offer is not one of version {_VERSION} or {_RING_VERSION}")
    version, pid, fd, nonce, num_bytes, num_blocks = fields
    numbers = (pid, fd, num_bytes, num_blocks)
    if not all(type(number) is int and 0 <= number <= _LARGEST_INT for number in numbers):
        raise NotShared("the offer holds a value that is not a number")
    if type(nonce) is not bytes or len(nonce) != _NONCE_BYTES or num_blocks == 0:
        raise NotShared("the offer has no nonce, or no blocks")
    return _Offer(pid, fd, nonce, num_bytes, num_blocks, version == _RING_VERSION)


def _open_sealed(offered: _Offer) -> int:
    """Return a descriptor to map; raise `NotShared` or `OSError` unless mapping is safe."""
    path_fd = os.open(f"/proc/{offered.pid}/fd/{offered.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        # Opened through `path_fd`, not by name again: so the file cannot be exchanged meanwhile.
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            raise NotShared(f"file {offered.fd} of process {offered.pid} is not memory")
        link = Path(f"/proc/self/fd/{path_fd}")
        if not str(link.readlink()).startswith(f"/memfd:{_FILE_NAME}"):
            raise NotShared(f"file {offered.fd} of process {offered.pid} is not a pool")
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(path_fd)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise NotShared(f"the memory of process {offered.pid} might shrink")
        if os.fstat(fd).st_size != mmap.PAGESIZE + offered.num_bytes:
            raise NotShared(f"the memory of process {offered.pid} has another size")
    except BaseException:
        os.close(fd)
        raise
    return fd
