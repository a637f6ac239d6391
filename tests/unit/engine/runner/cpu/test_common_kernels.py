"""What is compiled before a model is loaded is what the model's steps call."""

from __future__ import annotations

from pathlib import Path

from engine.runner.cpu import common_kernels
from engine.runner.kernels.attention import attention_phase
from engine.runner.kernels.layer import whole_layer
from engine.runner.kernels.products.linear import linear
from engine.runner.kernels.sampling.sample_rows import sample_rows
from engine.runner.kernels.step_rows import lay_out_draws, lay_out_rows
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
