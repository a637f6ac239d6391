"""The KV cache: one Paddle allocation, seen layer by layer, and by the transfer as bytes.

On a CPU the bytes are the cache's own memory. On another device they are a mirror in host memory:
blocks are staged out before they are sent and staged in after they have landed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.runner.framework import paddle


class KVCache:
    """`[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`; 2 is key, value."""

    def __init__(
        self, layout: KVLayout, memory_bytes: int, *, is_mirrored: bool | None = None
    ) -> None:
        """Allocate as many blocks as fit; `ConfigError` when fewer than two do.

        `is_mirrored` None: as the device needs it.
        """
        self.layout = layout
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks < 2:
            raise ConfigError(
                f"kv_cache_memory is {memory_bytes} bytes: wanted at least "
                f"{2 * layout.block_bytes}, two blocks of {layout.block_bytes} bytes "
                f"({layout.block_size} tokens)"
            )
        self.tensor = paddle.zeros(
            [
                layout.num_layers,
                2,
                self.num_blocks,
                layout.num_kv_heads,
                layout.block_size,
                layout.head_dim,
            ],
            dtype=layout.dtype,
        )
        if is_mirrored is None:
            is_mirrored = not self.tensor.place.is_cpu_place()
        # Pages of the mirror are touched when blocks are staged, so an unused one costs nothing.
        self.host_bytes = np.zeros(self._bytes_shape, np.uint8) if is_mirrored else self._bytes()
        """uint8 `[num_layers, 2, num_blocks, piece_bytes]`, writable."""
        self._is_mirrored = is_mirrored

    def stage_out(self, block_ids: Sequence[int]) -> None:
        """Bring what was computed in these blocks into `host_bytes`."""
        if not self._is_mirrored:
            return
        ids = list(block_ids)
        places = paddle.to_tensor(ids)
        for index in range(self.layout.num_layers):
            for source, host in zip(self.layer(index), self.host_bytes[index], strict=True):
                host[ids] = source[places].view("uint8").cpu().numpy().reshape(len(ids), -1)

    def stage_in(self, block_ids: Sequence[int]) -> None:
        """Bring what landed in `host_bytes` into these blocks."""
        if not self._is_mirrored:
            return
        ids = list(block_ids)
        places, shape = paddle.to_tensor(ids), [len(ids), *self.tensor.shape[3:]]
        for index in range(self.layout.num_layers):
            for target, landed in zip(self.layer(index), self.host_bytes[index], strict=True):
                pieces = paddle.to_tensor(np.ascontiguousarray(landed[ids]))
                target[places] = pieces.view(self.layout.dtype).reshape(shape)

    def layer(self, index: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Views of one layer's keys and values `[num_blocks, kv_heads, block_size, head_dim]`."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def as_numpy(self) -> np.ndarray:
        """The cache's own memory, writable (CPU only)."""
        if not self.tensor.place.is_cpu_place():
            raise ConfigError(f"the KV cache lives on {self.tensor.place}: it has no host view")
        return np.from_dlpack(self.tensor)

    @property
    def _bytes_shape(self) -> tuple[int, int, int, int]:
        layout = self.layout
        return (layout.num_layers, 2, self.num_blocks, layout.piece_bytes)

    def _bytes(self) -> np.ndarray:
        return self.as_numpy().view(np.uint8).reshape(self._bytes_shape)
