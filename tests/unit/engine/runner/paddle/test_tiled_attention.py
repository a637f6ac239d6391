"""Tiled attention: every row sees its own past, the same bits in any batch, within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of as step_batch_of
from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.paddle.attention import PaddleAttention
from engine.runner.paddle.attention_tiles import TileLimits, plan_tiles
from engine.runner.paddle_import import paddle
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.reference_decoder import causal_attention
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NUM_BLOCKS, BLOCK_SIZE = 400, 16
LIMITS = BatchLimits(
    max_tokens=4000, max_len=4000, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=1
)
LONG, VERIFIED, CHUNK = (1400, 1), (700, 5), (300, 100)
NEIGHBOURS = [(0, 1), (127, 1), (128, 1), (0, 40), (600, 3), (15, 16), (255, 17)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    config = CONFIGS["llama"] | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return read_decoder_spec(write_checkpoint(tmp_path_factory.mktemp("spec"), config))


def new_cache(spec: DecoderSpec) -> KVCache:
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        block_size=BLOCK_SIZE, dtype="float32",
    )  # fmt: skip
    cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes)
    cache.slots().view(np.float32)[:] = np.nan  # nothing outside a sequence may reach a sum
    return cache


def batch_of(sequences: Sequence[tuple[int, int]]) -> FlatBatch:
    tables, first = [], NUM_BLOCKS - 1
    for cached, new in sequences:
        count = -(-(cached + new) // BLOCK_SIZE)
        tables.append(list(range(first, first - count, -1)))
        first -= count
    return flatten(
        step_batch_of(
            [
                ScheduledSequence(0, [0] * new, cached, table, None)
                for (cached, new), table in zip(sequences, tables, strict=True)
            ]
        ),
        LIMITS,
    )


def every(batch: FlatBatch) -> np.ndarray:
    return np.arange(len(batch.row_starts) - 1)


def attended(
    spec: DecoderSpec,
    sequences: Sequence[tuple[int, int]],
    limits: TileLimits | None = None,
    sinks: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The rows of each sequence; equal (cached, new) have equal keys, values and queries."""
    cache, batch = new_cache(spec), batch_of(sequences)
    rows = []
    for index, (cached, new) in enumerate(sequences):
        random = np.random.default_rng(cached)
        shape = (spec.num_kv_heads, cached, spec.head_dim)
        table = batch.block_tables[index]
        positions = np.arange(cached)
        for part in cache.slots().view(np.float32)[0]:
            past = random.standard_normal(shape).astype(np.float32)
            part[table[positions // BLOCK_SIZE], :, positions % BLOCK_SIZE] = past.swapaxes(0, 1)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        rows.append(random.standard_normal((new, heads, spec.head_dim)).astype(np.float32))
    attention = PaddleAttention(spec, cache, "float32")
    if limits is not None:
        for tiles in attention._tiles.values():
            tiles._limits = limits
    attention.begin(batch)
    counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    query, key, value = paddle.split(paddle.to_tensor(np.concatenate(rows)), counts, axis=1)
    scores = None if sinks is None else paddle.to_tensor(sinks)
    out = attention.attend(0, query, key, value, scores)
    return np.split(out.numpy(), batch.row_starts[1:-1])


@pytest.mark.parametrize("one", [LONG, VERIFIED, CHUNK])
@pytest.mark.parametrize("place", [0, 3, len(NEIGHBOURS)])
def test_neighbours_change_no_bit(spec: DecoderSpec, one: tuple[int, int], place: int) -> None:
    [alone] = attended(spec, [one])
    assert np.isfinite(alone).all()
    among = attended(spec, [*NEIGHBOURS[:place], one, *NEIGHBOURS[place:]])
    np.testing.assert_array_equal(among[place], alone)


def softmax_with_sinks(
    spec: DecoderSpec, cached: int, new: int, sinks: np.ndarray, window: int
) -> np.ndarray:
    """What `attended` attends to of this sequence, in float64."""
    random = np.random.default_rng(cached)
    shape = (spec.num_kv_heads, cached, spec.head_dim)
    past = [random.standard_normal(shape) for _ in range(2)]
    heads = spec.num_heads + 2 * spec.num_kv_heads
    rows = random.standard_normal((new, heads, spec.head_dim)).swapaxes(0, 1)
    query, *added = np.split(rows, [spec.num_heads, spec.num_heads + spec.num_kv_heads])
    key, value = (np.concatenate(one, axis=1) for one in zip(past, added, strict=True))
    found = causal_attention(query, key, value, window, sinks=sinks.astype(np.float64))
    return found.swapaxes(0, 1)


@pytest.mark.parametrize("window", [0, 130])
def test_sinks_take_their_share_in_every_batch(spec: DecoderSpec, window: int) -> None:
    """Also such as weigh far more than all keys, or nothing beside them."""
    spec = replace(spec, windows=(window,) * spec.num_layers)
    sinks = np.array([-60.0, -1.5, 0.0, 2.5, 9.0, 60.0], np.float32)
    sequences = [(0, 1), VERIFIED, CHUNK, (128, 1)]
    among = attended(spec, sequences, sinks=sinks)
    for (cached, new), found in zip(sequences, among, strict=True):
        wanted = softmax_with_sinks(spec, cached, new, sinks, window)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        [alone] = attended(spec, [(cached, new)], sinks=sinks)
        np.testing.assert_array_equal(found, alone)
    [fewer] = attended(spec, [(VERIFIED[0], 2)], sinks=sinks)
    np.testing.assert_array_equal(fewer, among[1][:2])


def test_drafts_behind_a_row_change_no_bit_of_it(spec: DecoderSpec) -> None:
    cached, count = VERIFIED
    [verified] = attended(spec, [(cached, count)])
    for shorter in range(1, count):
        [fewer] = attended(spec, [(cached, shorter)])
        np.testing.assert_array_equal(fewer, verified[:shorter])


def test_less_memory_makes_more_groups_of_the_same_bits(spec: DecoderSpec) -> None:
    sequences = [LONG, VERIFIED, CHUNK, *NEIGHBOURS]
    wide = TileLimits(
        block_size=BLOCK_SIZE, num_heads=spec.num_heads, kv_width=spec.num_kv_heads * spec.head_dim
    )
    narrow = replace(wide, max_elements=100_000)
    batch = batch_of(sequences)
    for limits, least in ((wide, 2), (narrow, 8)):
        groups = plan_tiles(batch, every(batch), limits)
        assert len(groups) >= least
        for group in groups:
            rows = group.rows.shape[1]
            for tile in group.tiles:
                keys = (tile.end - tile.first) * BLOCK_SIZE
                each = keys * (2 * limits.kv_width + rows * limits.num_heads)
                assert tile.num_items == 1 or tile.num_items * each <= limits.max_elements
    for found, wanted in zip(
        attended(spec, sequences, narrow), attended(spec, sequences, wide), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_tiles_cover_every_row_and_every_key_once() -> None:
    batch = batch_of([LONG, VERIFIED, CHUNK, *NEIGHBOURS])
    limits = TileLimits(block_size=BLOCK_SIZE, num_heads=6, kv_width=32, max_elements=1 << 18)
    seen: list[int] = []
    for group in plan_tiles(batch, every(batch), limits):
        first = 0
        for tile in group.tiles:
            assert tile.first == first < tile.end
            first = tile.end
        for item, (rows, positions) in enumerate(zip(group.rows, group.positions, strict=True)):
            seen += sorted(set(rows.tolist()))
            np.testing.assert_array_equal(positions, batch.positions[rows])
            reached = [tile.end for tile in group.tiles if item < tile.num_items]
            assert reached[-1] * BLOCK_SIZE > positions[-1]
            assert len(reached) == 1 or reached[-2] * BLOCK_SIZE <= positions[-1]
    assert sorted(seen) == list(range(len(batch.positions)))


def test_a_chunk_of_a_long_context_needs_little_memory() -> None:
    """4096 tokens behind 8192: the scores alone would be 6.4 billion elements at once."""
    table = list(range(-(-12288 // 64)))
    limits = BatchLimits(
        max_tokens=4096, max_len=12288, num_blocks=len(table), block_size=64, vocab_size=1
    )
    batch = flatten(step_batch_of([ScheduledSequence(0, [0] * 4096, 8192, table, None)]), limits)
    groups = plan_tiles(batch, every(batch), TileLimits(block_size=64, num_heads=32, kv_width=1024))
    assert sum(len(group.tiles) for group in groups) <= 16 * len(groups)
    for group in groups:
        num_items, num_rows = group.rows.shape
        widest = max(tile.end - tile.first for tile in group.tiles) * 64
        assert num_items * widest * (2 * 1024 + num_rows * 32) <= 1 << 25


def test_logits_of_a_sampled_row_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path, CONFIGS["qwen3"]), attention_backend="paddle")
    prompt, table = prompt_of(150), list(range(10))
    [whole] = logits_of(runner, scheduled(prompt, 0, table))
    neighbours = [scheduled(prompt_of(9, seed=i), 0, [20 + i]) for i in range(6)]
    among = logits_of(runner, *neighbours, scheduled(prompt[-1:], 149, table))
    np.testing.assert_allclose(among[-1], whole, atol=1e-4)
