"""Combinations of policies, orders, modes and methods under which answers must be the same."""

from __future__ import annotations

from typing import TypeVar

import pytest
from tokenizers import Tokenizer

from common.ids import AttemptId
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SchedulingConfig, SpeculationConfig
from engine.runner.model_runner import ModelRunner
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.pressure import NUM_DRAFTS, Node, answer_together

NUM_OUTPUT = 20
LEAST_OUTPUT = 16
Combination = tuple[str, str, str, str, str]
Row = TypeVar("Row", bound=tuple[str, ...])
PROMPTS = (
    "one two three four one two three four one two three four one two three",
    "The river was cold and the boat was old. The river was cold and the",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Red, green, blue, red, green, blue, red, green, blue, red,",
)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and sampled, with and without penalties; priorities differ.

    One has a least length, and many stop tokens: those of its prompt.
    """
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    stop_token_ids = tuple(sorted(set(tokenizer.encode(PROMPTS[1]).ids)))
    ways = (
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True),
        SamplingParams(
            max_tokens=NUM_OUTPUT, temperature=0.7, seed=3,
            min_tokens=LEAST_OUTPUT, stop_token_ids=stop_token_ids,
        ),
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(
            max_tokens=NUM_OUTPUT, temperature=0.5, seed=9, ignore_eos=True,
            repetition_penalty=1.05, frequency_penalty=0.1,
        ),
    )  # fmt: skip
    return [
        GenerationRequest(
            id=AttemptId(f"r{i}", 1),
            prompt_token_ids=tuple(tokenizer.encode(text).ids),
            sampling=sampling,
            deadline_s=60.0,
            priority=i % 2,
        )
        for i, (text, sampling) in enumerate(zip(PROMPTS, ways, strict=True))
    ]


def pressed(combination: Combination) -> tuple[SchedulingConfig, SpeculationConfig]:
    """Return a configuration that keeps few blocks back, so that the pool runs out."""
    reservation, order, mode, method, _ = combination
    config = SchedulingConfig(
        reservation_policy=reservation,
        preemption_policy=order,
        preemption_mode=mode,
        init_new_token_ratio=0.02,
        min_new_token_ratio=0.01,
        reserve_output_block_num_for_decode_when_schedule_new_prefill=0,
        retract_extra_tokens=0,
        retract_decode_steps=1,
        min_progress_tokens=2,
    )
    drafts = 0 if method == "none" else NUM_DRAFTS
    return config, SpeculationConfig(speculative_method=method, num_speculative_tokens=drafts)


def covering_choices(rows: list[Row]) -> list[Row]:
    """A part of `rows` in which every value of every column occurs; greedy, in order."""
    missing = {choice for row in rows for choice in enumerate(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(enumerate(row))))
        missing -= set(enumerate(best))
        chosen.append(best)
    return chosen


def is_async(combination: Combination) -> bool:
    """Return whether steps are planned ahead."""
    return combination[4] == "async"


def roomy_node(runner: ModelRunner) -> Node:
    """Return a node with room for a whole request, without speculation."""
    return Node(
        runner,
        num_blocks=30,
        budget=512,
        config=SchedulingConfig(),
        speculation=SpeculationConfig(),
    )


def answers_alone(runner: ModelRunner, requests: list[GenerationRequest]) -> list[list[int]]:
    """Return the answers of requests that run one at a time, undisturbed."""
    answers = []
    for request in requests:
        node = roomy_node(runner)
        answers += answer_together(node, [request])
        assert node.scheduler.statistics().counters.num_preemptions == 0
    return answers


def pressed_node(
    runner: ModelRunner, combination: Combination, *, num_blocks: int = 7, budget: int = 64
) -> Node:
    """Return a node whose pool runs out."""
    config, speculation = pressed(combination)
    return Node(
        runner,
        num_blocks=num_blocks,
        budget=budget,
        config=config,
        speculation=speculation,
        is_async=is_async(combination),
    )


def prefill_node(runner: ModelRunner, combination: Combination) -> Node:
    """Return a node that sends to a `pressed_node`."""
    _, speculation = pressed(combination)
    return Node(
        runner,
        num_blocks=12,
        config=SchedulingConfig(reservation_policy="none"),
        speculation=speculation,
        is_async=is_async(combination),
    )


def check_pressure(node: Node, combination: Combination) -> None:
    """Check that the run preempted, swapped, speculated and planned ahead."""
    statistics = node.scheduler.statistics()
    assert statistics.counters.num_preemptions > 0, "the pool was large enough: nothing was shown"
    assert (statistics.counters.num_swapped_out > 0) == (combination[2] == "swap")
    assert (statistics.counters.num_drafted > 0) == (combination[3] != "none")
    plans = statistics.counters.plans_ahead
    drafts = combination[3] != "none"
    assert (plans["drafts"] > 0) == (drafts and is_async(combination))
    assert (plans["blocks"] > 0) <= is_async(combination)
    if not drafts:
        assert (plans["taken"] > 0) == (plans["blocks"] > 0) == is_async(combination)
