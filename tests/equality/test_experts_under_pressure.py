"""Models with experts answer alike however they are scheduled, as the demo model does.

Rows that are sent to the same expert are multiplied together, so what a step holds beside a row
decides how. Prompts and answers are in chunks, batches, drafts, handoffs and sequences that were
preempted.
"""

from __future__ import annotations

from functools import partial

import pytest

from common.request import GenerationRequest
from engine.runner.model_runner import ModelRunner
from tests.equality.combinations import (
    Combination,
    answers_alone,
    prefill_node,
    pressed_node,
)
from tests.equality.combinations import requests as requests
from tests.support.models.pressure import NUM_DRAFTS, Node, answer_together, answer_with_handoff
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

DEMO_VOCAB_SIZE = 49152
"""Prompts are those of the demo model."""
COMBINATIONS = [
    ("none", "last_in_first_out", "recompute", "ngram", "async"),
    ("none", "last_in_first_out", "swap", "none", "sync"),
]


@pytest.fixture(
    scope="module",
    params=[("qwen3_moe", "none"), ("ernie_moe", "none"), ("ernie_moe", "q8_0")],
    ids="-".join,
)
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, ModelRunner]:
    """Two of one model, with a pool each."""
    family, quantization = request.param
    config = CONFIGS[family] | {"vocab_size": DEMO_VOCAB_SIZE, "moe_intermediate_size": 64}
    folder = write_checkpoint(tmp_path_factory.mktemp(family), config)
    make = partial(
        load, folder, 512, num_drafts=NUM_DRAFTS, quantization=quantization,
        kv_cache_memory=4 << 20, host_space=4 << 20, max_num_batched_tokens=512,
    )  # fmt: skip
    return make(), make()


@pytest.fixture(scope="module")
def undisturbed(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[list[int]]:
    return answers_alone(runners[0], requests)


def check_preempted(node: Node, combination: Combination) -> None:
    counters = node.scheduler.statistics().counters
    assert counters.num_preemptions > 0, "the pool was large enough: nothing was shown"
    assert (counters.num_swapped_out > 0) == (combination[2] == "swap")


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_one_node(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    node = pressed_node(runners[0], combination)
    assert answer_together(node, requests) == undisturbed
    check_preempted(node, combination)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_prefill_to_decode(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    prefill = prefill_node(runners[0], combination)
    decode = pressed_node(runners[1], combination)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_preempted(decode, combination)
