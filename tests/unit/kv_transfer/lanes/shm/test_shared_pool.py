"""A pool that other processes read: what an offer may name, and what becomes of the memory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.shm.huge_pages import HUGE_PAGE_BYTES
from kv_transfer.lanes.shm.shared_pool import NotShared, SharedPool, map_pool
from kv_transfer.shared.pool_shape import PoolShape
from pdserve.local_cluster.child_process import ending_with_parent

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
NUM_BLOCKS = 5
NUM_BYTES = NUM_BLOCKS * LAYOUT.block_bytes
VERSION, PID, FD, NONCE, SIZE, BLOCKS = range(6)


def new_pool(*, is_touched: bool = False) -> SharedPool:
    pool = SharedPool(NUM_BYTES, is_touched=is_touched)
    pool.memory[:] = np.random.default_rng(3).integers(0, 256, NUM_BYTES, np.uint8)
    return pool


def changed(pool: SharedPool, **fields: object) -> bytes:
    """The pool's offer with some fields of other values."""
    offer = msgpack.unpackb(pool.offer(NUM_BLOCKS))
    for name, value in fields.items():
        offer[{"version": 0, "pid": 1, "fd": 2, "nonce": 3, "size": 4, "blocks": 5}[name]] = value
    packed: bytes = msgpack.packb(offer)
    return packed


