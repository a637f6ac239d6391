"""Paged attention of each back end on the same cache, against a float64 softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.kernels.attention import STATE_LANES, attention_phase, merge_phase
from engine.runner.kernels.attention_plan import (
    NO_WINDOW,
    PART_ROWS,
    PIECE_KEYS,
    plan_attention,
)
from engine.runner.kernels.rotary import rotary_phase
from engine.runner.kernels.team import new_progress
from engine.runner.paddle.attention import PaddleAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.reference_decoder import causal_attention
from tests.support.models.running import unscaled_keys
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

NUM_BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """Sequences as (cached tokens, new tokens), over a cache of some shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]
    window: int = 0
    has_sinks: bool = False

    @property
    def sinks(self) -> np.ndarray:
        """Of every third head far above all scores, then far below, and among them."""
        if not self.has_sinks:
            return np.zeros(0, np.float32)
        sinks = np.random.RandomState(6).standard_normal(self.num_heads).astype(np.float32)
        sinks[::3], sinks[1::3] = 130, -130
        return sinks


CASES = [
    Case(4, 2, 16, 16, ((0, 1), (63, 1), (64, 1), (100, 1))),
    Case(9, 3, 64, 64, ((0, 70), (130, 1), (64, 64), (1, 40))),
    Case(7, 1, 128, 128, ((0, 200), (200, 3), (127, 1))),
    Case(2, 2, 32, 8, ((0, 100), (50, 10), (7, 1), (8, 1))),
    Case(6, 2, 48, 1, ((3, 5), (0, 17))),
    Case(4, 2, 16, 16, ((0, 1), (63, 1), (64, 1), (100, 1)), window=37),
    Case(9, 3, 64, 64, ((0, 70), (330, 1), (64, 64), (1, 40)), window=90),
    Case(7, 1, 128, 128, ((0, 400), (600, 3), (527, 1)), window=275),
    Case(2, 2, 32, 8, ((0, 100), (50, 10), (7, 1), (8, 1)), window=1),
    Case(6, 2, 48, 1, ((3, 5), (0, 17)), window=4),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case.num_heads}x{case.head_dim}-{case.window}")
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
        max_tokens=2000,
        max_len=2000,
        num_blocks=NUM_BLOCKS,
        block_size=case.block_size,
        vocab_size=1,
    )
    return flatten(batch_of(sequences), limits)


def _spec(case: Case, folder: Path) -> DecoderSpec:
    config = CONFIGS["llama"] | {
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 1,
        "sliding_window": case.window or None,
    }
    return read_decoder_spec(write_checkpoint(folder, config))


def _cache(case: Case) -> KVCache:
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        block_size=case.block_size, dtype="float32",
    )  # fmt: skip
    cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes)
    view = cache.slots().view(np.float32)
    view[:] = np.random.RandomState(4).standard_normal(view.shape)
    return cache


def _qkv(case: Case, batch: FlatBatch) -> np.ndarray:
    shape = (batch.token_ids.size, case.num_heads + 2 * case.num_kv_heads, case.head_dim)
    return np.random.RandomState(5).standard_normal(shape).astype(np.float32)


