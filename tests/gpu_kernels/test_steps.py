"""The same logits, bit for bit, however a prompt's rows are divided into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import numpy as np
import pytest

from engine.runner.back_end import StepShape
from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.decoder import GpuDecoder
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.steps.step_rows import NO_ROW, StepRows
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import Form
from tests.gpu.decoding import Decoding
from tests.gpu_kernels.tiny_decoder import BLOCK, MAX_LEN, SHAPE, SPEC, TinyDecoder

NARROW = Tile(16, 32, 64, 4, 3)
WIDE = Tile(64, 64, 32, 4, 3)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, SPEC.vocab_size, 75)]
TABLE = [9, 3, 17, 4, 11, 30]


def in_chunks(tiny: TinyDecoder, make: Launches, *cuts: int) -> np.ndarray:
    """Return the last row's logits of the prompt, computed in chunks that end at `cuts`."""
    steps = ChunkStep(tiny.device, make, 0, 128, 2, MAX_LEN)  # type: ignore[arg-type]
    start = 0
    for end in (*cuts, len(PROMPT)):
        steps.run([ChunkRow(PROMPT[start:end], start, TABLE)])
        start = end
    logits: np.ndarray = steps.logits(1)[0].copy()
    return logits


def decoded(
    tiny: TinyDecoder, make: Launches, count: int, mine: int, start: int
) -> tuple[np.ndarray, Decoding]:
    """Return the logits of the prompt's last token; its rows from `start` on are decoded."""
    step = Decoding(tiny.device, make, 0, count, MAX_LEN)
    tables = np.full((count, step.table_width), 40)
    tables[mine, : len(TABLE)] = TABLE
    for place in range(start, len(PROMPT)):
        tokens, lasts = np.full(count, 5), np.where(np.arange(count) % 2, -1, 7)
        tokens[mine], lasts[mine] = PROMPT[place], place
        step.set_rows(tokens, lasts, tables)
        step.begin()
    return step.logits()[mine].copy(), step


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder()


@pytest.fixture(scope="module")
def whole(tiny: TinyDecoder) -> np.ndarray:
    return in_chunks(tiny, tiny.launches(NARROW))


def test_logits_are_those_of_float64(tiny: TinyDecoder, whole: np.ndarray) -> None:
    exact = tiny.logits(PROMPT)
    assert np.linalg.norm(whole - exact) / np.linalg.norm(exact) < 0.01


@pytest.mark.parametrize("cuts", [(1,), (33,), (16, 17, 64)])
def test_a_chunk_cut_anywhere_has_the_same_bits(
    tiny: TinyDecoder, whole: np.ndarray, cuts: Sequence[int]
) -> None:
    make = tiny.launches(WIDE, replace(SHAPE, chunk_rows=16))
    assert np.array_equal(in_chunks(tiny, make, *cuts), whole)


@pytest.mark.parametrize(("count", "mine"), [(1, 0), (3, 2)])
def test_decoded_rows_have_the_same_bits(
    tiny: TinyDecoder, whole: np.ndarray, count: int, mine: int
) -> None:
    make = tiny.launches(WIDE)
    in_chunks(tiny, make)
    logits, step = decoded(tiny, make, count, mine, 71)
    assert np.array_equal(logits, whole)
    step.close()


