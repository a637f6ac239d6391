"""The KV cache: one allocation, seen layer by layer, and as bytes by KV transfers.

On a CPU the bytes are the cache's own memory. On another device they are a mirror in host memory:
blocks are staged out before they are sent (layer by layer while a step computes them) and staged in
after they have landed. All copies between the device and host memory are made beside the steps, on
a stream and a thread of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from common.errors import ConfigError
from common.kv.kv_layout import STORED_BYTES, KVLayout
from engine.core.blocks.cache_copy import CopyUnderWay
from engine.core.runner_contract import OnLayer
from engine.runner.cache.contract import HostMemory, num_blocks_in
from engine.runner.cache.device_copies import (
    DeviceCopies,
    DeviceSide,
    GpuSide,
    Submit,
    begin_layer_out,
    copying_thread,
)
from engine.runner.cache.layers_out import FinishedCopy, LayerCopy, LayersOut, ThreadCopy
from engine.runner.paddle_import import has_gpu, paddle

_CACHE_LINE_BYTES = 64


class KVCache:
    """A `contract.Cache` for the CPU kernels and for Paddle's operators.

    `[num_layers, 2, num_blocks, num_kv_heads, block_size, slot items]`; 2 is key, value.

    A slot has `head_dim` items of the layout's dtype. With int8 four more bytes are its scale, a
    float (`kv_formats`).
    """

    card_pool: object | None = None

    def __init__(
        self,
        layout: KVLayout,
        memory_bytes: int,
        *,
        is_mirrored: bool | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Allocate as `allocate` does. `is_mirrored` None: mirrored if the device needs it."""
        self.layout = layout
        self.is_mirrored = has_gpu() if is_mirrored is None else is_mirrored
        self.allocate(memory_bytes, host_memory=host_memory)

    def allocate(
        self, memory_bytes: int, *, host_memory: HostMemory | None = None, is_touched: bool = True
    ) -> None:
        self.num_blocks = num_blocks_in(memory_bytes, self.layout)
        is_touched = is_touched and not self.is_mirrored
        memory = host_memory(self._num_bytes, is_touched) if host_memory else None
        if memory is None:
            memory = _zeros(self._num_bytes, is_touched=is_touched)
        self._memory = memory
        self._tensor = self._new_tensor() if self.is_mirrored else None
        # Pages of the mirror are touched when blocks are staged, so unused ones take no memory.
        if self.is_mirrored:
            self.host_bytes = memory.reshape(self._bytes_shape)
        else:
            self.host_bytes = self._bytes()

    def layers_out(self, slots: np.ndarray, on_layer: OnLayer | None) -> LayersOut:
        if on_layer is None or not self.is_mirrored:
            return LayersOut(on_layer, None)
        block_ids = np.unique(slots // self.layout.block_size)
        return LayersOut(on_layer, lambda layer: self._start_copy(layer, block_ids))

    def _start_copy(self, index: int, block_ids: np.ndarray) -> LayerCopy:
        side, host = self._device_side, self.host_bytes[index]
        if side is None:
            self._copy_layer_out(index, block_ids, host, block_ids)
            return FinishedCopy()
        return ThreadCopy(begin_layer_out(side, self._submit, index, block_ids, host, block_ids))

    def begin_copy(
        self,
        block_ids: Sequence[int],
        host: np.ndarray,
        host_ids: Sequence[int],
        *,
        is_out: bool,
    ) -> CopyUnderWay:
        """Begin a copy; a cache that only plays to be on a device is copied at once."""
        if self._device_side is not None:
            return self._copies.begin(block_ids, host, host_ids, is_out=is_out)
        ours, theirs = np.asarray(block_ids), np.asarray(host_ids)
        copy_layer = self._copy_layer_out if is_out else self._copy_layer_in
        for index in range(self.layout.num_layers):
            copy_layer(index, ours, host[index], theirs)
        return FinishedCopy()

    def _copy_layer_out(
        self, index: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray
    ) -> None:
        places = paddle.to_tensor(block_ids)
        for source, part in zip(self.layer(index), host, strict=True):
            part[host_ids] = source[places].view("uint8").cpu().numpy().reshape(len(host_ids), -1)

    def _copy_layer_in(
        self, index: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray
    ) -> None:
        places, shape = paddle.to_tensor(block_ids), [len(block_ids), *self.tensor.shape[3:]]
        for target, part in zip(self.layer(index), host, strict=True):
            pieces = paddle.to_tensor(np.ascontiguousarray(part[host_ids]))
            target[places] = pieces.view(self.layout.dtype).reshape(shape)

    @cached_property
    def _device_side(self) -> DeviceSide | None:
        """What copies consist of; None: the memory of a CPU, which is copied at once."""
        return None if self.tensor.place.is_cpu_place() else GpuSide(self.layer, self.layout.dtype)

    @cached_property
    def _submit(self) -> Submit:
        return copying_thread()

    @cached_property
    def _copies(self) -> DeviceCopies:
        assert self._device_side is not None
        sizes = [layer.num_bytes for layer in self.layout.layers]
        return DeviceCopies(self._device_side, block_bytes=sizes, submit=self._submit)

    @property
    def tensor(self) -> paddle.Tensor:
        """The cache for Paddle's operators; on a CPU it is made of the memory at its first use."""
        if self._tensor is None:
            memory = paddle.from_dlpack(self._memory)
            self._tensor = memory.view(self.layout.dtype).reshape(self._tensor_shape)
        return self._tensor

    def layer(self, index: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return a layer's keys and values `[num_blocks, kv_heads, block_size, slot items]`."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def slots(self) -> np.ndarray:
        """Return the cache's own memory, writable; `ConfigError` if it is not on a CPU.

        It is uint8 `[num_layers, 2, num_blocks, num_kv_heads, block_size, slot_bytes]`.
        """
        stored = self._memory
        if self.is_mirrored:
            if not self.tensor.place.is_cpu_place():
                raise ConfigError(f"the KV cache lives on {self.tensor.place}: it has no host view")
            stored = np.from_dlpack(self.tensor.view("uint8"))
        layout = self.layout
        heads = (layout.num_kv_heads, layout.block_size, layout.slot_bytes)
        return stored.reshape(*layout.pool_shape(self.num_blocks)[:3], *heads)

    def _new_tensor(self) -> paddle.Tensor:
        return paddle.zeros(self._tensor_shape, dtype=self.layout.dtype)

    @property
    def _tensor_shape(self) -> list[int]:
        layout = self.layout
        num_items = layout.slot_bytes // STORED_BYTES[layout.dtype]
        heads = [layout.num_kv_heads, layout.block_size, num_items]
        return [*layout.pool_shape(self.num_blocks)[:3], *heads]

    @property
    def _num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def _bytes_shape(self) -> tuple[int, int, int, int]:
        return self.layout.pool_shape(self.num_blocks)

    def _bytes(self) -> np.ndarray:
        return self.slots().reshape(self._bytes_shape)


def _zeros(num_bytes: int, *, is_touched: bool) -> np.ndarray:
    """Return zeros that start on a cache line; with `is_touched` their pages are taken now."""
    memory = np.zeros(num_bytes + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    if is_touched:
        memory.fill(0)
    return memory[start : start + num_bytes]
