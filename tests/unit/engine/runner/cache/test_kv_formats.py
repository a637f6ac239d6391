"""Keys and values in few bits: the same bytes everywhere, and then the arithmetic of floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine.runner.cache.kv_formats import stored_items, stored_slots, widened_items, widened_slots
from engine.runner.kernels.attention import STATE_LANES, attention_phase, merge_phase
from engine.runner.kernels.attention_plan import NO_WINDOW, PART_ROWS, plan_attention
from engine.runner.kernels.kv_slots import item_bytes, store_slot, widen_slot
from engine.runner.kernels.rotary import rotary_phase
from engine.runner.kernels.team import new_progress
from engine.runner.model_runner import ModelRunner
from engine.runner.paddle_import import paddle
from tests.support.models.packing import NONE
from tests.support.models.running import (
    kv_cache_of,
    load,
    logits_in_chunks,
    logits_of,
    scheduled,
    unscaled_keys,
)
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

FEW_BITS = ["bfloat16", "int8"]
HEAD_DIMS = [16, 48, 64, 128]
LEAST = np.float32(2.0**-100)


def slot_bytes(head_dim: int, dtype: str) -> int:
    return {"float32": 4 * head_dim, "bfloat16": 2 * head_dim, "int8": head_dim + 4}[dtype]


def special_rows(head_dim: int) -> np.ndarray:
    """Rows of every size, and those at which a rule begins or ends."""
    random = np.random.default_rng(head_dim)
    rows = random.standard_normal((300, head_dim)) * 10.0 ** random.uniform(-33, 33, (300, 1))
    rows = rows.astype(np.float32)
    rows[0], rows[1], rows[2] = 0.0, -0.0, 3.4e38
    rows[3], rows[4] = 1e-40, np.finfo(np.float32).max
    rows[5], rows[6] = LEAST, np.nextafter(LEAST, np.float32(0))
    rows[7] = np.arange(head_dim) - 0.5  # ties
    rows[8] = np.linspace(-127, 127, head_dim)
    rows[9, 3], rows[10, -1], rows[11, 0] = np.nan, np.inf, -np.inf
    rows[12] = np.frombuffer(b"\x45\x23\x81\xff" * head_dim, np.float32)  # NaN that is not quiet
    return rows


def stored_by_kernel(rows: np.ndarray, dtype: str) -> np.ndarray:
    head_dim = rows.shape[1]
    size = slot_bytes(head_dim, dtype)
    # The bytes behind a slot are the next token's.
    slots = np.full((len(rows), size + 4), 0xAA, np.uint8)
    for row, slot in zip(rows, slots, strict=True):
        store_slot(row.ctypes.data, slot.ctypes.data, head_dim, item_bytes(size, head_dim))
    assert (slots[:, size:] == 0xAA).all()
    return slots[:, :size]


@pytest.mark.parametrize("dtype", ["float32", *FEW_BITS])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernels_store_and_read_the_bytes_of_the_reference(head_dim: int, dtype: str) -> None:
    rows = special_rows(head_dim)
    wanted = stored_slots(rows, dtype)
    slots = np.ascontiguousarray(stored_by_kernel(rows, dtype))
    np.testing.assert_array_equal(slots, wanted)
    read = np.full_like(rows, 7)
    kind = item_bytes(slots.shape[1], head_dim)
    for slot, row in zip(slots, read, strict=True):
        widen_slot(slot.ctypes.data, row.ctypes.data, head_dim, kind)
    np.testing.assert_array_equal(read, widened_slots(wanted, dtype))
    np.testing.assert_array_equal(
        np.signbit(read[:3]), np.signbit(widened_slots(wanted, dtype)[:3])
    )


@pytest.mark.parametrize("dtype", ["float32", *FEW_BITS])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_paddle_stores_and_reads_the_bytes_of_the_reference(head_dim: int, dtype: str) -> None:
    rows = special_rows(head_dim)
    items = stored_items(paddle.to_tensor(rows), dtype)
    slots = items.view("uint8").numpy().reshape(len(rows), -1)
    # Of which NaN a NaN becomes, no one asks.
    is_same = ~np.isnan(rows).any(axis=1) | (dtype == "int8")
    np.testing.assert_array_equal(slots[is_same], stored_slots(rows, dtype)[is_same])
    wide = widened_items(items, dtype, "float32").numpy()
    np.testing.assert_array_equal(wide, widened_slots(slots, dtype))


def test_int8_is_near_and_keeps_what_is_broken() -> None:
    rows = special_rows(64)
    wide = widened_slots(stored_slots(rows, "int8"), "int8")
    largest = np.abs(rows[13:]).max(axis=1)
    error = np.abs(wide[13:] - rows[13:]).max(axis=1)
    assert (error <= np.where(largest < LEAST, LEAST, largest / 253)).all()
    assert not wide[[0, 1, 3, 6]].any()
    assert wide[5].all()
    assert np.isnan(wide[9:13]).all()


def test_bytes_that_nobody_wrote_are_no_numbers() -> None:
    for dtype in ("float32", *FEW_BITS):
        slots = np.full((3, slot_bytes(16, dtype)), 0xFF, np.uint8)
        assert np.isnan(widened_slots(slots, dtype)).all()


@dataclass(frozen=True)
class Case:
    """Sequences as (cached tokens, new tokens), over a cache of some shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]


