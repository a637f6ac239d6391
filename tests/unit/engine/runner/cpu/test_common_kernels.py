"""What is compiled before a model is loaded is what the model's steps call."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runner.cpu import common_kernels
from engine.runner.drawing.sampler import sampled_rows
from engine.runner.flat_batch import BatchLimits, flatten
from engine.runner.kernels.attention import attention_phase
from engine.runner.kernels.layer import whole_expert_layer, whole_layer
from engine.runner.kernels.products.linear import linear
from engine.runner.kernels.sampling.sample_rows import sample_rows
from engine.runner.kernels.step_rows import lay_out_draws, lay_out_rows
from tests.support.engine.build import BLOCK_SIZE, Engine, make_request
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint


def test_a_model_needs_no_further_compilation(tmp_path: Path) -> None:
    common_kernels.compile_attention()
    common_kernels.compile_layers()
    common_kernels.compile_draws()
    own = (sample_rows, lay_out_rows, lay_out_draws)
    kernels = (attention_phase, whole_layer, linear, *own)
    compiled = [set(kernel.signatures) for kernel in kernels]
    assert all(compiled)
    assert len(compiled[0]) == 1  # layers call what is compiled beside them
    load(write_checkpoint(tmp_path, CONFIGS["llama"]), max_model_len=64).warm_up()
    assert [set(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.parametrize("family", [*(name for name in CONFIGS if "moe" in name), "gpt_oss"])
def test_nor_does_one_with_experts(tmp_path: Path, family: str) -> None:
    common_kernels.compile_layers()
    common_kernels.compile_expert_layers()
    common_kernels.compile_draws()
    kernels = (whole_layer, whole_expert_layer, linear)
    compiled = [set(kernel.signatures) for kernel in kernels]
    assert len(compiled[1]) == 1
    load(write_checkpoint(tmp_path, CONFIGS[family]), max_model_len=64).warm_up()
    assert [set(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.parametrize(("family", "has_experts"), [("llama", False), ("qwen3_moe", True)])
def test_layers_with_experts_are_compiled_for_models_that_have_some(
    tmp_path: Path, family: str, has_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []
    monkeypatch.setattr(common_kernels, "compile_together", parts.extend)
    load(write_checkpoint(tmp_path, CONFIGS[family]), max_model_len=64)
    assert ("layers with experts" in parts) is has_experts
    assert "layers and logits" in parts


def test_a_step_that_was_planned_needs_none() -> None:
    """Neither one of a prompt, nor one of decodes alone, whose columns its planner keeps."""
    common_kernels.compile_layers()
    common_kernels.compile_draws()
    kernels = (lay_out_rows, lay_out_draws)
    compiled = [set(kernel.signatures) for kernel in kernels]
    prompt, decodes = Engine(num_blocks=16), Engine(num_blocks=16)
    for engine in (prompt, decodes):
        engine.add(make_request(5, max_tokens=9))
    decodes.step()
    limits = BatchLimits(
        max_tokens=64, max_len=64, num_blocks=16, block_size=BLOCK_SIZE, vocab_size=2000
    )
    for engine, is_plain in ((prompt, False), (decodes, True)):
        batch = engine.plan().batch
        assert batch.is_plain_decodes is is_plain
        flatten(batch, limits)
        sampled_rows(batch, limits.vocab_size, frozenset())
    assert [set(kernel.signatures) for kernel in kernels] == compiled
