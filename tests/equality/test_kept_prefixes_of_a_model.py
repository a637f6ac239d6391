"""The demo model answers alike when the start of a prompt was in host memory meanwhile.

The pool holds about two of the prompts, so each of them is evicted before it comes back. Host
memory holds the starts of all.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from common.ids import AttemptId
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SchedulingConfig, SpeculationConfig
from engine.runner.model_runner import ModelRunner
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.pressure import (
    NUM_DRAFTS,
    Node,
    answer_together,
    demo_runners,
    mirrored_runner,
)

STARTS = (
    "The river was cold and the boat was old. " * 5,
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 3,
    "Red, green, blue, yellow, black, white, pink, brown and grey. " * 4,
)
ORDER = (0, 0, 1, 1, 2, 2, 0, 1, 2, 1, 0)
"""Each start twice in a row, so that it is used twice while the pool has it, then in turn."""


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and sampled by turns; no two prompts are equal."""
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    found = []
    for number, start in enumerate(ORDER):
        prompt = tokenizer.encode(STARTS[start]).ids[:50] + tokenizer.encode(f"{number}").ids
        temperature = 0.7 * (number % 2)
        sampling = SamplingParams(
            max_tokens=6, temperature=temperature, seed=number, ignore_eos=True
        )
        found.append(
            GenerationRequest(
                id=AttemptId(f"r{number}", 1),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                deadline_s=60.0,
            )
        )
    return found


def node_on(runner: ModelRunner, num_blocks: int, method: str = "none", **given: Any) -> Node:
    speculation = SpeculationConfig(
        speculative_method=method, num_speculative_tokens=NUM_DRAFTS if method == "mtp" else 0
    )
    return Node(
        runner, num_blocks=num_blocks, config=SchedulingConfig(), speculation=speculation, **given
    )


@pytest.fixture(scope="module")
def right(requests: list[GenerationRequest]) -> list[list[int]]:
    """Each prompt computed whole, on a node that has had no other."""
    runner = demo_runners()[0]
    return [answer_together(node_on(runner, 30), [request])[0] for request in requests]


@pytest.mark.covers("F124")
@pytest.mark.parametrize("method", ["none", "mtp"])
@pytest.mark.parametrize("is_mirrored", [False, True], ids=["in the step", "beside the steps"])
def test_answers_are_those_of_prompts_that_were_computed(
    is_mirrored: bool, method: str, requests: list[GenerationRequest], right: list[list[int]]
) -> None:
    runner = mirrored_runner() if is_mirrored else demo_runners()[0]
    node = node_on(runner, 7, method, keeps_prefixes=True, num_host_blocks=14, is_async=is_mirrored)
    found = []
    for request in requests:
        found += answer_together(node, [request])
        for _ in range(8):  # what is to be copied out is, as in a node that has nothing else to do
            node.step()
    assert found == right
    counters = node.scheduler.statistics().counters
    assert counters.prefix_blocks_found["host"] >= 6
    assert counters.prefix_blocks_found["pool"] >= 6
