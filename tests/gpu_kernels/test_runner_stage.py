"""What the stage `runner_bits` asks of a node's runner on a card, in the interpreter."""

from __future__ import annotations

from pathlib import Path

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import FAMILIES, on_card  # isort: skip

import pytest

from tests.gpu.stages.runner import check_going_on
from tests.support.models.tiny_checkpoints import write_checkpoint


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("interpreted_card")
def test_steps_that_are_begun_ahead_and_drafts_between_them(tmp_path: Path) -> None:
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 1}
    check_going_on(on_card(write_checkpoint(tmp_path, config)), [7, 5, 9], 7)
