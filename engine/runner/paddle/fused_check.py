"""Check Paddle's fused attention operators against plain ones before they are used.

Both run on random input over several blocks per sequence, in random order. Every other slot of the
cache holds NaN. So an operator that reads other blocks, too few or too many keys is refused.
"""

from __future__ import annotations

import numpy as np

from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.paddle.attention import PaddleAttention
from engine.runner.paddle.fused_attention import FusedAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.model_spec import DecoderSpec

_TOLERANCE = 2e-2
"""Largest difference from the plain operators that half precision explains."""


def paged_problem(spec: DecoderSpec, dtype: str, block_size: int) -> str:
    """Return the reason why the paged operator cannot be used here; empty if it can.

    Compares decoding rows and rows that verify drafts: in the first block, at both sides of a
    block's border, and in the fourth block.
    """
    size = block_size
    return _problem(
        "paged",
        spec,
        dtype,
        size,
        [(1, 1), (size - 1, 1), (size, 1), (3 * size + size // 2, 1), (2 * size - 2, 5)],
        has_flash=False,
    )


def flash_problem(spec: DecoderSpec, dtype: str, block_size: int) -> str:
    """Return the reason why flash attention cannot be used here; empty if it can.

    Compares whole prompts and chunks after cached tokens, over up to five blocks.
    """
    size = block_size
    return _problem(
        "flash",
        spec,
        dtype,
        size,
        [(0, 3 * size + 1), (2 * size + 1, 40), (size - 1, 2 * size + 17), (0, 1)],
        has_flash=True,
    )


def _problem(
    name: str,
    spec: DecoderSpec,
    dtype: str,
    block_size: int,
    sequences: list[tuple[int, int]],
    *,
    has_flash: bool,
) -> str:
    try:
        difference = _compare(spec, dtype, block_size, sequences, has_flash=has_flash)
    except Exception as error:  # the operators raise errors of many types
        return f"the {name} operator fails: {error!r:.300}"
    if not difference < _TOLERANCE:
        return f"the {name} operator is off by {difference:.3g}: wanted below {_TOLERANCE}"
    return ""


def _compare(
    spec: DecoderSpec,
    dtype: str,
    block_size: int,
    sequences: list[tuple[int, int]],
    *,
    has_flash: bool,
) -> float:
    """Return the largest difference between fused and plain attention on random input.

    It is relative for results above 1, and infinite if the operator wrote other KV.
    """
    random = np.random.default_rng(0)
    batch = _batch(sequences, block_size, random)
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    num_blocks = int(batch.block_tables.max()) + 2
    past = _past(spec, batch, sequences, num_blocks, block_size, random)
    counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    qkv = random.standard_normal((len(batch.slots), sum(counts), spec.head_dim))
    outputs, caches = [], []
    for is_fused in (False, True):
        cache = KVCache(layout, num_blocks * layout.block_bytes)
        cache.tensor[:] = paddle.to_tensor(past).astype(dtype)
        attention = PaddleAttention(spec, cache, dtype)
        if is_fused:
            attention = FusedAttention(spec, cache, has_flash=has_flash)
        parts = paddle.split(paddle.to_tensor(qkv).astype(dtype), counts, axis=1)
        attention.begin(batch)
        outputs.append(attention.attend(0, *parts).astype("float32").numpy())
        caches.append(cache.tensor.astype("float32").numpy())
    if not np.array_equal(caches[0], caches[1], equal_nan=True):
        return float("inf")
    wanted, found = outputs
    return float((np.abs(wanted - found) / np.maximum(1.0, np.abs(wanted))).max())


def _batch(
    sequences: list[tuple[int, int]], block_size: int, random: np.random.Generator
) -> FlatBatch:
    """Return a batch of (cached, new) tokens on blocks in random order; block 0 is not used."""
    widths = [-(-(cached + new) // block_size) for cached, new in sequences]
    num_blocks = sum(widths) + 1
    blocks = (random.permutation(num_blocks - 1) + 1).tolist()
    batch = []
    for (cached, new), width in zip(sequences, widths, strict=True):
        table, blocks = blocks[:width], blocks[width:]
        batch.append(ScheduledSequence(0, [0] * new, cached, table, None))
    most = sum(new for _, new in sequences)
    limits = BatchLimits(
        max_tokens=most, max_len=most + max(sequences)[0], num_blocks=num_blocks,
        block_size=block_size, vocab_size=1,
    )  # fmt: skip
    return flatten(batch_of(batch), limits)


def _past(
    spec: DecoderSpec,
    batch: FlatBatch,
    sequences: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Return a cache with random values in the sequences' slots, and NaN in all others."""
    past = np.full((1, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim), np.nan)
    for (cached, _), table in zip(sequences, batch.block_tables, strict=True):
        positions = np.arange(cached)
        blocks, offsets = table[positions // block_size], positions % block_size
        for part in past[0]:
            part[blocks, :, offsets] = random.standard_normal(
                (cached, spec.num_kv_heads, spec.head_dim)
            )
    return past
