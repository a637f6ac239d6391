"""What the stage `runner_bits` asks of a node's runner on a card, in the interpreter."""

from __future__ import annotations

from pathlib import Path

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import (  # isort: skip
    FAMILIES,
    PROMPT,
    TABLE,
    computed,
    on_card,
)

import pytest

from common.settings.config import SpeculationConfig
from engine.runner.start import load
from tests.gpu.stages.runner import SMALL, check_drafts, check_going_on, loaded
from tests.support.models.tiny_checkpoints import write_checkpoint


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("interpreted_card")
def test_steps_that_are_begun_ahead_and_drafts_between_them(tmp_path: Path) -> None:
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 1}
    runner = on_card(write_checkpoint(tmp_path, config), num_drafts=3)
    computed(runner, PROMPT, [])
    check_drafts(runner, PROMPT, TABLE)
    check_going_on(runner, [7, 5, 9], 7)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("interpreted_card")
def test_it_says_so_where_no_graph_verifies_drafts(tmp_path: Path) -> None:
    """As on a node that was loaded without drafts, whose rows of drafts are a chunk."""
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 1}
    runner = on_card(write_checkpoint(tmp_path, config))
    computed(runner, PROMPT, [])
    with pytest.raises(AssertionError, match="graphs of"):
        check_drafts(runner, PROMPT, TABLE)


def test_the_stages_load_a_node_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[SpeculationConfig] = []
    monkeypatch.setattr(
        load, "load_model_runner", lambda *_, speculation: given.append(speculation)
    )
    loaded(SMALL, 2048)
    assert [one.num_speculative_tokens for one in given] == [3]
