"""Runners of gpt-oss: sinks beside windows, biases everywhere, and experts in MXFP4."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu import launches
from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.weights import Form
from tests.gpu_kernels.compared_ways import compare_ways
from tests.support.models.fused_experts import in_mxfp4_form
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    weights_of,
    write_checkpoint,
    write_safetensors,
)


def in_mxfp4(folder: Path, config: dict[str, Any]) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a folder as hubs have it, and the values of its weights."""
    tensors, values = in_mxfp4_form(weights_of(config))
    stored = config | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(stored))
    write_safetensors(folder / "model.safetensors", tensors, "BF16")
    return folder, values


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "form", "kv"),
    [
        (CONFIGS["gpt_oss"] | {"num_hidden_layers": 1}, Form.BF16, "auto"),
        (CONFIGS["gpt_oss_newer"] | {"num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"]}, Form.MXFP4, "int8"),
    ],
    ids=["one layer in floats", "in MXFP4, with keys in bytes"],
)  # fmt: skip
def test_rows_are_those_of_float64_and_the_same_in_whatever_way(
    config: dict[str, Any], form: Form, kv: str, tmp_path: Path, interpreted_card: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In chunks cut anywhere, in single rows, beside others and as drafts, over several pieces."""
    monkeypatch.setattr(launches, "AttentionShape", partial(AttentionShape, piece=32))
    values = weights_of(config)
    folder = write_checkpoint(tmp_path, config)
    if form is Form.MXFP4:
        folder, values = in_mxfp4(folder, config)
    runner = on_card(folder, kv_cache_dtype=kv, num_drafts=3)
    decoder: Any = runner.decoder
    own = decoder.launches.weights.layers[0].experts
    assert (own.gate_up.form, own.down.form) == (form, form)
    # Of scores that are almost equal, rounding decides which expert is chosen.
    assert compare_ways(runner, config, values) < 0.06
    assert [card.late for card in interpreted_card] == [()]
