"""From checked files and a back end to a runner: layout, cache, weights, and the memory left."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import MemoryPlan
from common.settings.config import EngineConfig, ModelConfig
from engine.core.runner_contract import ScheduledSequence
from engine.runner.back_end import BackEnd, LoadedDecoder, ModelFiles, ModelToLoad, StepShape
from engine.runner.cache.contract import Cache, HostMemory
from engine.runner.cache.host_pool import HostBlockArrays
from engine.runner.cpu.compile_once import compile_once
from engine.runner.drawing.draws import MAX_SAMPLED_ROWS
from engine.runner.flat_batch import BatchLimits
from engine.runner.memory_meter import MemoryMeter
from engine.runner.model_runner import ModelRunner
from engine.runner.start.cache_size import CacheSize
from engine.runner.start.profile_step import FirstLayer, measured_peak_bytes, profile_batches
from engine.runner.step_costs import DecodeShape
from engine.runner.weights.arithmetic import Arithmetic
from engine.runner.weights.key_scales import has_key_scales, key_scales_digest

_logger = logging.getLogger("pdserve.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """What a node's runner may use, and for what.

    A sequence has at most `num_drafts` drafts in a step, and a step `max_chunk_tokens` tokens.
    `host_space` bytes of host memory hold swapped blocks and prefixes, which `host_space_memory`
    allocates, and `host_memory` the memory behind `kv_bytes` (None: private memory). Packed weights
    are below `packed_folder` (None: private memory). `meter` measures the memory of a step (None:
    the back end's).
    """

    num_drafts: int
    max_chunk_tokens: int
    host_space: int = 0
    host_memory: HostMemory | None = None
    host_space_memory: HostMemory | None = None
    packed_folder: Path | None = None
    meter: MemoryMeter | None = None


def assemble_runner(
    model: ModelConfig,
    engine: EngineConfig,
    files: ModelFiles,
    back_end: BackEnd,
    share: NodeShare,
) -> ModelRunner:
    """Read the weights and allocate the KV cache; return the runner.

    Raises `ConfigError` when a setting does not fit the model or the machine.
    """
    arithmetic = back_end.arithmetic(model, files)
    meter = share.meter or back_end.meter()
    size = _cache_size(model, engine, files, back_end, share)
    cache, max_len = size.first_cache(_layout(files, arithmetic, engine), meter)
    if files.mtp is not None:
        files.mtp.check_copies()
    shape = _step_shape(engine, share)
    to_load = ModelToLoad(files, arithmetic, cache, max_len, shape, share.packed_folder)
    loaded = back_end.load(to_load)
    limits = _limits(cache, max_len, files, share)
    make = partial(ModelRunner, back_end, files)
    widest = DecodeShape(engine.max_num_seqs, 1 + share.num_drafts)
    peak_bytes = 0
    if size.is_planned:
        first_layer = FirstLayer(loaded.decoder, back_end.most_profiled_rows)
        runner = make(replace(loaded, decoder=first_layer), cache, limits, widest)
        batches = profile_batches(
            shape, limits, share.num_drafts, has_longest_context=back_end.has_context_buffers
        )
        peak_bytes = _peak_bytes(runner, batches, meter, loaded)
        size.allocate_beside(peak_bytes, cache, meter)
        loaded.use_cache(cache)
        limits = replace(limits, max_len=size.max_len(cache), num_blocks=cache.num_blocks)
    loaded.release_buffers()
    memory = _memory_plan(loaded, cache, share.max_chunk_tokens, peak_bytes)
    host_blocks = HostBlockArrays(cache, share.host_space, share.host_space_memory)
    return make(loaded, cache, limits, widest, host_blocks=host_blocks, memory=memory)


def _cache_size(
    model: ModelConfig, engine: EngineConfig, files: ModelFiles, back_end: BackEnd, share: NodeShare
) -> CacheSize:
    return CacheSize(
        model=model,
        engine=engine,
        back_end=back_end,
        model_limit=files.spec.max_position,
        tokens_per_seq=1 + share.num_drafts,
        max_chunk_tokens=share.max_chunk_tokens,
        host_space=share.host_space,
        host_memory=share.host_memory,
    )


def _limits(cache: Cache, max_len: int, files: ModelFiles, share: NodeShare) -> BatchLimits:
    return BatchLimits(
        max_tokens=share.max_chunk_tokens,
        max_len=max_len,
        num_blocks=cache.num_blocks,
        block_size=cache.layout.block_size,
        vocab_size=files.spec.vocab_size,
    )


def _step_shape(engine: EngineConfig, share: NodeShare) -> StepShape:
    max_chunk_tokens = share.max_chunk_tokens
    return StepShape(
        num_tokens=max_chunk_tokens,
        num_seqs=min(engine.max_num_seqs, max_chunk_tokens),
        num_logits_rows=min(MAX_SAMPLED_ROWS, max_chunk_tokens),
        decode_rows=1 + share.num_drafts,
    )


def _memory_plan(
    loaded: LoadedDecoder, cache: Cache, max_chunk_tokens: int, peak_bytes: int
) -> MemoryPlan:
    """Return what was planned, and log it."""
    memory = MemoryPlan(
        max_chunk_tokens=max_chunk_tokens,
        step_buffer_bytes=loaded.step_buffer_bytes,
        peak_bytes=peak_bytes,
        kv_bytes=cache.num_blocks * cache.layout.block_bytes,
        shared_bytes=loaded.shared_bytes,
    )
    _logger.info("memory: %s", memory.description)
    return memory


def _peak_bytes(
    first_layer: ModelRunner,
    batches: Sequence[Sequence[ScheduledSequence]],
    meter: MemoryMeter,
    loaded: LoadedDecoder,
) -> int:
    """Return the memory of the largest step and of the weights.

    The meter leaves out mapped files, of which the machine has one copy for all nodes.
    """
    loaded.take_buffers()
    with compile_once(f"steps of {first_layer.attention_backend}, {loaded.mtp is not None}"):
        shared_bytes = loaded.shared_bytes
        return measured_peak_bytes(first_layer, batches, meter, shared_bytes) + shared_bytes


def _layout(files: ModelFiles, arithmetic: Arithmetic, engine: EngineConfig) -> KVLayout:
    """Return the layout of the node's KV cache.

    It contains the operators' names, because they add in different orders: last bits of KV differ.
    """
    spec, weights = files.spec, files.weights
    stored = engine.kv_cache_dtype
    stored = arithmetic.dtype if stored == "auto" else stored
    computed = f"{spec.described()}\n{weights.identity()}\n{arithmetic.identity}"
    if has_key_scales(spec, stored):
        prefixes = [f"model.layers.{i}." for i in range(spec.num_layers)]
        computed += f"\nkeys are divided by {key_scales_digest(weights, prefixes, spec)}"
    if files.mtp is not None:
        computed += f"\n{files.mtp.identity()}"
    digest = hashlib.sha256(computed.encode()).hexdigest()
    return KVLayout(
        model_digest=digest[:32],
        num_layers=files.num_kv_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=engine.block_size,
        dtype=stored,
        arithmetic=arithmetic.description,
    )
