"""Layers with a sliding window or sinks: a row's own keys alone, and the same bits in whatever
way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.attention_alone import LENGTH, PIECE, AttentionAlone, Layer  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.launches import Launches
from tests.gpu.measuring import SpecRecorder
from tests.gpu_kernels.interpreted import widened

LAYERS = [
    *(Layer(window) for window in (1, 5, 16, PIECE, 40, 64, 200)),
    Layer(37, has_scales=True),
    Layer(37, heads=6, kv_heads=2, dim=64),
    Layer(50, heads=2, kv_heads=2, block=32, piece=64),
    Layer(21, heads=4, kv_heads=1, block=32, has_scales=True),
    Layer(37, heads=8, kv_heads=1, has_sinks=True),
    Layer(40, has_scales=True, has_sinks=True),
]
"""Windows of one key, within a block, of a block, of a piece, across pieces, and longer than the
context; bytes, groups of three, one and four, and blocks of another size."""


@pytest.fixture(scope="module", params=LAYERS, ids=str)
def alone(request: pytest.FixtureRequest) -> AttentionAlone:
    return AttentionAlone(request.param)


@pytest.fixture(scope="module")
def whole(alone: AttentionAlone) -> np.ndarray:
    """The bits of all rows as one chunk."""
    return alone.chunk(0, LENGTH)


def ends_of(alone: AttentionAlone) -> list[int]:
    """Positions around the ends of pieces, and where windows begin a piece or end before it."""
    window, piece = alone.layer.window, alone.layer.piece
    found = {0, 1, window - 1, window, piece - 1, piece, piece + window - 2, piece + window - 1,
             2 * piece + 3, LENGTH - 1}  # fmt: skip
    return sorted(position for position in found if 0 <= position < LENGTH)


def test_rows_are_those_of_float64(alone: AttentionAlone, whole: np.ndarray) -> None:
    found = widened(whole)
    for position in range(LENGTH):
        exact = alone.exact(position)
        assert np.linalg.norm(found[position] - exact) < 0.01 * np.linalg.norm(exact), position


@pytest.mark.parametrize("chunk_rows", [16, 64])
def test_a_chunk_cut_anywhere_has_the_same_bits(
    alone: AttentionAlone, whole: np.ndarray, chunk_rows: int
) -> None:
    """Tiles whose rows begin in different pieces, and those that begin within one."""
    cuts = [0, 1, 33, 34, 70, LENGTH]
    for first, end in pairwise(cuts):
        assert np.array_equal(alone.chunk(first, end, chunk_rows), whole[first:end]), (first, end)


def test_decoded_rows_have_the_same_bits(alone: AttentionAlone, whole: np.ndarray) -> None:
    """Beside others and padding; only pieces that a row sees are computed."""
    lasts = [*ends_of(alone), -1]
    found, num_pieces = alone.decode(lasts)
    window, piece = alone.layer.window, alone.layer.piece
    for row, last in enumerate(lasts[:-1]):
        assert np.array_equal(found[row], whole[last]), last
        assert num_pieces[row] == last // piece - max(last - window + 1, 0) // piece + 1
    assert num_pieces[-1] == 0
    single, _ = alone.decode([LENGTH - 1])
    assert np.array_equal(single[0], whole[-1])


@pytest.mark.parametrize("rows_each", [2, 4])
def test_rows_of_drafts_have_the_same_bits(
    alone: AttentionAlone, whole: np.ndarray, rows_each: int
) -> None:
    """Rows of one sequence begin in different pieces, and end in different ones."""
    piece = alone.layer.piece
    lasts = [*ends_of(alone), 2, piece + 1, -1]
    found, _ = alone.decode(lasts, rows_each)
    positions = np.array(lasts)[:, None] + np.arange(1 - rows_each, 1)
    positions[-1] = -1
    num_compared = 0
    for row, position in enumerate(positions.ravel()):
        if position >= 0:
            assert np.array_equal(found[row], whole[position]), (row, position)
            num_compared += 1
    assert num_compared > rows_each * (len(lasts) - 4)


@pytest.mark.parametrize("rows_each", [1, 4])
def test_blocks_before_the_window_are_not_read(rows_each: int) -> None:
    """They may hold anything, in pieces that a row sees too."""
    layer = Layer(20)
    alone, last = AttentionAlone(layer), 99
    first = last - rows_each + 1
    wanted = alone.chunk(first, last + 1)
    num_hidden = (first - layer.window + 1) // layer.block
    assert num_hidden == (5 if rows_each == 1 else 4)  # of a piece's two blocks the first
    for place in range(num_hidden):
        alone.forget(place)
    assert np.array_equal(alone.chunk(first, last + 1), wanted)
    found, _ = alone.decode([last], rows_each)
    assert np.array_equal(found, wanted)
    alone.forget(num_hidden)
    broken, _ = alone.decode([last], rows_each)
    assert np.isnan(widened(broken)).any()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_window_longer_than_the_context_has_the_bits_of_none(has_sinks: bool) -> None:
    """So the same model with a window and with a context that it covers answers alike."""
    windowed, plain = (AttentionAlone(Layer(one, has_sinks=has_sinks)) for one in (200, 0))
    assert np.array_equal(windowed.chunk(0, LENGTH), plain.chunk(0, LENGTH))
    lasts = [0, 31, 32, 99]
    for rows_each in (1, 4):
        found, expected = (one.decode(lasts[rows_each > 1 :], rows_each)[0]
                           for one in (windowed, plain))  # fmt: skip
        assert np.array_equal(found, expected)


def test_windows_of_all_lengths_have_one_kernel() -> None:
    """And layers without one have that of models without windows."""
    recorder, alone = SpecRecorder(), AttentionAlone(Layer(37))
    spec = replace(alone.make.spec, num_layers=3, windows=(37, 0, 900))
    weights: Any = None
    make = Launches(
        recorder.kernel, alone.device.properties, spec, weights, alone.pool, alone.make.shape
    )
    for layer in range(3):
        make.attention.attend_chunk(layer, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
    one, other = (dict(kernel.constants) for kernel in recorder.specs)
    assert other == one | {"window": None}
    assert one["sinks"] is None