def open_files() -> set[tuple[str, str]]:
    """Return each open descriptor with its target."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The one that lists them, and others' too.
            found.add((path.name, str(path.readlink())))
    return found


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    files, mappings = open_files(), num_mappings()
    yield
    gc.collect()
    # Threads of libraries may close what earlier tests left to them.
    assert not open_files() - files
    assert num_mappings() == mappings


@pytest.mark.parametrize("is_touched", [True, False])
def test_a_reader_sees_what_the_owner_writes(is_touched: bool) -> None:
    pool = SharedPool(NUM_BYTES, is_touched=is_touched)
    assert pool.memory.ctypes.data % mmap.PAGESIZE == 0
    assert pool.memory.size == NUM_BYTES
    assert not pool.memory.any()
    seen = map_pool(pool.offer(NUM_BLOCKS), LAYOUT).memory.bytes()
    assert seen.shape == (NUM_BYTES,)
    pool.memory[:] = np.arange(NUM_BYTES, dtype=np.uint32).astype(np.uint8)
    assert np.array_equal(seen.reshape(-1), pool.memory)


def test_a_ring_is_mapped_as_one() -> None:
    """A slot is a block in any layer, so the same bytes are twice as many slots as blocks."""
    pool = new_pool()
    ring = map_pool(pool.offer(2 * NUM_BLOCKS, is_ring=True), LAYOUT)
    assert ring.shape == PoolShape.ring(LAYOUT, 2 * NUM_BLOCKS)
    wanted = pool.memory.reshape(2, 2 * NUM_BLOCKS, LAYOUT.piece_bytes)
    for layer in range(2):
        assert np.array_equal(np.array(ring.planes(layer)), wanted)


def test_owner_and_reader_map_it_where_large_pages_fit() -> None:
    pool = new_pool(is_touched=True)
    seen = map_pool(pool.offer(NUM_BLOCKS), LAYOUT).memory.bytes()
    for memory in (pool.memory, seen):
        assert (memory.ctypes.data - mmap.PAGESIZE) % HUGE_PAGE_BYTES == 0


def test_a_reader_cannot_write() -> None:
    pool = new_pool()
    seen = map_pool(pool.offer(NUM_BLOCKS), LAYOUT).memory.bytes()
    with pytest.raises(ValueError, match="read-only"):
        seen[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        seen.flags.writeable = True


def test_what_is_mapped_outlives_its_owner() -> None:
    pool = new_pool()
    wanted = pool.memory.copy()
    offer = pool.offer(NUM_BLOCKS)
    seen = map_pool(offer, LAYOUT).memory.bytes()
    del pool
    gc.collect()
    assert np.array_equal(seen.reshape(-1), wanted)
    with pytest.raises(NotShared):
        map_pool(offer, LAYOUT)


_OWNER = """
import os, signal, sys
import numpy as np
from kv_transfer.lanes.shm.shared_pool import SharedPool
pool = SharedPool({num_bytes}, is_touched=True)
pool.memory[:] = 7
sys.stdout.buffer.write(pool.offer({num_blocks}))
sys.stdout.buffer.flush()
os.close(1)
signal.pause()
"""


def test_the_pool_of_a_process_that_is_killed_stays_readable_until_it_is_dropped() -> None:
    code = _OWNER.format(num_bytes=NUM_BYTES, num_blocks=NUM_BLOCKS)
    command = ending_with_parent([sys.executable, "-c", code])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            offer = owner.stdout.read()
            seen = map_pool(offer, LAYOUT).memory.bytes()
        finally:
            owner.kill()
            owner.wait()
    assert np.all(seen == 7)
    with pytest.raises(NotShared):
        map_pool(offer, LAYOUT)


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        msgpack.packb({"pid": 1}),
        msgpack.packb([1, 2, 3]),
        msgpack.packb([1, 1, 0, b"n" * 16, NUM_BYTES, NUM_BLOCKS, 0]),
    ],
)
def test_what_is_no_offer(offer: bytes) -> None:
    with pytest.raises(NotShared):
        map_pool(offer, LAYOUT)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"version": 3},
        {"version": 2, "blocks": 2 * NUM_BLOCKS + 1},
        {"pid": "self"},
        {"pid": -1},
        {"pid": 0},
        {"pid": 1 << 62},
        {"pid": (1 << 64) - 1},
        {"pid": True},
        {"pid": 3.5},
        {"fd": "../../etc/passwd"},
        {"fd": -1},
        {"fd": 1 << 40},
        {"fd": None},
        {"nonce": b"n" * 16},
        {"nonce": b""},
        {"nonce": "n" * 16},
        {"blocks": 0},
        {"blocks": NUM_BLOCKS + 1},
        {"size": 0, "blocks": 0},
        {"size": NUM_BYTES + LAYOUT.block_bytes, "blocks": NUM_BLOCKS + 1},
        {"size": NUM_BYTES - LAYOUT.block_bytes, "blocks": NUM_BLOCKS - 1},
        {"size": LAYOUT.block_bytes << 40, "blocks": 1 << 40},
    ],
    ids=str,
)
def test_offers_that_lie(fields: dict[str, object]) -> None:
    pool = new_pool()
    with pytest.raises(NotShared):
        map_pool(changed(pool, **fields), LAYOUT)
    map_pool(pool.offer(NUM_BLOCKS), LAYOUT)


def test_a_layout_that_is_not_the_pools() -> None:
    other = KVLayout(**{**_fields(LAYOUT), "num_layers": 3})
    with pytest.raises(NotShared, match="is not 5 blocks"):
        map_pool(new_pool().offer(NUM_BLOCKS), other)


def _fields(layout: KVLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__slots__}


SIZE_BYTES = mmap.PAGESIZE + NUM_BYTES


def _file(path: Path) -> int:
    path.write_bytes(bytes(SIZE_BYTES))
    return os.open(path, os.O_RDWR)


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    # Opened for both ends; whoever opened it for reading alone would wait.
    return os.open(path, os.O_RDWR)


def _memory(name: str, seals: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


_ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
STRANGERS = {
    "a file": (_file, "not a pool"),
    "a named pipe": (_fifo, "not memory"),
    "a folder": (lambda path: os.open(path.parent, os.O_RDONLY), "not memory"),
    "a device": (lambda path: os.open("/dev/zero", os.O_RDWR), "not memory"),
    "a socket": (lambda path: socket.socket().detach(), "No such device|not memory"),
    "memory of another kind": (lambda path: _memory("other", _ALL), "not a pool"),
    "memory that may shrink": (lambda path: _memory("pdserve-kv", 0), "might shrink"),
    "memory whose seals are open": (
        lambda path: _memory("pdserve-kv", _ALL & ~fcntl.F_SEAL_SEAL),
        "might shrink",
    ),
    "an empty pool": (lambda path: _memory("pdserve-kv", _ALL), "another pool"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_files_that_are_no_pool_are_not_read(name: str, tmp_path: Path) -> None:
    make, words = STRANGERS[name]
    fd = make(tmp_path / "file")
    try:
        with pytest.raises(NotShared, match=words):
            map_pool(changed(new_pool(), fd=fd), LAYOUT)
    finally:
        os.close(fd)


def test_a_pool_that_says_it_is_longer_than_it_is() -> None:
    """Its maker wrote the header too; bytes behind its end must never be read."""
    pool = new_pool()
    fd = _memory("pdserve-kv", 0)
    try:
        number = 2 * NUM_BLOCKS
        size = number * LAYOUT.block_bytes
        header = bytearray(os.pread(msgpack.unpackb(pool.offer(NUM_BLOCKS))[FD], 64, 0))
        header[:] = header.replace(NUM_BYTES.to_bytes(8, "little"), size.to_bytes(8, "little"))
        os.pwrite(fd, header, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL)
        with pytest.raises(NotShared, match="another size"):
            map_pool(changed(pool, fd=fd, size=size, blocks=number), LAYOUT)
    finally:
        os.close(fd)


def test_a_pool_that_has_the_numbers_of_another_is_not_taken_for_it() -> None:
    """The number of a file that was closed goes to the next one that is opened."""
    first = new_pool()
    offer = first.offer(NUM_BLOCKS)
    del first
    gc.collect()
    second = new_pool()
    assert msgpack.unpackb(second.offer(NUM_BLOCKS))[FD] == msgpack.unpackb(offer)[FD]
    with pytest.raises(NotShared, match="another pool"):
        map_pool(offer, LAYOUT)


def test_the_owner_itself_cannot_make_it_shorter() -> None:
    pool = new_pool()
    fd = msgpack.unpackb(pool.offer(NUM_BLOCKS))[FD]
    for size in (0, SIZE_BYTES // 2, 2 * SIZE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(OSError, match="allocate"):
        SharedPool(1 << 46, is_touched=True)


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no seals here")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match="no seals"):
        SharedPool(NUM_BYTES, is_touched=False)


def test_children_do_not_inherit_it() -> None:
    pool = new_pool()
    fd = msgpack.unpackb(pool.offer(NUM_BLOCKS))[FD]
    code = f"import os, sys; sys.exit(os.path.exists('/proc/self/fd/{fd}'))"
    subprocess.run([sys.executable, "-c", code], check=True, close_fds=False)
