"""The memory of a pool, on the host or on a device, and where its pieces are in it.

Lanes need of a pool its addresses, so that a device's memory is one that is registered and written
like the host's. Only lanes that copy with the processor look at bytes: they are for host memory.

A node keeps prefixes in host memory beside its pool, and they are sent from there: block `n` of it
is number `num_pool_blocks + n` of a `push`, of a chunk and, on a lane that names source blocks, of
a frame. A chunk has blocks of one memory. Lanes of a node with a card see its ring in place of the
pool, so for them the numbers of host memory are behind those of the slots.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.rdma.aliases import Aliases
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.pool_shape import PoolShape

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class MemoryKind(Enum):
    """Who can read it."""

    HOST = "host"
    DEVICE = "device"


class FurtherAddresses(Protocol):
    """Further addresses of one memory, none of which is used twice: see `rdma.aliases`."""

    def make(self) -> int:
        """Return a new address of the same memory. Raises `OSError` when there is none."""

    def drop(self, address: int) -> None:
        """Take an address away that nobody uses; it is not used again."""

    def close(self) -> None:
        """Take all of them away. Idempotent."""


class PoolMemory(Protocol):
    """Memory that stays where it is as long as this object exists."""

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def aliases(self) -> FurtherAddresses:
        """Return what makes further addresses of it, by which a writer can be fenced off."""

    def bytes(self) -> Bytes:
        """Return it as uint8 `[num_bytes]`. Raises `ValueError` for memory of a device."""


class HostMemory:
    """A `PoolMemory` of this process: uint8 `[num_bytes]`, contiguous."""

    kind = MemoryKind.HOST

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.address = memory.ctypes.data
        self.num_bytes = memory.size

    def aliases(self) -> FurtherAddresses:
        return Aliases(self.address, self.num_bytes)

    def bytes(self) -> Bytes:
        return self._memory


class Pool:
    """Memory in the shape of a cache. `shape` says where a piece is."""

    def __init__(self, shape: PoolShape, memory: PoolMemory) -> None:
        """Look at memory as a pool; raise `ValueError` unless it has the bytes of the shape."""
        if memory.num_bytes != shape.num_bytes or not shape.num_blocks:
            raise ValueError(
                f"KV pool of {memory.num_bytes} bytes: wanted {shape.num_bytes}, "
                f"{shape.num_blocks} blocks of {len(shape.layers)} layers"
            )
        self.shape = shape
        self.memory = memory
        self._addresses = [
            np.array(
                [memory.address + shape.offset(index, plane) for plane in range(layer.num_planes)],
                np.uint64,
            )
            for index, layer in enumerate(shape.layers)
        ]
        is_host = memory.kind is MemoryKind.HOST
        self._planes = [self._planes_of(index) for index in range(len(shape.layers) * is_host)]

    @property
    def num_blocks(self) -> int:
        return self.shape.num_blocks

    def piece_bytes(self, layer: int) -> int:
        return self.shape.layers[layer].piece_bytes

    def num_planes(self, layer: int) -> int:
        return self.shape.layers[layer].num_planes

    def addresses(self, layer: int) -> Addresses:
        """Return the address of each plane of a layer: uint64 `[num_planes]`."""
        return self._addresses[layer]

    def planes(self, layer: int) -> list[Bytes]:
        """Return each plane of a layer `[num_blocks, piece_bytes]`: views of the memory.

        Raises `ValueError` for memory of a device.
        """
        self.check_on_host("a view of a layer")
        return self._planes[layer]

    def _planes_of(self, layer: int) -> list[Bytes]:
        memory, size = self.memory.bytes(), self.piece_bytes(layer)
        starts = (self.shape.offset(layer, plane) for plane in range(self.num_planes(layer)))
        num_bytes = self.num_blocks * size
        return [memory[start : start + num_bytes].reshape(-1, size) for start in starts]

    def check_on_host(self, user: str) -> None:
        """Raise `ValueError` for memory of a device, which `user` cannot read."""
        if self.memory.kind is not MemoryKind.HOST:
            raise ValueError(f"{user} wants a KV pool in host memory, this one is on a device")


def as_pool(pool: Pool | Bytes, layout: KVLayout) -> Pool:
    """Return a pool, or bytes of the host as one; raise `ValueError` unless they fit the layout."""
    if not isinstance(pool, Pool):
        return host_pool(pool, layout)
    if pool.shape.layers != layout.layers:
        raise ValueError(f"the KV pool is of another layout: wanted {layout.description}")
    return pool


def host_pool(memory: Bytes, layout: KVLayout) -> Pool:
    """Return the pool of these bytes: `[num_bytes]`, or, where layers are equal, `pool_shape`.

    Raises `ValueError` unless they are whole blocks of the layout.
    """
    num_blocks, rest = divmod(memory.size, layout.block_bytes)
    is_shaped = memory.ndim == 1 or memory.shape == layout.pool_shape(num_blocks)
    is_good = memory.dtype == np.uint8 and memory.flags.c_contiguous
    if not is_good or not is_shaped or rest or not num_blocks:
        raise ValueError(
            f"KV pool is {memory.dtype} {memory.shape}: wanted contiguous uint8, whole blocks of "
            f"{layout.block_bytes} bytes ({layout.description})"
        )
    return Pool(PoolShape.of(layout, num_blocks), HostMemory(memory.reshape(-1)))


def ring_pool(memory: Bytes, layout: KVLayout) -> Pool:
    """Return the ring of these bytes `[num_bytes]`, as a pool whose blocks are slots.

    Raises `ValueError` unless they are whole slots of the layout.
    """
    return Pool(PoolShape.ring(layout, memory.size // slot_bytes(layout)), HostMemory(memory))


def slot_bytes(layout: KVLayout) -> int:
    """Return the bytes of a ring for each slot: a block in one layer of each kind."""
    return sum(layer.num_bytes for layer in set(layout.layers))


class SourceMemory:
    """The memory to send from: `pool` and, if a node has it, `host` after it, in one layout."""

    def __init__(self, pool: Pool, host: Pool | None = None) -> None:
        """Raise `ValueError` for other memory that is not the host's, or of another layout."""
        if host is not None:
            host.check_on_host("what is sent beside a pool")
            if host.shape.layers != pool.shape.layers:
                raise ValueError("blocks of two layouts cannot be sent as those of one pool")
        self.pool, self._host = pool, host
        self.num_pool_blocks = pool.num_blocks
        self.num_host_blocks = 0 if host is None else host.num_blocks

    @property
    def num_blocks(self) -> int:
        """The blocks of both."""
        return self.num_pool_blocks + self.num_host_blocks

    def place(self, chunk: LayerChunk) -> tuple[Pool, LayerChunk]:
        """Return the memory that a chunk is in, and the chunk as one of that memory alone."""
        pool, blocks = self.place_blocks(chunk.source_blocks)
        return pool, chunk if pool is self.pool else replace(chunk, source_blocks=blocks)

    def place_blocks(self, blocks: Blocks) -> tuple[Pool, Blocks]:
        """Return the memory that has these blocks, all of one memory, and their numbers there."""
        if self._host is None or int(blocks[0]) < self.num_pool_blocks:
            return self.pool, blocks
        return self._host, blocks - np.uint32(self.num_pool_blocks)