def _reference(case: Case, batch: FlatBatch, qkv: np.ndarray, cache: KVCache) -> np.ndarray:
    """`[rows, heads, head_dim]` from a float64 softmax over the cache's own content."""
    past = cache.slots().view(np.float32)[0].astype(np.float64)
    parts = []
    for index, (cached, new) in enumerate(case.sequences):
        first = batch.row_starts[index]
        table = batch.block_tables[index]
        positions = np.arange(cached + new)
        blocks, offsets = table[positions // case.block_size], positions % case.block_size
        key, value = (past[kind][blocks, :, offsets].swapaxes(0, 1) for kind in (0, 1))
        query = qkv[first : first + new, : case.num_heads].swapaxes(0, 1).astype(np.float64)
        sinks = case.sinks.astype(np.float64) if case.has_sinks else None
        attended = causal_attention(query, key, value, case.window, sinks=sinks)
        parts.append(attended.swapaxes(0, 1))
    return np.concatenate(parts)


def test_plain_paddle_operators(case: Case, tmp_path: Path) -> None:
    batch, cache = _batch(case), _cache(case)
    qkv = _qkv(case, batch)
    attention = PaddleAttention(_spec(case, tmp_path), cache, "float32")
    attention.begin(batch)
    counts = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    out = attention.attend(0, *paddle.split(paddle.to_tensor(qkv), counts, axis=1))
    np.testing.assert_allclose(out.numpy(), _reference(case, batch, qkv, cache), atol=2e-5)
    stored = (
        cache.slots()
        .view(np.float32)[0, 0]
        .swapaxes(1, 2)
        .reshape(-1, case.num_kv_heads, case.head_dim)
    )
    keys = qkv[:, case.num_heads : case.num_heads + case.num_kv_heads]
    np.testing.assert_array_equal(stored[batch.slots], keys)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_numba_kernels(case: Case, has_sinks: bool) -> None:
    case = replace(case, has_sinks=has_sinks)
    batch, cache = _batch(case), _cache(case)
    qkv = _qkv(case, batch)
    keys, values = cache.slots()[0]
    ready = qkv.copy()
    half = case.head_dim // 2
    unturned = np.ones((2000, half), np.float32), np.zeros((2000, half), np.float32)
    rotary_phase(
        new_progress(1)[0],
        ready, np.zeros((0, 0), np.float32), np.float32(0), *unturned, batch.positions,
        unscaled_keys(case.num_kv_heads, case.head_dim), batch.slots, keys, values,
    )  # fmt: skip
    out = _attend(case, batch, ready, keys, values, num_threads=2)
    np.testing.assert_allclose(out, _reference(case, batch, qkv, cache), atol=2e-5)


def _attend(
    case: Case, batch: FlatBatch, ready: np.ndarray, keys: np.ndarray, values: np.ndarray,
    *, num_threads: int,
) -> np.ndarray:  # fmt: skip
    group = case.num_heads // case.num_kv_heads
    window = case.window or NO_WINDOW
    plan = plan_attention(
        batch.row_starts, batch.positions, case.num_kv_heads, group, num_threads, window
    )
    parts = np.full((PART_ROWS, case.head_dim + STATE_LANES), np.nan, np.float32)
    out = np.full((len(ready), case.num_heads, case.head_dim), np.nan, np.float32)
    progress = new_progress(2)
    attention_phase(
        progress[0], ready, keys, values, batch.block_tables, batch.positions, window, plan.items,
        case.sinks, parts, out,
    )  # fmt: skip
    merge_phase(progress[1], batch.positions, window, plan.merges, case.sinks, parts, out)
    return out


LONG = [
    Case(9, 3, 64, 64, ((0, 1100),)),
    Case(4, 2, 16, 16, ((0, 600),)),
    Case(7, 1, 128, 128, ((0, 1100),), has_sinks=True),
    Case(9, 3, 64, 64, ((0, 1100),), window=700, has_sinks=True),
    Case(4, 2, 16, 16, ((0, 600),), window=37),
    Case(4, 2, 16, 16, ((0, 600),), window=256),
    Case(7, 1, 128, 128, ((0, 1100),), window=530),
]


@pytest.mark.parametrize(
    "case", LONG, ids=lambda case: f"{case.num_heads}x{case.head_dim}-{case.window}"
)
def test_a_row_is_the_same_in_a_chunk_and_alone_and_divided_or_not(case: Case) -> None:
    """The last tokens of a sequence: as a chunk, verified together, and one by one."""
    ((_, length),) = case.sequences
    cache = _cache(case)
    keys, values = cache.slots()[0]
    ready = _qkv(case, _batch(case))
    whole = _attend(case, _batch(case), ready, keys, values, num_threads=1)
    for new in (1, 2, 5, 8, 9, 40):
        last = replace(case, sequences=((length - new, new),))
        for num_threads in (1, 2, 16):
            out = _attend(last, _batch(last), ready[-new:], keys, values, num_threads=num_threads)
            np.testing.assert_array_equal(out, whole[-new:])
    before = PIECE_KEYS + 3  # verified rows on both sides of the end of a piece
    across = replace(case, sequences=((before - 6, 6),))
    out = _attend(across, _batch(across), ready[before - 6 : before], keys, values, num_threads=4)
    np.testing.assert_array_equal(out, whole[before - 6 : before])


def test_a_long_sequence_among_short_ones_is_divided() -> None:
    starts, positions = np.arange(33), np.full(32, 100)
    positions[7] = 6000
    plan = plan_attention(starts, positions, 3, 3, 2)
    divided = plan.items[plan.items[:, 4] >= 0]
    assert set(divided[:, 0]) == {7}
    assert len(divided) == 3 * -(-6001 // PIECE_KEYS)
    assert len(plan.merges) == 3
    assert len(plan_attention(starts, np.full(32, 6000), 3, 3, 2).merges) == 0


def test_items_that_do_not_fit_into_the_parts_stay_whole() -> None:
    positions = np.array([PART_ROWS * PIECE_KEYS // 8])
    plan = plan_attention(np.array([0, 1]), positions, 4, 3, 2)
    assert [int(n) for n in plan.merges[:, 4] * 3] == [PART_ROWS * 3 // 8 + 3] * 2
    assert (plan.items[:, 4] == -1).sum() == 2
    rows = plan.items[:, 5][plan.items[:, 4] >= 0]
    assert rows.max() + 3 <= PART_ROWS


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_work_items_cover_every_key_of_every_row_once(case: Case, num_threads: int) -> None:
    for some in (case, replace(case, sequences=((0, 600), (700, 1)))):
        group = some.num_heads // some.num_kv_heads
        counts = [new for _, new in some.sequences]
        starts = np.cumsum([0, *counts])
        positions = np.concatenate([np.arange(old, old + new) for old, new in some.sequences])
        window = some.window or NO_WINDOW
        plan = plan_attention(starts, positions, some.num_kv_heads, group, num_threads, window)
        covered = []
        for sequence, first, end, head, piece, _ in plan.items:
            assert starts[sequence] <= first < end <= starts[sequence + 1]
            first_piece = max(0, positions[first] + 1 - window) // PIECE_KEYS
            end_piece = positions[end - 1] // PIECE_KEYS + 1
            pieces = range(first_piece, end_piece) if piece < 0 else [int(piece)]
            covered += [(row, head, n) for row in range(first, end) for n in pieces]
            if piece >= 0:
                (merge,) = [m for m in plan.merges if tuple(m[:3]) == (first, end, head)]
                assert tuple(merge[3:5]) == (group, end_piece - first_piece)
        wanted = {(row, head) for row in range(len(positions)) for head in range(some.num_kv_heads)}
        assert {(row, head) for row, head, _ in covered} == wanted
        found = set(covered)
        assert len(found) == len(covered)
        assert all(
            (row, head, n) in found
            for row, head in wanted
            for n in range(
                max(0, positions[row] + 1 - window) // PIECE_KEYS, positions[row] // PIECE_KEYS + 1
            )
        )


def test_what_lies_before_a_window_is_not_read() -> None:
    """Tiles of 64 keys that no row of an item sees may hold anything."""
    case = Case(4, 2, 16, 16, ((599, 1),), window=70)
    cache, batch = _cache(case), _batch(case)
    keys, values = cache.slots()[0]
    ready = _qkv(case, batch)
    wanted = {n: _attend(case, batch, ready, keys, values, num_threads=n) for n in (1, 16)}
    behind = batch.block_tables[0, : (600 - 70) // 64 * 64 // case.block_size]
    cache.slots().view(np.float32)[0][:, behind] = np.nan
    for num_threads, rows in wanted.items():
        found = _attend(case, batch, ready, keys, values, num_threads=num_threads)
        np.testing.assert_array_equal(found, rows)
        assert np.isfinite(found).all()
