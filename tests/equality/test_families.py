"""Tiny models of other kinds of layers answer alike however they are scheduled, as the demo does.

Of experts, what a step holds beside a row decides how it is computed: rows that are sent to the
same expert are multiplied together. Texts are longer than the sliding windows, which are no
multiples of a block or of a piece of keys, and longer than a piece. Pools hold about half of what
is asked for, so sequences are preempted.
"""

from __future__ import annotations

import pytest

from common.ids import AttemptId
from common.request import GenerationRequest, SamplingParams
from engine.runner.kernels.attention_plan import PIECE_KEYS
from engine.runner.model_runner import ModelRunner
from tests.equality.combinations import (
    NUM_OUTPUT,
    Combination,
    check_pressure,
    is_async,
    pressed,
    pressed_node,
)
from tests.support.models.pressure import (
    BLOCK_SIZE,
    NUM_DRAFTS,
    Node,
    answer_together,
    answer_with_handoff,
)
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

WINDOWS = ("mistral_window", "qwen3_mixed", "gemma3", "gpt_oss")
EXPERTS = ("qwen3_moe_mixed", "ernie_moe", "glm4_moe")
MODELS = [*((family, "none") for family in (*WINDOWS, *EXPERTS)), ("ernie_moe", "q8_0")]
LENGTHS = (94, PIECE_KEYS + 30, 78, PIECE_KEYS - 2)
"""Their last block is nearly full, so that each of them soon asks for another one."""
POOL, HANDOFF_POOL, BUDGET = 25, 26, 64
"""A node that takes prompts from another reserves for each of them before its first step: with one
block more it admits so many that some have to be preempted."""
COMBINATIONS: tuple[Combination, ...] = (
    ("none", "last_in_first_out", "recompute", "none", "sync"),
    ("none", "last_in_first_out", "swap", "none", "async"),
    ("none", "last_in_first_out", "recompute", "ngram", "async"),
    ("none", "last_in_first_out", "swap", "suffix", "sync"),
)
"""Every way to give up a sequence's blocks, with and without drafts and steps planned ahead."""


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, ModelRunner]:
    """Two of one model, with a pool each."""
    family, quantization = request.param
    config = CONFIGS[family]
    if family in WINDOWS:
        assert 0 < config["sliding_window"] < min(LENGTHS)
        assert config["sliding_window"] % BLOCK_SIZE
    if quantization != "none":
        config = config | {"moe_intermediate_size": 64}
    folder = write_checkpoint(tmp_path_factory.mktemp(family), config)
    one, other = (
        load(
            folder, 512, num_drafts=NUM_DRAFTS, quantization=quantization,
            host_space=8 << 20, kv_cache_memory=8 << 20,
        )
        for _ in range(2)
    )  # fmt: skip
    return one, other


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Prompts of which the end repeats, so that drafts are found; greedy and sampled."""
    ways = (
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.7, seed=3, ignore_eos=True),
    )
    return [
        GenerationRequest(
            id=AttemptId(f"r{i}", 1),
            prompt_token_ids=(*prompt_of(length - 24, i), *prompt_of(8, 9) * 3),
            sampling=ways[i % 2],
            deadline_s=60.0,
        )
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def undisturbed(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[list[int]]:
    """Whole prompts in one step, one request at a time, in a pool that is large enough."""
    combination = COMBINATIONS[0]
    return [
        answer_together(pressed_node(runners[0], combination, num_blocks=60, budget=512), [one])[0]
        for one in requests
    ]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_one_node(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    node = pressed_node(runners[0], combination, num_blocks=POOL, budget=BUDGET)
    assert answer_together(node, requests) == undisturbed
    check_pressure(node, combination)


@pytest.mark.parametrize("combination", COMBINATIONS[1:3], ids="-".join)
def test_prefill_to_decode(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    config, speculation = pressed(combination)
    prefill = Node(
        runners[0], num_blocks=60, budget=BUDGET, config=config, speculation=speculation,
        is_async=is_async(combination),
    )  # fmt: skip
    decode = pressed_node(runners[1], combination, num_blocks=HANDOFF_POOL, budget=BUDGET)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_pressure(decode, combination)


def test_a_prompt_that_begins_like_an_earlier_one(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> None:
    """Its blocks are found, those before the windows of what is computed included."""
    first, combination = requests[1], COMBINATIONS[0]
    alone = answer_together(pressed_node(runners[0], combination, num_blocks=60), [first])
    node = pressed_node(runners[0], combination, num_blocks=60, budget=512)
    assert answer_together(node, [first]) == alone
    computed = node.scheduler.statistics().counters.num_chunk_tokens
    assert answer_together(node, [first]) == alone
    again = node.scheduler.statistics().counters.num_chunk_tokens - computed
    assert 0 < again < len(first.prompt_token_ids) - PIECE_KEYS
