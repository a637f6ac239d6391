"""The KV cache: one Paddle allocation, seen layer by layer, and by the transfer as bytes."""

from __future__ import annotations

import numpy as np

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.runner.framework import paddle


class KVCache:
    """`[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`; 2 is key, value."""

    def __init__(self, layout: KVLayout, memory_bytes: int) -> None:
        """Allocate as many blocks as fit; `ConfigError` when fewer than two do."""
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

    def layer(self, index: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Views of one layer's keys and values `[num_blocks, kv_heads, block_size, head_dim]`."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def as_numpy(self) -> np.ndarray:
        """The cache's own memory, writable (CPU only)."""
        if not self.tensor.place.is_cpu_place():
            raise ConfigError(f"the KV cache lives on {self.tensor.place}: it has no host view")
        return np.from_dlpack(self.tensor)

    def as_bytes(self) -> np.ndarray:
        """The same memory as uint8 `[num_layers, 2, num_blocks, piece_bytes]`."""
        layout = self.layout
        shape = (layout.num_layers, 2, self.num_blocks, layout.piece_bytes)
        return self.as_numpy().view(np.uint8).reshape(shape)
