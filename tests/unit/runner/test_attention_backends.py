"""Paged attention of each back end on the same cache, against a float64 softmax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from common.kv_layout import KVLayout
from engine.core.plan import ScheduledSequence
from engine.core.step_batch import batch_of
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.framework import paddle
from engine.runner.kernels.attention import attention_phase, plan_items
from engine.runner.kernels.rotary import rotary_phase
from engine.runner.kernels.team import new_progress
from engine.runner.kv_cache import KVCache
from engine.runner.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.paddle_attention import PaddleAttention
from tests.unit.runner.reference_decoder import causal_attention
from tests.unit.runner.tiny_checkpoints import CONFIGS, write_checkpoint

NUM_BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """Sequences as (cached tokens, new tokens), over a cache of some shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]


CASES = [
    Case(4, 2, 16, 16, ((0, 1), (63, 1), (64, 1), (100, 1))),
    Case(9, 3, 64, 64, ((0, 70), (130, 1), (64, 64), (1, 40))),
    Case(7, 1, 128, 128, ((0, 200), (200, 3), (127, 1))),
    Case(2, 2, 32, 8, ((0, 100), (50, 10), (7, 1), (8, 1))),
    Case(6, 2, 48, 1, ((3, 5), (0, 17))),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case.num_heads}x{case.head_dim}")
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def _batch(case: Case) -> FlatBatch:
    blocks = list(np.random.RandomState(3).permutation(NUM_BLOCKS))
    sequences = []
    for cached, new in case.sequences:
        count = -(-(cached + new) // case.block_size)
        table, blocks = blocks[:count], blocks[count:]
        sequences.append(ScheduledSequence(0, [0] * new, cached, table, None))
    limits = BatchLimits(
        max_tokens=999, max_len=999, num_blocks=NUM_BLOCKS, block_size=case.block_size, vocab_size=1
    )
    return flatten(batch_of(sequences), limits)


def _spec(case: Case, folder: Path) -> DecoderSpec:
    config = CONFIGS["llama"] | {
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
    }
    return read_decoder_spec(write_checkpoint(folder, config))


def _cache(case: Case) -> KVCache:
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        block_size=case.block_size, dtype="float32",
    )  # fmt: skip
    cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes)
    view = cache.as_numpy()
    view[:] = np.random.RandomState(4).standard_normal(view.shape)
    return cache


def _qkv(case: Case, batch: FlatBatch) -> np.ndarray:
    shape = (batch.token_ids.size, case.num_heads + 2 * case.num_kv_heads, case.head_dim)
    return np.random.RandomState(5).standard_normal(shape).astype(np.float32)


def _reference(case: Case, batch: FlatBatch, qkv: np.ndarray, cache: KVCache) -> np.ndarray:
    """`[rows, heads, head_dim]` from a float64 softmax over the cache's own content."""
    past = cache.as_numpy()[0].astype(np.float64)
    parts = []
    for index, (cached, new) in enumerate(case.sequences):
        first = batch.row_starts[index]
        table = batch.block_tables[index]
        positions = np.arange(cached + new)
        blocks, offsets = table[positions // case.block_size], positions % case.block_size
        key, value = (past[kind][blocks, :, offsets].swapaxes(0, 1) for kind in (0, 1))
        query = qkv[first : first + new, : case.num_heads].swapaxes(0, 1).astype(np.float64)
        parts.append(causal_attention(query, key, value).swapaxes(0, 1))
    return np.concatenate(parts)


def test_plain_paddle_operators(case: Case, tmp_path: Path) -> None:
    batch, cache = _batch(case), _cache(case)
    qkv = _qkv(case, batch)
    attention = PaddleAttention(_spec(case, tmp_path), cache)
    attention.begin(batch)
    counts = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    out = attention.attend(0, *paddle.split(paddle.to_tensor(qkv), counts, axis=1))
    np.testing.assert_allclose(out.numpy(), _reference(case, batch, qkv, cache), atol=2e-5)
    stored = cache.as_numpy()[0, 0].swapaxes(1, 2).reshape(-1, case.num_kv_heads, case.head_dim)
    keys = qkv[:, case.num_heads : case.num_heads + case.num_kv_heads]
    np.testing.assert_array_equal(stored[batch.slots], keys)


def test_numba_kernels(case: Case) -> None:
    batch, cache = _batch(case), _cache(case)
    qkv = _qkv(case, batch)
    keys, values = cache.as_numpy()[0]
    ready = qkv.copy()
    half = case.head_dim // 2
    unturned = np.ones((999, half), np.float32), np.zeros((999, half), np.float32)
    rotary_phase(
        new_progress(1), 0,
        ready, np.zeros((0, 0), np.float32), np.float32(0), *unturned, batch.positions,
        np.float32(case.head_dim**-0.5), batch.slots, keys, values,
    )  # fmt: skip
    group = case.num_heads // case.num_kv_heads
    items = plan_items(batch.row_starts, batch.positions, case.num_kv_heads, group)
    out = np.full((len(qkv), case.num_heads, case.head_dim), np.nan, np.float32)
    attention_phase(
        new_progress(1), 0, ready, keys, values, batch.block_tables, batch.positions, items, out
    )
    np.testing.assert_allclose(out, _reference(case, batch, qkv, cache), atol=2e-5)


def test_work_items_cover_every_row_once(case: Case) -> None:
    batch = _batch(case)
    group = case.num_heads // case.num_kv_heads
    items = plan_items(batch.row_starts, batch.positions, case.num_kv_heads, group)
    covered = [(row, head) for _, first, end, head in items for row in range(first, end)]
    rows = range(batch.token_ids.size)
    assert sorted(covered) == [(row, head) for row in rows for head in range(case.num_kv_heads)]
    for sequence, first, end, _ in items:
        assert batch.row_starts[sequence] <= first < end <= batch.row_starts[sequence + 1]
