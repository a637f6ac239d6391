"""Runners of Gemma 3: norms of what is added, GELU, scaled embeddings, and two kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu import launches
from engine.runner.gpu.back_end import GpuBackEnd
from engine.runner.gpu.launches import AttentionShape
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.gpu_kernels.compared_ways import compare_ways
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint

CONFIG = CONFIGS["gemma3_newer"] | {
    "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
"""Scores have another scale than their heads' size says."""


@pytest.mark.timeout(300)
def test_rows_are_those_of_float64_and_the_same_in_whatever_way(
    tmp_path: Path, interpreted_card: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks cut anywhere, in single rows, beside others and as drafts, over several pieces."""
    monkeypatch.setattr(launches, "AttentionShape", partial(AttentionShape, piece=32))
    values = weights_of(CONFIG)
    runner = on_card(write_checkpoint(tmp_path, CONFIG), kv_cache_dtype="int8", num_drafts=3)
    assert compare_ways(runner, CONFIG, values) < 0.015
    [card], decoder = interpreted_card, cast(Any, runner.decoder)
    assert card.late == ()
    weights = decoder.launches.weights
    for address, name in (
        (weights.layers[0].attended_norm, "layers.0.post_attention_layernorm"),
        (weights.layers[1].key_norm, "layers.1.self_attn.k_norm"), (weights.final_norm, "norm"),
    ):  # fmt: skip
        wanted = values[f"model.{name}.weight"] + np.float32(1.0)
        raw = card.device.download(address, wanted.nbytes)
        assert np.array_equal(np.frombuffer(raw, np.float32), wanted), name


def test_experts_with_such_norms_are_refused(tmp_path: Path) -> None:
    """Nothing reads them yet; their kernels would leave the norms out."""
    mixed = read_decoder_spec(write_checkpoint(tmp_path, CONFIGS["qwen3_moe"]))
    files = SimpleNamespace(mtp=None, spec=mixed)
    assert GpuBackEnd().why_not(cast(Any, files)) == ""
    files.spec = replace(mixed, has_output_norms=True)
    assert "experts with norms" in GpuBackEnd().why_not(cast(Any, files))
