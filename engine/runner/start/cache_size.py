"""How many blocks the KV cache has: as configured, or what the largest step leaves."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import check_configured, kv_cache_bytes
from common.kv.token_budget import fit_max_model_len
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import BackEnd
from engine.runner.cache.contract import MIN_BLOCKS, Cache, HostMemory
from engine.runner.memory_meter import MemoryMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """What decides the size of a node's cache.

    `model_limit` is the model's longest sequence. The largest step has `max_chunk_tokens` tokens,
    `tokens_per_seq` of a decoding sequence.
    """

    model: ModelConfig
    engine: EngineConfig
    back_end: BackEnd
    model_limit: int
    tokens_per_seq: int
    max_chunk_tokens: int
    host_space: int
    host_memory: HostMemory | None

    @property
    def is_planned(self) -> bool:
        """Whether the size follows from a measurement."""
        return not self.engine.kv_cache_memory

    @property
    def _space_beside(self) -> int:
        """How much of the memory that has the cache is for swapped blocks and prefixes."""
        return self.host_space if self.back_end.is_on_host else 0

    def first_cache(self, layout: KVLayout, meter: MemoryMeter) -> tuple[Cache, int]:
        """Return the cache before any weight is read, and the longest sequence so far.

        A planned cache is as small as a cache can be until its size is measured. Until then a
        sequence is no longer than the node's whole share would hold: a model may name any length,
        and tables have an entry for each position. Raises `ConfigError` when the model, the cache
        and the drafts do not fit each other, or the memory.
        """
        if 0 < self.host_space < layout.block_bytes:
            raise ConfigError(
                f"swap_space and prefix_host_memory are {self.host_space} bytes together: "
                f"wanted at least {layout.block_bytes}, one KV block of block_size = "
                f"{layout.block_size}"
            )
        if self.is_planned:
            cache = self.back_end.new_cache(layout, MIN_BLOCKS * layout.block_bytes, None)
            share = meter.memory().share_bytes(self.engine.memory_fraction)
            num_blocks = max(MIN_BLOCKS, share // layout.block_bytes)
            longest = num_blocks * self.engine.block_size
            max_len = min(self.model.max_model_len or self.model_limit, longest)
        else:
            memory_bytes = self.engine.kv_cache_memory
            check_configured(meter.memory(), memory_bytes, self._space_beside)
            cache = self.back_end.new_cache(layout, memory_bytes, self.host_memory)
            max_len = self.max_len(cache)
        num_drafts = self.tokens_per_seq - 1
        if num_drafts >= max_len:
            raise ConfigError(
                f"num_speculative_tokens is {num_drafts}: wanted less than max_model_len, {max_len}"
            )
        return cache, max_len

    def allocate_beside(self, peak_bytes: int, cache: Cache, meter: MemoryMeter) -> None:
        """Allocate the planned cache: the node takes `peak_bytes` without it in its largest step.

        Raises `ConfigError` when too little memory is left.
        """
        memory_bytes = kv_cache_bytes(
            meter.memory(),
            self.engine.memory_fraction,
            peak_bytes=peak_bytes,
            host_space=self._space_beside,
            least_bytes=MIN_BLOCKS * cache.layout.block_bytes,
            max_chunk_tokens=self.max_chunk_tokens,
        )
        # Not touched: the share of a large machine would take long to be zeroed.
        cache.allocate(memory_bytes, host_memory=self.host_memory, is_touched=False)

    def max_len(self, cache: Cache) -> int:
        """Return the longest sequence that the cache holds; `ConfigError` for too small a cache."""
        return fit_max_model_len(
            configured=self.model.max_model_len,
            model_limit=self.model_limit,
            num_blocks=cache.num_blocks,
            block_size=self.engine.block_size,
            tokens_per_seq=self.tokens_per_seq,
        )