CASES = [
    Case(4, 2, 16, 16, ((0, 1), (63, 1), (64, 1), (100, 1), (0, 600))),
    Case(9, 3, 64, 64, ((0, 70), (130, 1), (64, 64), (1, 40), (700, 5))),
    Case(7, 1, 128, 128, ((0, 200), (200, 3), (127, 1), (1000, 1))),
    Case(2, 2, 32, 8, ((0, 100), (50, 10), (7, 1), (8, 1))),
    Case(6, 2, 48, 1, ((3, 5), (0, 17))),
    Case(6, 1, 80, 256, ((300, 2), (0, 90))),
]


@dataclass(frozen=True)
class Rows:
    """The flat rows of a case's sequences, with the blocks of each."""

    starts: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    slots: np.ndarray

    @staticmethod
    def of(case: Case) -> Rows:
        width = max(-(-sum(one) // case.block_size) for one in case.sequences)
        blocks = np.random.RandomState(3).permutation(width * len(case.sequences))
        tables = blocks.reshape(len(case.sequences), width)
        spans = [np.arange(cached, cached + new) for cached, new in case.sequences]
        slots = [
            table[span // case.block_size] * case.block_size + span % case.block_size
            for table, span in zip(tables, spans, strict=True)
        ]
        starts = np.cumsum([0, *(len(span) for span in spans)])
        return Rows(starts, np.concatenate(spans), tables, np.concatenate(slots))


def prepared(case: Case, rows: Rows, cache: np.ndarray) -> np.ndarray:
    """Write the rows' keys and values into `cache`; return the kernels' input with its queries."""
    heads = case.num_heads + 2 * case.num_kv_heads
    shape = (len(rows.slots), heads, case.head_dim)
    ready = np.random.RandomState(5).standard_normal(shape).astype(np.float32)
    angles = np.random.RandomState(6).uniform(0, 6, (2000, case.head_dim // 2)).astype(np.float32)
    rotary_phase(
        new_progress(1)[0], ready, np.zeros((0, 0), np.float32), np.float32(0), np.cos(angles),
        np.sin(angles), rows.positions, unscaled_keys(case.num_kv_heads, case.head_dim),
        rows.slots, *cache,
    )  # fmt: skip
    return ready


def attended(
    case: Case, rows: Rows, cache: np.ndarray, ready: np.ndarray, num_threads: int
) -> np.ndarray:
    """Attend over `cache`, bytes `[2, blocks, kv_heads, block_size, slot_bytes]`."""
    group = case.num_heads // case.num_kv_heads
    plan = plan_attention(rows.starts, rows.positions, case.num_kv_heads, group, num_threads)
    parts = np.full((PART_ROWS, case.head_dim + STATE_LANES), np.nan, np.float32)
    out = np.full((len(ready), case.num_heads, case.head_dim), np.nan, np.float32)
    progress = new_progress(2)
    attention_phase(
        progress[0], ready, *cache, rows.tables, rows.positions, NO_WINDOW, plan.items, NONE,
        parts, out,
    )  # fmt: skip
    merge_phase(progress[1], rows.positions, NO_WINDOW, plan.merges, NONE, parts, out)
    return out


def past_of(case: Case, rows: Rows, dtype: str) -> np.ndarray:
    """A cache with random slots before the rows, and NaN everywhere else."""
    num_blocks = rows.tables.size
    shape = (2, num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    past = stored_slots(np.random.RandomState(4).standard_normal(shape).astype(np.float32), dtype)
    is_past = np.zeros(num_blocks * case.block_size, bool)
    for table, (cached, _) in zip(rows.tables, case.sequences, strict=True):
        at = np.arange(cached)
        is_past[table[at // case.block_size] * case.block_size + at % case.block_size] = True
    by_slot = is_past.reshape(num_blocks, 1, case.block_size, 1)
    return np.where(by_slot, past, np.uint8(0xFF))


@pytest.mark.parametrize("dtype", FEW_BITS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.num_heads}x{c.head_dim}x{c.block_size}")
def test_attention_is_that_of_floats_over_the_widened_cache(case: Case, dtype: str) -> None:
    """Bit for bit, however it is divided among threads; and what is written is the reference's."""
    rows = Rows.of(case)
    cache = past_of(case, rows, dtype)
    ready = prepared(case, rows, cache)
    out = attended(case, rows, cache, ready, num_threads=1)
    assert np.isfinite(out).all()
    wide = np.ascontiguousarray(widened_slots(cache, dtype)).view(np.uint8)
    np.testing.assert_array_equal(attended(case, rows, wide, ready, num_threads=1), out)
    for num_threads in (2, 16):
        divided = attended(case, rows, cache, ready, num_threads=num_threads)
        np.testing.assert_array_equal(divided, out)
    for part, first in zip(
        cache, (case.num_heads, case.num_heads + case.num_kv_heads), strict=True
    ):
        slots = part.swapaxes(1, 2).reshape(-1, case.num_kv_heads, part.shape[-1])[rows.slots]
        floats = np.ascontiguousarray(ready[:, first : first + case.num_kv_heads])
        np.testing.assert_array_equal(slots, stored_slots(floats, dtype))


PROMPT = prompt_of(150)
TABLE = [12, 3, 5, 1, 8, 20, 9, 10, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIGS["qwen3"])


@pytest.fixture(scope="module", params=FEW_BITS)
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    return load(folder, max_model_len=256, kv_cache_dtype=request.param)


def stored(runner: ModelRunner, table: list[int]) -> np.ndarray:
    """The slots of `PROMPT`, in order: `[layers, 2, heads, tokens, slot_bytes]`."""
    slots = kv_cache_of(runner).slots()[:, :, table].swapaxes(2, 3)
    layers, planes, heads, _, _, size = slots.shape
    return slots.reshape(layers, planes, heads, -1, size)[:, :, :, : len(PROMPT)].copy()


def test_chunks_neighbours_blocks_and_threads_change_nothing(
    runner: ModelRunner, folder: Path
) -> None:
    dtype = runner.layout.dtype
    [whole] = logits_of(runner, scheduled(PROMPT, 0, TABLE))
    slots = stored(runner, TABLE)
    for chunk in (1, 7, 31, 64, 97):
        runner.kv_bytes.fill(0xFF)
        np.testing.assert_array_equal(logits_in_chunks(runner, PROMPT, TABLE, chunk), whole)
        np.testing.assert_array_equal(stored(runner, TABLE), slots)
    runner.kv_bytes.fill(0xFF)
    neighbours = [scheduled(prompt_of(1 + 3 * i, seed=i), 0, [30 + i]) for i in range(5)]
    logits_of(runner, *neighbours, scheduled(PROMPT[:-1], 0, TABLE))
    last = logits_of(runner, scheduled(PROMPT[-1:], 149, TABLE), *neighbours)
    np.testing.assert_array_equal(last[0], whole)
    for block_size, num_threads in ((1, 1), (8, 2), (64, 1), (128, 2)):
        other = load(
            folder, max_model_len=256, block_size=block_size, num_threads=num_threads,
            kv_cache_dtype=dtype,
        )  # fmt: skip
        other.kv_bytes.fill(0xFF)
        table = list(reversed(range(-(-len(PROMPT) // block_size))))
        np.testing.assert_array_equal(logits_in_chunks(other, PROMPT, table, 37), whole)
        np.testing.assert_array_equal(stored(other, table), slots)


def test_paddle_operators_compute_the_same_model(runner: ModelRunner, folder: Path) -> None:
    [whole] = logits_of(runner, scheduled(PROMPT, 0, TABLE))
    dtype = runner.layout.dtype
    reference = load(folder, max_model_len=256, attention_backend="paddle", kv_cache_dtype=dtype)
    reference.kv_bytes.fill(0xFF)
    found = logits_in_chunks(reference, PROMPT, TABLE, 64)
    # A key that differs in its last bits may be rounded to another byte.
    np.testing.assert_allclose(found, whole, atol=0.05)
    exact = load(folder, max_model_len=256)
    [floats] = logits_of(exact, scheduled(PROMPT, 0, TABLE))
    assert 0 < np.abs(whole - floats).max() < 0.1
    assert runner.layout.model_digest == exact.layout.model_digest
    assert runner.layout.fingerprint != exact.layout.fingerprint
