"""From a checked checkpoint to a runner: device, dtype, back end, cache and weights."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import MemoryPlan
from common.settings.config import EngineConfig, ModelConfig
from engine.core.runner_contract import ScheduledSequence
from engine.runner.cache.kv_cache import HostMemory, KVCache
from engine.runner.cpu.compile_once import compile_once
from engine.runner.cpu.decoder import NumbaDecoder, unsupported_size
from engine.runner.cpu.packed_weights import layer_plans
from engine.runner.cpu.step_buffers import StepShape
from engine.runner.decoder import Decoder
from engine.runner.drawing.host_draw import MAX_SAMPLED_ROWS
from engine.runner.flat_batch import BatchLimits
from engine.runner.kernels.attention_plan import PIECE_KEYS
from engine.runner.model_runner import ModelRunner
from engine.runner.mtp.draft_source import mtp_in_blocks
from engine.runner.mtp.draft_step import MtpLayer
from engine.runner.mtp.mtp_weights import MtpWeights
from engine.runner.mtp.numba_mtp import NumbaMtp
from engine.runner.paddle_import import has_gpu, has_paddle, paddle
from engine.runner.start.arithmetic import (
    Arithmetic,
    IntegerWeights,
    decoder_products,
    integer_weights,
    stored_formats,
)
from engine.runner.start.cache_size import CacheSize
from engine.runner.start.cpu_settings import check_cpu_settings
from engine.runner.start.memory_meter import MemoryMeter, memory_meter
from engine.runner.start.profile_step import FirstLayer, measured_peak_bytes, profile_batches
from engine.runner.step_costs import DecodeShape
from engine.runner.weights.key_scales import has_key_scales, key_scales_digest
from engine.runner.weights.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

if TYPE_CHECKING:
    from engine.runner.drawing.device_draw import DeviceDraw
    from engine.runner.paddle.attention import PaddleAttention

_logger = logging.getLogger("pdserve.engine")

_PROFILED_ROWS = 64
"""Most rows of a layer that is computed on the CPU kernels only to measure its memory."""


def assemble_runner(
    model: ModelConfig,
    engine: EngineConfig,
    spec: DecoderSpec,
    checkpoint: TensorSource,
    eos_token_ids: frozenset[int],
    mtp_weights: MtpWeights | None,
    *,
    num_drafts: int,
    swap_space: int,
    max_chunk_tokens: int,
    host_memory: HostMemory | None,
    meter: MemoryMeter | None,
    packed_folder: Path | None,
) -> ModelRunner:
    """Read the weights and allocate the KV cache; return the runner.

    Raises `ConfigError` when a setting does not fit the model or the machine.
    """
    _choose_device(model, engine)
    dtype, stored = _dtypes(model, engine)
    backend = _choose_backend(engine, spec, dtype, stored)
    has_flash = backend == "fused" and _has_flash(spec, dtype, engine.block_size)
    in_integers = _in_integers(model.activation_dtype, backend, spec, checkpoint, mtp_weights)
    operators, formats = _operators(backend, has_flash), stored_formats(spec, checkpoint)
    arithmetic = Arithmetic(dtype, operators, formats, in_integers)
    layout = _layout(spec, checkpoint, mtp_weights, arithmetic, stored, engine.block_size)
    size = CacheSize(
        model=model, engine=engine, model_limit=spec.max_position, tokens_per_seq=1 + num_drafts,
        max_chunk_tokens=max_chunk_tokens, swap_space=swap_space, host_memory=host_memory,
    )  # fmt: skip
    meter = meter or memory_meter()
    cache, max_len = size.first_cache(layout, meter)
    if mtp_weights is not None:
        mtp_weights.check_copies()
    shape = StepShape(
        num_tokens=max_chunk_tokens,
        num_seqs=min(engine.max_num_seqs, max_chunk_tokens),
        num_logits_rows=min(MAX_SAMPLED_ROWS, max_chunk_tokens),
    )
    if backend == "numba":
        parts = _on_kernels(
            spec, checkpoint, cache, max_len, shape, mtp_weights, arithmetic=arithmetic,
            packed_folder=packed_folder,
        )  # fmt: skip
    else:
        attention = _attention(backend, spec, cache, dtype, has_flash=has_flash)
        parts = _in_operators(spec, checkpoint, cache, max_len, attention, dtype, mtp_weights)
    limits = BatchLimits(
        max_tokens=max_chunk_tokens, max_len=max_len, num_blocks=cache.num_blocks,
        block_size=engine.block_size, vocab_size=spec.vocab_size,
    )  # fmt: skip
    make = partial(
        ModelRunner, eos_token_ids=eos_token_ids, attention_backend=backend,
        pairs_per_token=spec.pairs_per_token, mtp=parts.mtp,
        widest=DecodeShape(engine.max_num_seqs, 1 + num_drafts),
        device_draw=parts.device_draw(cache, eos_token_ids),
    )  # fmt: skip
    peak_bytes = 0
    if size.is_planned:
        batches = profile_batches(shape, limits, num_drafts, has_longest_context=backend != "numba")
        most_rows = _PROFILED_ROWS if backend == "numba" else None
        first_layer = make(FirstLayer(parts.decoder, most_rows), cache, limits)
        peak_bytes = _peak_bytes(first_layer, batches, meter, parts)
        size.allocate_beside(peak_bytes, cache, meter)
        parts.use_cache(cache)
        limits = replace(limits, max_len=size.max_len(cache), num_blocks=cache.num_blocks)
    parts.release_buffers()
    memory = _memory_plan(parts, cache, max_chunk_tokens, peak_bytes)
    return make(parts.decoder, cache, limits, swap_space=swap_space, memory=memory)


def _choose_device(model: ModelConfig, engine: EngineConfig) -> None:
    if has_paddle():
        paddle.set_device("gpu" if has_gpu() else "cpu")
    if not has_gpu():
        check_cpu_settings(model, engine)


def _memory_plan(
    parts: _Parts, cache: KVCache, max_chunk_tokens: int, peak_bytes: int
) -> MemoryPlan:
    """Return what was planned, and log it."""
    memory = MemoryPlan(
        max_chunk_tokens=max_chunk_tokens,
        step_buffer_bytes=parts.step_buffer_bytes,
        peak_bytes=peak_bytes,
        kv_bytes=cache.num_blocks * cache.layout.block_bytes,
        shared_bytes=parts.shared_bytes,
    )
    _logger.info("memory: %s", memory.description)
    return memory


def _peak_bytes(
    first_layer: ModelRunner,
    batches: Sequence[Sequence[ScheduledSequence]],
    meter: MemoryMeter,
    parts: _Parts,
) -> int:
    """Return the memory of the largest step and of the weights.

    The meter leaves out mapped files, of which the machine has one copy for all nodes.
    """
    parts.take_buffers()
    with compile_once(f"steps of {first_layer.attention_backend}, {parts.mtp is not None}"):
        shared_bytes = parts.shared_bytes
        return measured_peak_bytes(first_layer, batches, meter, shared_bytes) + shared_bytes


@dataclass(frozen=True, slots=True)
class _Parts:
    """A loaded model.

    `step_buffer_bytes` is 0 where the framework allocates a step's memory. `shared_bytes` are those
    of weights in a mapped file.
    """

    decoder: Decoder
    mtp: MtpLayer | None
    step_buffer_bytes: int = 0
    shared_bytes: int = 0

    def device_draw(self, cache: KVCache, eos_token_ids: frozenset[int]) -> DeviceDraw | None:
        """Return what draws tokens on the device; None where the host computes."""
        if not cache.is_mirrored:
            return None
        from engine.runner.drawing.device_draw import DeviceDraw
        from engine.runner.paddle.decoder import PaddleDecoder

        if not isinstance(self.decoder, PaddleDecoder):
            return None
        return DeviceDraw(self.decoder, self.decoder.spec.vocab_size, eos_token_ids)

    def take_buffers(self) -> None:
        """Take the memory of the step buffers, which every step may write whole."""
        if isinstance(self.decoder, NumbaDecoder):
            self.decoder.step_buffers.take()

    def release_buffers(self) -> None:
        """Return the memory of the step buffers to the system until steps need it."""
        if isinstance(self.decoder, NumbaDecoder):
            self.decoder.step_buffers.release()

    def use_cache(self, cache: KVCache) -> None:
        """Keep keys and values where `cache` has them now."""
        for part in (self.decoder, self.mtp):
            if isinstance(part, NumbaDecoder | NumbaMtp):
                part.use_cache(cache)


def _in_operators(
    spec: DecoderSpec,
    checkpoint: TensorSource,
    cache: KVCache,
    max_len: int,
    attention: PaddleAttention,
    dtype: str,
    mtp_weights: MtpWeights | None,
) -> _Parts:
    # Imported late, as all that needs Paddle: kernels compute without it.
    from engine.runner.mtp.paddle_mtp import PaddleMtp
    from engine.runner.paddle.decoder import PaddleDecoder

    decoder = PaddleDecoder(spec, checkpoint, cache, max_len, attention, dtype)
    if mtp_weights is None:
        return _Parts(decoder, None)
    return _Parts(decoder, PaddleMtp(mtp_weights, decoder, decoder.num_layers))


def _on_kernels(
    spec: DecoderSpec,
    checkpoint: TensorSource,
    cache: KVCache,
    max_len: int,
    shape: StepShape,
    mtp_weights: MtpWeights | None,
    *,
    arithmetic: Arithmetic,
    packed_folder: Path | None,
) -> _Parts:
    mtp: NumbaMtp | None = None
    formats = ", ".join(arithmetic.formats)
    has_drafts = mtp_weights is not None
    with compile_once(
        f"products of {formats}, int8: {arithmetic.with_bytes}, drafts: {has_drafts}"
    ):
        decoder = NumbaDecoder(
            spec, checkpoint, cache, max_len, shape, with_bytes=arithmetic.with_bytes,
            packed_folder=packed_folder,
        )  # fmt: skip
        if mtp_weights is not None:
            mtp = NumbaMtp(mtp_weights, decoder, cache, decoder.num_layers, packed_folder)
    shared_bytes = decoder.shared_bytes + (mtp.shared_bytes if mtp is not None else 0)
    return _Parts(decoder, mtp, decoder.step_buffers.num_bytes, shared_bytes)


def _dtypes(model: ModelConfig, engine: EngineConfig) -> tuple[str, str]:
    """Return what the model is computed in, and what the KV cache stores."""
    computed = "float32"
    if has_gpu():
        computed = "bfloat16" if model.dtype == "auto" else model.dtype
    stored = engine.kv_cache_dtype
    return computed, computed if stored == "auto" else stored


def _in_integers(
    wanted: str,
    backend: str,
    spec: DecoderSpec,
    checkpoint: TensorSource,
    mtp_weights: MtpWeights | None,
) -> IntegerWeights:
    """Return the weights whose products take activations in int8.

    An MTP layer's weights are in blocks whatever the checkpoint has.
    """
    if wanted == "int8" and backend != "numba":
        raise ConfigError(
            "activation_dtype is int8: wanted the CPU kernels, attention_backend numba; "
            f"here: {backend}"
        )
    if wanted == "float32" or backend != "numba":
        return ()
    found = integer_weights(checkpoint, decoder_products(spec))
    if mtp_weights is not None and (found or wanted == "int8"):
        plans = layer_plans(spec, mtp_weights.block)
        found += integer_weights(mtp_in_blocks(mtp_weights), plans)
    return found


def _operators(backend: str, has_flash: bool) -> str:
    """Return what the order of additions depends on."""
    if backend == "numba":
        return f"numba, {PIECE_KEYS} keys"
    return f"{backend} flash" if has_flash else backend


def _layout(
    spec: DecoderSpec,
    checkpoint: TensorSource,
    mtp_weights: MtpWeights | None,
    arithmetic: Arithmetic,
    stored: str,
    block_size: int,
) -> KVLayout:
    """Return the layout of a KV cache that stores numbers as `stored`.

    It contains the operators' names, because they add in different orders: last bits of KV differ.
    """
    described = json.dumps(asdict(spec), sort_keys=True)
    computed = f"{described}\n{checkpoint.identity()}\n{arithmetic.identity}"
    if has_key_scales(spec, stored):
        prefixes = [f"model.layers.{i}." for i in range(spec.num_layers)]
        computed += f"\nkeys are divided by {key_scales_digest(checkpoint, prefixes, spec)}"
    if mtp_weights is not None:
        computed += f"\n{mtp_weights.identity()}"
    digest = hashlib.sha256(computed.encode()).hexdigest()
    return KVLayout(
        model_digest=digest[:32],
        num_layers=spec.num_layers + (mtp_weights is not None),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=stored,
        arithmetic=arithmetic.description,
    )


def _choose_backend(engine: EngineConfig, spec: DecoderSpec, dtype: str, stored: str) -> str:
    """Return the attention back end; `ConfigError` if the configured one cannot run here."""
    wanted = engine.attention_backend
    if wanted == "paddle":
        return wanted
    if not has_gpu():
        problem = unsupported_size(spec)
        if wanted == "auto" and problem:
            _logger.warning("attention: plain Paddle operators, because %s", problem)
            return "paddle"
        return "numba"
    if wanted == "numba":
        raise ConfigError("attention_backend is numba: wanted fused or paddle on a GPU")
    from engine.runner.paddle.fused_check import paged_problem

    problem = paged_problem(spec, dtype, engine.block_size)
    if stored != dtype:
        problem = f"kv_cache_dtype is {stored} and the fused operators compute in {dtype}"
    if problem and wanted == "fused":
        raise ConfigError(f"attention_backend is fused, but here {problem}; wanted paddle")
    if problem:
        _logger.warning("attention: plain Paddle operators, because %s", problem)
        return "paddle"
    return "fused"


def _attention(
    backend: str, spec: DecoderSpec, cache: KVCache, dtype: str, *, has_flash: bool
) -> PaddleAttention:
    from engine.runner.paddle.attention import PaddleAttention
    from engine.runner.paddle.fused_attention import FusedAttention

    if backend == "fused":
        return FusedAttention(spec, cache, has_flash=has_flash)
    return PaddleAttention(spec, cache, dtype)


def _has_flash(spec: DecoderSpec, dtype: str, block_size: int) -> bool:
    from engine.runner.paddle.fused_check import flash_problem

    problem = flash_problem(spec, dtype, block_size)
    if problem:
        _logger.warning("attention of chunks: plain Paddle operators, because %s", problem)
    return not problem