def test_a_step_after_another_takes_its_tokens_on_the_card(
    tiny: TinyDecoder, whole: np.ndarray
) -> None:
    """In another order of the rows, and with a row of the host's beside them."""
    make = tiny.launches(NARROW)
    in_chunks(tiny, make)
    _, step = decoded(tiny, make, 2, 0, 74)
    first = int(whole.argmax())
    assert step.drawn()[0] == first
    expected = in_chunks_of(tiny, [*PROMPT, first])
    tables = np.full((2, step.table_width), 40)
    tables[1, : len(TABLE)] = TABLE
    positions = np.array([3, 75])
    slots = np.array([40 * BLOCK + 3, TABLE[75 // BLOCK] * BLOCK + 75 % BLOCK])
    rows = StepRows(np.array([7, 0]), positions, slots, 2, tables, sources=np.array([NO_ROW, 0]))
    assert step.steps.begin(rows, step._ways)
    step.steps.read(2)
    assert np.array_equal(step.logits()[1], expected)
    assert step.tokens()[1] == int(expected.argmax())
    step.close()


def test_rows_of_drafts_have_the_same_bits(tiny: TinyDecoder) -> None:
    """Sequences that end at position 65, beyond the beginning of a piece, in one graph."""
    counts = (1, 4, 3)
    make = tiny.launches(NARROW)
    shape = StepShape(num_tokens=64, num_seqs=4, num_logits_rows=16, decode_rows=4)
    decoder = GpuDecoder(tiny.device, lambda pool: make, make.pool, make.spec, shape, MAX_LEN, 0)  # type: ignore[arg-type]
    tables = np.arange(len(counts) * 5).reshape(-1, 5)
    chunks = ChunkStep(tiny.device, make, 0, 256, len(counts), MAX_LEN)  # type: ignore[arg-type]
    chunks.run([
        ChunkRow(PROMPT[: 66 - count], 0, table.tolist())
        for table, count in zip(tables, counts, strict=True)
    ])  # fmt: skip
    positions = np.concatenate([np.arange(66 - count, 66) for count in counts])
    own_tables = np.repeat(tables, counts, axis=0)[np.arange(len(positions)), positions // BLOCK]
    flat = FlatBatch(
        np.array(PROMPT)[positions], positions, own_tables * BLOCK + positions % BLOCK,
        np.cumsum([0, *counts]), tables, np.arange(len(positions)),
    )  # fmt: skip
    hidden = decoder.begin(flat)
    assert hidden.rows.chunks is None
    assert hidden.rows.rows_each == 4
    found = decoder.logits(hidden, np.arange(len(positions)))
    longest = tables[counts.index(4)].tolist()
    for position in range(62, 66):
        chunks.run([ChunkRow(PROMPT[position : position + 1], position, longest)])
        expected = chunks.logits(1)[0]
        for row in np.flatnonzero(positions == position):
            assert np.array_equal(found[row], expected), (row, position)
    decoder.close()


def in_chunks_of(tiny: TinyDecoder, tokens: Sequence[int]) -> np.ndarray:
    steps = ChunkStep(tiny.device, tiny.launches(NARROW), 0, 128, 2, MAX_LEN)  # type: ignore[arg-type]
    steps.run([ChunkRow(tokens, 0, TABLE)])
    logits: np.ndarray = steps.logits(1)[0].copy()
    return logits


def test_chunks_beside_each_other_have_the_same_bits(tiny: TinyDecoder, whole: np.ndarray) -> None:
    make = tiny.launches(WIDE)
    steps = ChunkStep(tiny.device, make, 0, 160, 2, MAX_LEN)  # type: ignore[arg-type]
    other = range(40, 46)
    steps.run([ChunkRow(PROMPT[::-1], 0, other), ChunkRow(PROMPT[:40], 0, TABLE)])
    steps.run([ChunkRow(PROMPT[:5], 75, other), ChunkRow(PROMPT[40:], 40, TABLE)])
    assert np.array_equal(steps.logits(2)[1], whole)


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.BF16])
def test_quantised_weights_have_the_same_bits_in_every_tile(form: Form) -> None:
    tiny = TinyDecoder(form)
    whole = in_chunks(tiny, tiny.launches(WIDE))
    make = tiny.launches(replace(NARROW, is_together=True))
    in_chunks(tiny, make)
    logits, step = decoded(tiny, make, 2, 0, 73)
    assert np.isfinite(whole).all()
    assert np.array_equal(logits, whole)
    step.close()


GEMMA = replace(
    SPEC, embedding_scale=11.3, is_gelu=True, has_output_norms=True, has_norm_offsets=True,
    score_divisor=20.0,
)  # fmt: skip


def test_norms_of_what_is_added_and_gelu_are_those_of_float64() -> None:
    tiny = TinyDecoder(spec=GEMMA)
    found = in_chunks(tiny, tiny.launches(replace(WIDE, is_described=True)))
    exact = tiny.logits(PROMPT)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.01


def test_norms_of_what_is_added_and_gelu_have_the_same_bits_in_every_tile() -> None:
    tiny = TinyDecoder(Form.Q8_0, GEMMA)
    whole = in_chunks(tiny, tiny.launches(WIDE))
    make = tiny.launches(replace(NARROW, is_together=True))
    in_chunks(tiny, make)
    logits, step = decoded(tiny, make, 2, 0, 73)
    assert np.array_equal(logits, whole)
    step.close()


def test_memory_of_the_interpreter_starts_as_nan() -> None:
    device = InterpretedDevice()
    memory = device.allocate(64)
    assert np.isnan(np.frombuffer(device.download(memory.address, 64), np.float32)).all()
