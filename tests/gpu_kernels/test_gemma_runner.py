"""Runners of Gemma 3: norms of what is added, GELU, scaled embeddings, and two kinds of layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu import launches
from engine.runner.gpu.launches import AttentionShape
from tests.gpu_kernels.compared_ways import compare_ways
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint

FULL_FIRST = CONFIGS["gemma3_newer"] | {
    "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
WINDOW_FIRST = CONFIGS["gemma3"] | {"num_hidden_layers": 2, "sliding_window_pattern": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "kv"),
    [(FULL_FIRST, "auto"), (WINDOW_FIRST, "int8")],
    ids=["another scale of scores", "scaled positions, keys in bytes"],
)
def test_rows_are_those_of_float64_and_the_same_in_whatever_way(
    config: dict[str, Any], kv: str, tmp_path: Path, interpreted_card: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In chunks cut anywhere, in single rows, beside others and as drafts, over several pieces."""
    monkeypatch.setattr(launches, "AttentionShape", partial(AttentionShape, piece=32))
    runner = on_card(write_checkpoint(tmp_path, config), kv_cache_dtype=kv, num_drafts=3)
    error = compare_ways(runner, config, weights_of(config))
    assert error < 0.03
    assert [card.late for card in interpreted_card] == [()]
