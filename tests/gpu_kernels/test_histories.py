"""Random histories of a node on a card that answers late, and in any order that events allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import FAMILIES, on_card, put_interpreter_in_place  # isort: skip
from tests.gpu_kernels.late_device import LateCard, LateDevice  # isort: skip

import pytest

from common.request import SamplingParams
from tests.gpu_kernels.histories import MOST_DRAWN, History, Kind, answered
from tests.support.models.tiny_checkpoints import prompt_of, write_checkpoint

SEEDS = range(8)
NUM_EVENTS = 24
WAYS: list[tuple[int, dict[str, Any]]] = [
    (33, {"temperature": 0.0}),
    (21, {"temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 2}),
    (34, {"temperature": 0.8, "top_p": 0.9, "logprobs": 0}),
    # A row whose last kept token depends on the order of sums, so that the host draws it.
    (6, {"temperature": 1.0, "top_p": 1 - 1e-13}),
]
"""Lengths of prompts, and how their tokens are drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def kinds(folder: Path) -> list[Kind]:
    with pytest.MonkeyPatch.context() as patch:
        put_interpreter_in_place(patch)
        return answered(
            on_card(folder),
            [
                Kind(
                    prompt_of(length, place),
                    SamplingParams(max_tokens=MOST_DRAWN, seed=place, **way),
                )
                for place, (length, way) in enumerate(WAYS)
            ],
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_answers_and_blocks_are_those_of_the_programs_order(
    folder: Path, kinds: list[Kind], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every second card nothing runs that need not have run; on others anything may."""
    device = LateDevice(seed=seed if seed % 2 else None)
    put_interpreter_in_place(monkeypatch, lambda: device, LateCard)
    runner = on_card(folder, num_drafts=3, host_space=1 << 18)
    history = History(runner, kinds, seed)
    history.run(NUM_EVENTS)
    history.end()
    assert device.faults == []
