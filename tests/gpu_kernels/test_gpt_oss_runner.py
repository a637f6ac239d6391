"""Runners of gpt-oss: sinks beside windows, biases everywhere, and experts in MXFP4."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.runner.gpu import launches
from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.weights import Form
from engine.runner.model_runner import ModelRunner
from tests.support.models.fused_experts import in_mxfp4_form
from tests.support.models.reference_decoder import reference_logits
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

PROMPT = prompt_of(60)
TABLE, OTHERS = [5, 3, 1, 9], [6, 7, 8, 12]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def in_mxfp4(folder: Path, config: dict[str, Any]) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a folder as hubs have it, and the values of its weights."""
    tensors, values = in_mxfp4_form(weights_of(config))
    stored = config | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(stored))
    write_safetensors(folder / "model.safetensors", tensors, "BF16")
    return folder, values


def computed(runner: ModelRunner, *cuts: int) -> list[np.ndarray]:
    """Return the logits after the prompt's beginnings that end at `cuts`, and after all of it."""
    found = []
    for start, end in pairwise([0, *cuts, len(PROMPT)]):
        found += list(logits_of(runner, scheduled(PROMPT[start:end], start, TABLE)))
    return found


def drafted(tokens: Sequence[int], start: int, table: Sequence[int]) -> ScheduledSequence:
    """A sequence's last token, and drafts behind it."""
    sample = SampleInput(GREEDY, 0, PROMPT[: start + 1], [])
    return ScheduledSequence(0, tokens, start, table, sample, num_drafts=len(tokens) - 1)


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
    [whole] = computed(runner)
    *_, alone = singles = computed(runner, 17, 56, 57, 58, 59)
    assert np.array_equal(alone, whole)
    exact = reference_logits(config, values, PROMPT)[[16, *range(55, 60)]]
    errors = np.linalg.norm(singles - exact, axis=1) / np.linalg.norm(exact, axis=1)
    # Of scores that are almost equal, rounding decides which expert is chosen.
    assert np.median(errors) < 0.06
    mine, other = scheduled(PROMPT[53:], 53, TABLE), scheduled(prompt_of(20, 4), 0, OTHERS)
    assert np.array_equal(logits_of(runner, other, mine)[1], whole)
    drafts = [drafted(PROMPT[56:], 56, TABLE), drafted([7, 8], 20, OTHERS)]
    assert np.array_equal(logits_of(runner, *drafts)[:4], singles[-4:])
    assert [card.late for card in interpreted_card] == [()]
