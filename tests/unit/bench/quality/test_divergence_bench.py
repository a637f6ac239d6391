"""The figures of `divergence`, and how far the demo model's default arithmetic may be away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality.divergence import DEFAULT, EXACT, PEER, distances, figures, joined, measure
from bench.quality.perplexity import TEXT, windows
from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

P = np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
Q = np.log([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])


def test_figures_of_known_probabilities() -> None:
    one = distances(P + 3.0, Q - 1.0, np.array([1, 0]))
    assert one.divergence == pytest.approx([0.25 * math.log(2), 0])
    assert one.margin == pytest.approx([math.log(2), 0])
    found: Any = figures({DEFAULT: one, PEER: distances(P, P, np.array([1, 0]))})
    assert found["num_tokens"] == 2
    assert found["perplexity"] == {
        EXACT: pytest.approx(8**0.5, abs=1e-4), DEFAULT: pytest.approx(2, abs=1e-4),
        PEER: pytest.approx(8**0.5, abs=1e-4),
    }  # fmt: skip
    assert found["loss"] == {DEFAULT: pytest.approx(2 / 8**0.5 - 1, abs=1e-6), PEER: 0}
    assert found["divergence"] == {DEFAULT: pytest.approx(math.log(2) / 8, abs=1e-6), PEER: 0}
    assert found["other_choices"] == {DEFAULT: 0.5, PEER: 0}
    assert found["largest_margin"] == {DEFAULT: pytest.approx(math.log(2), abs=1e-3), PEER: 0}


def test_distances_of_parts_are_those_of_the_whole() -> None:
    parts = [distances(P[n : n + 1], Q[n : n + 1], np.array([2])) for n in range(2)]
    whole = distances(P, Q, np.array([2, 2]))
    np.testing.assert_array_equal(joined(parts).divergence, whole.divergence)
    np.testing.assert_array_equal(joined(parts).margin, whole.margin)


def test_a_model_without_blocks_has_one_arithmetic(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["llama"])
    text = prompt_of(40)
    [logits] = load(tmp_path, 64).logits_of_all(text)
    peer = np.concatenate([logits, logits[:1]])[None]
    found = measure(tmp_path, [text], 1, peer)
    for one in found.values():
        assert len(one.exact) == 39
        assert not one.divergence.any()
        assert not one.margin.any()


def test_the_default_arithmetic_is_near_float32() -> None:
    """The bound is between what it is, and what it was with one step for each 32 activations."""
    folder = demo_model_folder()
    text = TEXT.read_text(encoding="utf-8")[:3000]
    ids = TextModel.load(folder, "", 0).encode(text, add_special_tokens=False, param="text")
    found: Any = figures(measure(folder, windows(list(ids), 512)[:1], 0))
    assert found["num_tokens"] == 511
    assert 1e-4 < found["divergence"][DEFAULT] < 2.8e-3
    assert abs(found["loss"][DEFAULT]) < 0.01
