"""From a checked checkpoint to a runner: device, dtype, back end, cache and weights."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.token_budget import fit_max_model_len
from engine.runner.checkpoint import Checkpoint
from engine.runner.decoder import Decoder
from engine.runner.device_draw import DeviceDraw
from engine.runner.flat_batch import BatchLimits
from engine.runner.framework import has_gpu, paddle
from engine.runner.fused_attention import FusedAttention
from engine.runner.fused_check import flash_problem, paged_problem
from engine.runner.kernels.attention_plan import PIECE_KEYS
from engine.runner.kv_cache import HostMemory, KVCache
from engine.runner.model_runner import MAX_SAMPLED_ROWS, ModelRunner
from engine.runner.model_spec import DecoderSpec
from engine.runner.mtp.draft_step import MtpLayer
from engine.runner.mtp.mtp_weights import MtpWeights
from engine.runner.mtp.numba_mtp import NumbaMtp
from engine.runner.mtp.paddle_mtp import PaddleMtp
from engine.runner.numba_decoder import NumbaDecoder, unsupported_size
from engine.runner.paddle_attention import PaddleAttention
from engine.runner.paddle_decoder import PaddleDecoder
from engine.runner.step_buffers import StepShape

_logger = logging.getLogger("pdserve.engine")


def assemble_runner(
    model: ModelConfig,
    engine: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    eos_token_ids: frozenset[int],
    mtp_weights: MtpWeights | None,
    *,
    num_drafts: int,
    swap_space: int,
    max_chunk_tokens: int,
    host_memory: HostMemory | None,
) -> ModelRunner:
    """Allocate the KV cache and read the weights; return the runner.

    Raises `ConfigError` when a setting does not fit the model or the machine.
    """
    paddle.set_device("gpu" if has_gpu() else "cpu")
    dtype = _compute_dtype(model.dtype)
    backend = _choose_backend(engine, spec, dtype)
    has_flash = backend == "fused" and _has_flash(spec, dtype, engine.block_size)
    arithmetic = _arithmetic(backend, has_flash=has_flash)
    layout = _layout(spec, checkpoint, mtp_weights, dtype, arithmetic, engine.block_size)
    if 0 < swap_space < layout.block_bytes:
        raise ConfigError(
            f"swap_space is {swap_space} bytes: wanted at least {layout.block_bytes}, one KV block "
            f"of block_size = {engine.block_size}"
        )
    cache = KVCache(layout, engine.kv_cache_memory, host_memory=host_memory)
    max_len = fit_max_model_len(
        configured=model.max_model_len,
        model_limit=spec.max_position,
        num_blocks=cache.num_blocks,
        block_size=engine.block_size,
        tokens_per_seq=1 + num_drafts,
    )
    if num_drafts >= max_len:
        raise ConfigError(
            f"num_speculative_tokens is {num_drafts}: wanted less than max_model_len, {max_len}"
        )
    if mtp_weights is not None:
        mtp_weights.check_copies()
    decoder: Decoder
    mtp: MtpLayer | None = None
    device_draw: DeviceDraw | None = None
    if backend == "numba":
        shape = StepShape(
            num_tokens=max_chunk_tokens,
            num_seqs=min(engine.max_num_seqs, max_chunk_tokens),
            num_logits_rows=min(max(MAX_SAMPLED_ROWS, 1 + num_drafts), max_chunk_tokens),
        )
        decoder = NumbaDecoder(spec, checkpoint, cache, max_len, shape)
        if mtp_weights is not None:
            mtp = NumbaMtp(mtp_weights, decoder, cache.as_numpy()[spec.num_layers])
    else:
        attention = _attention(backend, spec, cache, has_flash=has_flash)
        decoder = PaddleDecoder(spec, checkpoint, cache, max_len, attention)
        if cache.is_mirrored:
            device_draw = DeviceDraw(decoder, spec.vocab_size, eos_token_ids)
        if mtp_weights is not None:
            mtp = PaddleMtp(mtp_weights, decoder, spec.num_layers)
    limits = BatchLimits(
        max_tokens=max_chunk_tokens,
        max_len=max_len,
        num_blocks=cache.num_blocks,
        block_size=engine.block_size,
        vocab_size=spec.vocab_size,
    )
    parts = (decoder, cache, limits, eos_token_ids, backend)
    return ModelRunner(*parts, mtp=mtp, device_draw=device_draw, swap_space=swap_space)


def _compute_dtype(wanted: str) -> str:
    if has_gpu():
        return "bfloat16" if wanted == "auto" else wanted
    if wanted not in ("auto", "float32"):
        raise ConfigError(f"dtype is {wanted}: a CPU computes in float32; wanted auto or float32")
    return "float32"


def _arithmetic(backend: str, *, has_flash: bool) -> str:
    """Return what the order of additions depends on."""
    if backend == "numba":
        return f"numba, {PIECE_KEYS} keys"
    return f"{backend} flash" if has_flash else backend


def _layout(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    mtp_weights: MtpWeights | None,
    dtype: str,
    arithmetic: str,
    block_size: int,
) -> KVLayout:
    """Return the layout of the KV cache.

    It contains the operators' names, because they add in different orders: last bits of KV differ.
    """
    described = json.dumps(asdict(spec), sort_keys=True)
    computed = f"{described}\n{checkpoint.identity()}\n{dtype}\n{arithmetic}"
    if mtp_weights is not None:
        computed += f"\n{mtp_weights.identity()}"
    digest = hashlib.sha256(computed.encode()).hexdigest()
    return KVLayout(
        model_digest=digest[:32],
        num_layers=spec.num_layers + (mtp_weights is not None),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def _choose_backend(engine: EngineConfig, spec: DecoderSpec, dtype: str) -> str:
    """Return the attention back end; `ConfigError` if the configured one cannot run here."""
    wanted = engine.attention_backend
    if wanted == "paddle":
        return wanted
    if not has_gpu():
        if wanted == "fused":
            raise ConfigError("attention_backend is fused: wanted a GPU; here: numba or paddle")
        problem = unsupported_size(spec)
        if wanted == "auto" and problem:
            _logger.warning("attention: plain Paddle operators, because %s", problem)
            return "paddle"
        return "numba"
    if wanted == "numba":
        raise ConfigError("attention_backend is numba: wanted fused or paddle on a GPU")
    problem = paged_problem(spec, dtype, engine.block_size)
    if problem and wanted == "fused":
        raise ConfigError(f"attention_backend is fused, but here {problem}; wanted paddle")
    if problem:
        _logger.warning("attention: plain Paddle operators, because %s", problem)
        return "paddle"
    return "fused"


def _attention(
    backend: str, spec: DecoderSpec, cache: KVCache, *, has_flash: bool
) -> PaddleAttention:
    if backend == "fused":
        return FusedAttention(spec, cache, has_flash=has_flash)
    return PaddleAttention(spec, cache)


def _has_flash(spec: DecoderSpec, dtype: str, block_size: int) -> bool:
    problem = flash_problem(spec, dtype, block_size)
    if problem:
        _logger.warning("attention of chunks: plain Paddle operators, because %s", problem)
    return not problem
