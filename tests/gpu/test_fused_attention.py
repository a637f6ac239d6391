"""Paddle's fused paged attention on a GPU, against the plain operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.runner.paddle.fused_check import flash_problem, paged_problem
from engine.runner.paddle_import import has_gpu, paddle
from engine.runner.weights.model_spec import read_decoder_spec
from tests.unit.runner.running import load, logits_of, scheduled
from tests.unit.runner.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="needs a GPU and a Paddle built for it"),
]
# Head sizes for which the fused operator is compiled start at 64.
CONFIG = CONFIGS["qwen3"] | {"head_dim": 64}


def test_the_self_check_passes(tmp_path: Path) -> None:
    paddle.set_device("gpu")
    spec = read_decoder_spec(write_checkpoint(tmp_path, CONFIG))
    assert paged_problem(spec, "float16", 64) == ""
    assert flash_problem(spec, "float16", 64) == ""


@pytest.mark.parametrize("backend", ["paddle", "fused"])
def test_logits_of_a_mixed_batch_are_near_those_of_a_whole_prompt(
    tmp_path: Path, backend: str
) -> None:
    folder = write_checkpoint(tmp_path, CONFIG)
    runner = load(folder, attention_backend=backend, block_size=64, kv_cache_memory=8 << 20)
    assert runner.attention_backend == backend
    prompts = [prompt_of(100, 1), prompt_of(70, 2), prompt_of(90, 3), prompt_of(75, 4)]
    tables = [[1, 5], [3, 2], [0, 4], [7, 6]]
    cached = [99, 20, 0, 70]
    for prompt, table, count in zip(prompts, tables, cached, strict=True):
        if count:
            logits_of(runner, scheduled(prompt[:count], 0, table))
    mixed = logits_of(
        runner,
        *(
            scheduled(prompt[count:], count, table)
            for prompt, table, count in zip(prompts, tables, cached, strict=True)
        ),
    )
    for prompt, table, logits in zip(prompts, tables, mixed, strict=True):
        [whole] = logits_of(runner, scheduled(prompt, 0, table))
        np.testing.assert_allclose(logits, whole, atol=0.1)
