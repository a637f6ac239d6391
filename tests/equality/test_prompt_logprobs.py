"""The demo model's prompts are as likely in chunks, in batches and on any node as in one pass.

The judge is a plain forward pass over the prompt and a log-softmax in float64. The pool holds about
half of what is asked for, so sequences are preempted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SchedulingConfig
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.flat_batch import BatchLimits, flatten
from engine.runner.model_runner import ModelRunner
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.equality.combinations import pressed, pressed_node, roomy_node
from tests.support.models.pressure import (
    Node,
    answer_together,
    answer_with_handoff,
    demo_runners,
)

COUNT = Grammar(GrammarKind.REGEX, "([a-z]{2,5} ){9,12}the end")
NUM_TOPS = (0, 3, 20, None, 1)
WAYS = [
    ("none", "recompute", "sync", 20),
    ("ngram", "swap", "async", 33),
    ("mtp", "recompute", "async", 64),
]


@pytest.fixture(scope="module")
def runners() -> tuple[ModelRunner, ModelRunner]:
    """They have compiled the grammar of a request, as a node has when it hears of one."""
    for runner in demo_runners():
        compiled = runner.prepare_grammar(COUNT)
        if compiled is not None:
            compiled.result(60)
    return demo_runners()


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Prompts that begin alike, so that a prefix cache would skip rows; one of a single token."""
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog, and then it rests in the shade. "
    prompts = [tokenizer.encode(text * (1 + i % 2) + f"{i} apples.").ids for i in range(4)]
    prompts.append(prompts[0][:1])
    return [
        GenerationRequest(
            id=AttemptId(f"r{i}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=24,
                temperature=0.9,
                seed=i,
                prompt_logprobs=num_top,
                logprobs=1,
                grammar=COUNT if i == 2 else None,
            ),
            deadline_s=60.0,
        )
        for i, (prompt, num_top) in enumerate(zip(prompts, NUM_TOPS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[tuple[list[int], PromptLogprobs | None]]:
    """One request at a time, its whole prompt in one step: tokens, and what its prompt has."""
    found = []
    for request in requests:
        node = roomy_node(runners[0])
        (tokens,) = answer_together(node, [request])
        found.append((tokens, node.prompt_logprobs.get(1)))
    return found


def log_softmax(runner: ModelRunner, token_ids: tuple[int, ...]) -> np.ndarray:
    """A forward pass over all tokens at once; every row's logits, in float64."""
    table = range(-(-len(token_ids) // runner.layout.block_size))
    batch = batch_of([ScheduledSequence(0, list(token_ids), 0, table, None)])
    limits = BatchLimits(
        max_tokens=len(token_ids),
        max_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
        block_size=runner.layout.block_size,
        vocab_size=runner.vocab_size,
    )
    hidden = runner.decoder.begin(flatten(batch, limits))
    for index in range(runner.decoder.num_layers):
        runner.decoder.run_layer(index, hidden)
    rows = [
        runner.decoder.logits(hidden, np.array([row])).astype(np.float64)[0]
        for row in range(len(token_ids))
    ]
    logits = np.stack(rows)
    logits -= logits.max(axis=1, keepdims=True)
    found: np.ndarray = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def test_they_are_those_of_a_forward_pass(
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    alone: list[tuple[list[int], PromptLogprobs | None]],
) -> None:
    for request, (_, found) in zip(requests, alone, strict=True):
        prompt, num_top = request.prompt_token_ids, request.sampling.prompt_logprobs
        if num_top is None or len(prompt) == 1:
            assert found is None
            continue
        assert found is not None
        assert len(found) == len(prompt) - 1
        judged = log_softmax(runners[1], tuple(prompt))[:-1]
        own = judged[np.arange(len(found)), list(prompt[1:])]
        np.testing.assert_allclose(found.logprobs, own, atol=2e-5)
        assert found.ranks == tuple((judged > own[:, None]).sum(axis=1) + 1)
        assert found.num_top == num_top
        for place, row in enumerate(judged):
            top = found.top(place, num_top)
            best = np.argsort(-row, kind="stable")[:num_top]
            assert [token_id for token_id, _ in top] == best.tolist()
            np.testing.assert_allclose([logprob for _, logprob in top], row[best], atol=2e-5)


@pytest.mark.covers("T26")
@pytest.mark.parametrize(("method", "mode", "steps", "budget"), WAYS)
def test_chunks_batches_and_preemption_change_nothing(
    method: str,
    mode: str,
    steps: str,
    budget: int,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    alone: list[tuple[list[int], PromptLogprobs | None]],
) -> None:
    combination = ("none", "last_in_first_out", mode, method, steps)
    node = pressed_node(runners[0], combination, budget=budget)
    assert answer_together(node, requests) == [tokens for tokens, _ in alone]
    assert node.scheduler.statistics().counters.num_preemptions > 0
    found = [node.prompt_logprobs.get(number) for number in range(1, len(requests) + 1)]
    assert found == [scores for _, scores in alone]


@pytest.mark.covers("T25")
def test_a_prefix_that_is_cached_is_computed_again(
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    alone: list[tuple[list[int], PromptLogprobs | None]],
) -> None:
    node = roomy_node(runners[0])
    plain = replace(requests[1], sampling=replace(requests[1].sampling, prompt_logprobs=None))
    answer_together(node, [plain])
    sequence = node.add(plain)
    assert node.scheduler.num_cached_tokens(sequence) > 0
    node.scheduler.finish(sequence)
    for number, request in enumerate((requests[1], requests[1]), 3):
        assert answer_together(node, [request]) == [alone[1][0]]
        assert node.prompt_logprobs[number] == alone[1][1]


def test_the_node_that_computes_a_prompt_has_them(
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    alone: list[tuple[list[int], PromptLogprobs | None]],
) -> None:
    combination = ("none", "last_in_first_out", "swap", "mtp", "sync")
    _, speculation = pressed(combination)
    prefill = Node(
        runners[0], num_blocks=20, budget=24, config=SchedulingConfig(), speculation=speculation
    )
    decode = pressed_node(runners[1], combination, budget=20)
    answers = answer_with_handoff(prefill, decode, requests)
    assert answers == [tokens for tokens, _ in alone]
    found = [prefill.prompt_logprobs.get(number) for number in range(1, len(requests) + 1)]
    assert found == [scores for _, scores in alone]
    assert decode.prompt_logprobs == {}


def test_an_answer_is_as_likely_as_a_prompt_as_it_was_when_it_was_drawn(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> None:
    node = roomy_node(runners[0])
    (tokens,) = answer_together(node, [requests[0]])
    said = [one.logprob for one in node.logprobs[1]]
    prompt = requests[0].prompt_token_ids
    again = replace(
        requests[0],
        prompt_token_ids=(*prompt, *tokens),
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    answer_together(node, [again])
    scores = node.prompt_logprobs[2].logprobs[len(prompt) - 1 :]
    assert scores == tuple(np.array(said, np.float32).tolist())
