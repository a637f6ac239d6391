"""A KV cache that plays to be on a device: its bytes for transfers are a mirror of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from common.kv.kv_layout import KVLayout
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu import back_end as cpu
from engine.runner.paddle import back_end as paddle


class MirroredCache(KVCache):
    """A `KVCache` with a mirror on any machine."""

    def __init__(self, layout: KVLayout, memory_bytes: int, **rest: Any) -> None:
        super().__init__(layout, memory_bytes, **(rest | {"is_mirrored": True}))


@contextmanager
def mirrored_caches() -> Iterator[None]:
    """Let the back ends make mirrored caches."""
    with (
        patch.object(cpu, "KVCache", MirroredCache),
        patch.object(paddle, "KVCache", MirroredCache),
    ):
        yield
