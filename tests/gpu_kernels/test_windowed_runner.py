"""Runners of models whose layers have sliding windows, with texts of several pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.runner.gpu import launches
from engine.runner.gpu.card import Card
from engine.runner.gpu.launches import AttentionShape
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.stepped_node import DRAWN, GREEDY, Node
from tests.support.models.reference_decoder import reference_logits
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
)

pytestmark = pytest.mark.usefixtures("short_pieces")
PIECE = 32
PROMPT = prompt_of(60)
TABLE, OTHERS = [5, 3, 1, 9], [6, 7, 8, 12]
FAMILIES = {
    "every layer": CONFIGS["mistral_window"] | {"sliding_window": 19},
    "every second layer": CONFIGS["qwen3_mixed"] | {"num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"]},
    "the last layers, bytes": CONFIGS["qwen2_last_layers"] | {"head_dim": 32, "sliding_window": 27,
        "num_hidden_layers": 2},
}  # fmt: skip
"""Windows are 19, 21 and 27."""


@pytest.fixture
def short_pieces(interpreted_card: list[Card], monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """Nodes' cards, on which a piece has PIECE keys."""
    monkeypatch.setattr(launches, "AttentionShape", partial(AttentionShape, piece=PIECE))
    return interpreted_card


def opened(folder: Path, name: str, **engine: object) -> ModelRunner:
    kv = {"kv_cache_dtype": "int8"} if "bytes" in name else {}
    return on_card(folder, **kv, **engine)  # type: ignore[arg-type]


def computed(runner: ModelRunner, cuts: Sequence[int], length: int = len(PROMPT)) -> np.ndarray:
    """Return the logits after the prompt's beginning, in chunks that end at `cuts`."""
    start = 0
    for end in (*cuts, length):
        [last] = logits_of(runner, scheduled(PROMPT[start:end], start, TABLE))
        start = end
    return last


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    return write_checkpoint(tmp_path, FAMILIES[request.param]), request.param


@pytest.mark.timeout(300)
def test_logits_are_those_of_float64_and_the_same_cut_anywhere(
    model: tuple[Path, str], short_pieces: list[Card]
) -> None:
    """In chunks, and at the ends in single rows, which are graphs; their kernels are all compiled
    at the start."""
    folder, name = model
    ours = computed(opened(folder, name), [])
    exact = reference_logits(FAMILIES[name], weights_of(FAMILIES[name]), PROMPT)[-1]
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.06
    for cuts in ((17, 33, 50), (1, 56, 57, 58, 59)):
        assert np.array_equal(computed(opened(folder, name), cuts), ours), cuts
    assert [card.late for card in short_pieces] == [()] * 3  # type: ignore[attr-defined]


@pytest.mark.timeout(300)
def test_drafts_are_verified_as_one_by_one(model: tuple[Path, str]) -> None:
    """In a graph, beside another sequence; the rows' windows begin in two pieces."""
    folder, name = model
    runner = opened(folder, name, num_drafts=3)
    start = FAMILIES[name]["sliding_window"] + PIECE - 3
    other = prompt_of(41, 4)
    computed(runner, [], start)
    logits_of(runner, scheduled(other[:39], 0, OTHERS))
    alone = [computed_at(runner, position) for position in range(start, start + 4)]
    steps = [drafted(PROMPT[start : start + 4], start, TABLE), drafted(other[39:], 39, OTHERS)]
    found = logits_of(runner, *steps)
    assert len(found) == 6
    assert np.array_equal(found[:4], alone)


def computed_at(runner: ModelRunner, position: int) -> np.ndarray:
    [row] = logits_of(runner, scheduled([PROMPT[position]], position, TABLE))
    return row


def drafted(tokens: Sequence[int], start: int, table: Sequence[int]) -> ScheduledSequence:
    """A sequence's last token, and drafts behind it."""
    params = SamplingParams(max_tokens=9, temperature=0.0)
    sample = SampleInput(params, 0, PROMPT[: start + 1], [])
    return ScheduledSequence(0, tokens, start, table, sample, num_drafts=len(tokens) - 1)


@pytest.mark.timeout(300)
def test_steps_that_are_begun_early_draw_the_same_tokens(tmp_path: Path) -> None:
    """While sequences end and come: one is longer than its window from its first step on."""
    folder = write_checkpoint(tmp_path, FAMILIES["every layer"])
    runner = opened(folder, "every layer")

    def answers(*, goes_on: bool) -> list[list[int]]:
        node = Node(runner, goes_on=goes_on)
        node.add(45, 9, 1, **GREEDY)
        node.add(14, 7, 2, **DRAWN)
        for count in range(20):
            if count == 4:
                node.add(30, 5, 3, **GREEDY)
            if node.scheduler.running or node.scheduler.waiting:
                node.step()
        assert (node.num_begun >= 3) == goes_on
        return list(node.outputs.values())

    expected = answers(goes_on=False)
    assert list(map(len, expected)) == [9, 7, 5]
    assert answers(goes_on=True) == expected
