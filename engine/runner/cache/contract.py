"""What the runner and KV transfers need of a KV cache, wherever its memory is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from engine.core.blocks.cache_copy import CopyUnderWay
from engine.core.runner_contract import OnLayer
from engine.runner.cache.layers_out import LayersOut

HostMemory = Callable[[int, bool], np.ndarray | None]
"""Allocates host memory that other processes can read: `(num_bytes, is_touched)`.

Returns uint8 `[num_bytes]`, zeros, writable, or None if there is none. With `is_touched` its pages
are taken from the system at once.
"""

MIN_BLOCKS = 2


class Cache(Protocol):
    """A KV cache: blocks in the memory that steps compute in, and as bytes in host memory."""

    layout: KVLayout
    is_mirrored: bool
    """Whether steps compute in other memory than the host's; `host_bytes`, if any, is a mirror."""
    num_blocks: int

    @property
    def host_bytes(self) -> np.ndarray:
        """uint8 `[num_layers, 2, num_blocks, piece_bytes]`, writable.

        Raises `InternalError` for a cache with a `card_pool`, which has none.
        """

    @property
    def card_pool(self) -> object | None:
        """What a connector moves blocks of a cache on a card by (`kv_transfer.lanes.card_pool`).

        Blocks land and are sent on the card then. None: transfers read and write `host_bytes`.
        """

    def allocate(
        self, memory_bytes: int, *, host_memory: HostMemory | None = None, is_touched: bool = True
    ) -> None:
        """Allocate as many blocks as fit, all zero, in place of those that the cache has.

        A cache on a card does without `host_memory`. With `is_touched` a cache in host memory takes
        all of it from the system now, and not when its blocks are first used. Raises `ConfigError`
        when fewer than two blocks fit.
        """

    def layers_out(self, slots: np.ndarray, on_layer: OnLayer | None) -> LayersOut:
        """Return the reporter of layers for a step that computes into `slots`.

        A slot is block * block_size + offset in the block. `on_layer` is called for each computed
        layer when transfers can read these blocks in that layer.
        """

    def begin_copy(
        self,
        block_ids: Sequence[int],
        host: np.ndarray,
        host_ids: Sequence[int],
        *,
        is_out: bool,
    ) -> CopyUnderWay:
        """Begin to copy blocks to or from those of `host`, pairwise, beside running steps.

        `host` is `[num_layers, 2, blocks, piece_bytes]`: `host_bytes`, or other memory.
        """


def num_blocks_in(memory_bytes: int, layout: KVLayout) -> int:
    """Return how many blocks fit; `ConfigError` when fewer than two do."""
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"kv_cache_memory is {memory_bytes} bytes: wanted at least "
            f"{MIN_BLOCKS * layout.block_bytes}, two blocks of {layout.block_bytes} bytes "
            f"({layout.block_size} tokens)"
        )
    return num_blocks
