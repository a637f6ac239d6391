"""The KV cache: one allocation, seen layer by layer, and as bytes by KV transfers.

On a CPU the bytes are the cache's own memory. On another device they are a mirror in host memory:
blocks are staged out before they are sent (layer by layer while a step computes them) and staged in
after they have landed, beside the steps of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from common.errors import ConfigError
from common.kv_layout import STORED_BYTES, KVLayout
from engine.core.plan import OnLayer
from engine.runner.framework import has_gpu, paddle
from engine.runner.landings_in import GpuSide, LandingCopy, LandingsIn
from engine.runner.layers_out import DeviceCopy, FinishedCopy, LayerCopy, LayersOut

HostMemory = Callable[[int, bool], np.ndarray | None]
"""Allocates host memory that other processes can read: `(num_bytes, is_touched)`.

Returns uint8 `[num_bytes]`, zeros, writable, or None if there is none. With `is_touched` its pages
are taken from the system at once.
"""


MIN_BLOCKS = 2
_CACHE_LINE_BYTES = 64


class KVCache:
    """`[num_layers, 2, num_blocks, num_kv_heads, block_size, slot items]`; 2 is key, value.

    A slot has `head_dim` items of the layout's dtype. With int8 four more bytes are its scale, a
    float (`kv_formats`).
    """

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
        """Whether `host_bytes` is other memory than what is computed in."""
        self._copy_stream: paddle.device.Stream | None = None
        self._landings: LandingsIn | None = None
        self.allocate(memory_bytes, host_memory=host_memory)

    def allocate(
        self, memory_bytes: int, *, host_memory: HostMemory | None = None, is_touched: bool = True
    ) -> None:
        """Allocate as many blocks as fit, all zero, in place of those that the cache has.

        With `is_touched` a CPU's cache takes all of its memory from the system now, and not when
        its blocks are first used. Raises `ConfigError` when fewer than two blocks fit.
        """
        layout = self.layout
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"kv_cache_memory is {memory_bytes} bytes: wanted at least "
                f"{MIN_BLOCKS * layout.block_bytes}, two blocks of {layout.block_bytes} bytes "
                f"({layout.block_size} tokens)"
            )
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
        """uint8 `[num_layers, 2, num_blocks, piece_bytes]`, writable."""

    def layers_out(self, slots: np.ndarray, on_layer: OnLayer | None) -> LayersOut:
        """Return the reporter of layers for a step that computes into `slots`.

        A slot is block * block_size + offset in the block. `on_layer` is called for each computed
        layer when `host_bytes` holds these blocks in that layer.
        """
        if on_layer is None or not self.is_mirrored:
            return LayersOut(on_layer, None)
        block_ids = np.unique(slots // self.layout.block_size)
        return LayersOut(on_layer, lambda layer: self._start_copy(layer, block_ids))

    def _start_copy(self, index: int, block_ids: np.ndarray) -> LayerCopy:
        if self.tensor.place.is_cpu_place():
            self._stage_layer_out(index, block_ids, paddle.to_tensor(block_ids))
            return FinishedCopy()
        if self._copy_stream is None:
            self._copy_stream = paddle.device.Stream()
        return DeviceCopy(self.layer(index), block_ids, self.host_bytes[index], self._copy_stream)

    def stage_out(self, block_ids: Sequence[int]) -> None:
        """Copy these blocks from the device to `host_bytes`."""
        if not self.is_mirrored:
            return
        ids = np.asarray(block_ids)
        places = paddle.to_tensor(ids)
        for index in range(self.layout.num_layers):
            self._stage_layer_out(index, ids, places)

    def _stage_layer_out(self, index: int, ids: np.ndarray, places: paddle.Tensor) -> None:
        for source, host in zip(self.layer(index), self.host_bytes[index], strict=True):
            host[ids] = source[places].view("uint8").cpu().numpy().reshape(len(ids), -1)

    def stage_in(self, block_ids: Sequence[int]) -> None:
        """Copy these blocks from `host_bytes` to the device."""
        if not self.is_mirrored:
            return
        ids = list(block_ids)
        places, shape = paddle.to_tensor(ids), [len(ids), *self.tensor.shape[3:]]
        for index in range(self.layout.num_layers):
            for target, landed in zip(self.layer(index), self.host_bytes[index], strict=True):
                pieces = paddle.to_tensor(np.ascontiguousarray(landed[ids]))
                target[places] = pieces.view(self.layout.dtype).reshape(shape)

    def begin_stage_in(self, block_ids: Sequence[int]) -> LandingCopy | FinishedCopy:
        """Begin to copy these blocks from `host_bytes` to the device, beside running steps.

        Until the copy is done no step may use them, and nothing may write them in `host_bytes`.
        """
        if not self.is_mirrored or self.tensor.place.is_cpu_place():
            self.stage_in(block_ids)
            return FinishedCopy()
        if self._landings is None:
            side = GpuSide(self.layer, self.host_bytes, self.layout.dtype)
            self._landings = LandingsIn(
                side,
                num_layers=self.layout.num_layers,
                block_bytes=self.layout.layer_bytes,
            )
        return self._landings.begin(block_ids)

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
