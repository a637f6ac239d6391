"""The KV cache on a card."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from common.errors import InternalError
from common.kv.kv_layout import KVLayout
from engine.core.blocks.cache_copy import CopyUnderWay
from engine.core.runner_contract import OnLayer
from engine.runner.cache.contract import HostMemory, num_blocks_in
from engine.runner.cache.device_copies import DeviceCopies
from engine.runner.cache.layers_out import LayersOut
from engine.runner.gpu.cache.card_pool import GpuCardPool
from engine.runner.gpu.cache.copies import CardSide
from engine.runner.gpu.cache.layer_ends import LayerEnds, QueuedLayers, UntoldLayers
from engine.runner.gpu.cache.pinned import PinnedBuffers
from engine.runner.gpu.cuda_driver import Device, GpuError, Memory, OutOfMemory
from engine.runner.gpu.launcher import BindableKernel, KernelSpec
from engine.runner.gpu.launches import KVPool
from engine.runner.gpu.shareable import allocate_shareable

_logger = logging.getLogger("pdserve.engine")


class GpuCache:
    """A `cache.contract.Cache` on the card, whose heads lie as `kernels/slots.py` says."""

    is_mirrored = True

    def __init__(
        self,
        device: Device,
        make_kernel: Callable[[KernelSpec], BindableKernel],
        stream: int,
        layout: KVLayout,
        memory_bytes: int,
    ) -> None:
        self.layout = layout
        self._device, self._stream = device, stream
        self._memory: Memory | None = None
        self._layer_ends = LayerEnds(device, stream, layout.num_layers)
        self.allocate(memory_bytes)
        buffers = PinnedBuffers(device)
        side = CardSide(device, make_kernel, lambda: self.pool, stream, buffers)
        sizes = [layer.num_bytes for layer in layout.layers]
        self._copies = DeviceCopies(side, block_bytes=sizes)
        self.card_pool = GpuCardPool(
            device, make_kernel, lambda: self.pool, self._whole, stream, buffers, self._layer_ends
        )  # fmt: skip

    def allocate(
        self, memory_bytes: int, *, host_memory: HostMemory | None = None, is_touched: bool = True
    ) -> None:
        layout = self.layout
        self.num_blocks = num_blocks_in(memory_bytes, layout)
        self._layer_ends.forget(self.num_blocks)
        num_bytes = self.num_blocks * layout.block_bytes
        self._device.use()
        if self._memory is not None:
            self._device.synchronize_all()  # copies are queued on streams of their own
            self._memory.close()
        self._memory = self._allocate(num_bytes)
        self._device.fill(self._memory.address, 0, num_bytes, self._stream)

    @property
    def host_bytes(self) -> np.ndarray:
        """See `contract.Cache`. Raises `InternalError`."""
        raise InternalError("the KV cache is on a card: it has no host view")

    def _allocate(self, num_bytes: int) -> Memory:
        """Return memory of the card, which other processes can map if the driver supports that.

        Raises `ConfigError` where `num_bytes` are not free.
        """
        with self._device.room_for(f"a KV cache of {num_bytes >> 20} MiB"):
            try:
                return allocate_shareable(self._device, num_bytes)
            except OutOfMemory:
                raise
            except GpuError as error:
                _logger.warning("other processes cannot map the KV cache: %s", error)
                return self._device.allocate(num_bytes)

    def _whole(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def close(self) -> None:
        """Wait for the card; free its memory, and unpin the ring's pages.

        No work that uses them may be queued afterwards.
        """
        self._device.use()
        self._device.synchronize_all()
        self._layer_ends.close()
        self.card_pool.close()
        self._whole().close()

    @property
    def pool(self) -> KVPool:
        """The address and the shape of keys and values, for kernels."""
        assert self._memory is not None
        layout = self.layout
        piece_bytes = layout.piece_bytes
        return KVPool(
            self._memory.address, self.num_blocks, layout.block_size, piece_bytes,
            has_scales=layout.dtype == "int8",
        )  # fmt: skip

    def layers_out(self, slots: np.ndarray, on_layer: OnLayer | None) -> LayersOut:
        """Report the layers when all are queued: a connector's reads wait on the card."""
        ends = self._layer_ends
        ends.begin(slots // self.layout.block_size)
        if on_layer is None:
            return UntoldLayers(ends)
        return LayersOut(on_layer, QueuedLayers(ends).mark, most_under_way=ends.num_layers)

    def begin_copy(
        self,
        block_ids: Sequence[int],
        host: np.ndarray,
        host_ids: Sequence[int],
        *,
        is_out: bool,
    ) -> CopyUnderWay:
        return self._copies.begin(block_ids, host, host_ids, is_out=is_out)
