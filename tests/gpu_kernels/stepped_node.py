"""A scheduler on a runner, driven as the step loop does it, and requests of every kind."""

from __future__ import annotations

from typing import Any

from common.grammar import Grammar, GrammarKind
from common.request import TokenLogprobs
from common.settings.config import SpeculationConfig
from common.token_rules import TokenRules
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import RunnerResult, StepCosts
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.speculation.speculation import Speculation, make_speculation
from engine.core.step.step_in_flight import PlannedStep
from engine.runner.model_runner import ModelRunner
from tests.support.engine.build import check_books, check_idle, make_request
from tests.support.grammars.printable_tokens import EOS_TOKEN_ID, masks
from tests.support.models.tiny_checkpoints import prompt_of

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2}
UNDER_GRAMMAR: dict[str, Any] = {
    "temperature": 0.0, "stop_token_ids": (EOS_TOKEN_ID,), "ignore_eos": False,
    "grammar": Grammar(GrammarKind.REGEX, "(ab|cd){9,20}"),
}  # fmt: skip


def drafts_that_never_pay() -> Speculation:
    """Return a node's drafting, where steps take so long for each row that none is worth one."""
    costs = StepCosts((1, 2, 64), (1.0, 2.0, 64.0))
    speculation = make_speculation(SpeculationConfig(speculative_method="suffix"), costs)
    assert speculation is not None
    return speculation


def with_grammars(runner: ModelRunner) -> ModelRunner:
    """Return the runner, which follows grammars then."""
    runner.grammars = masks()
    return runner


class Node:
    """A scheduler on a runner, driven as the step loop does it."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        goes_on: bool,
        num_blocks: int = 16,
        speculation: Speculation | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=4, max_num_batched_tokens=64, block_size=16, max_model_len=64,
                num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            ),
            speculation=speculation,
            num_blocks=num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=frozenset(),
            can_go_on=goes_on and runner.can_go_on,
        )  # fmt: skip
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.results = RunnerResult()

    def add(self, length: int, max_tokens: int, seed: int, **sampling: Any) -> Sequence:
        sampling = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **sampling}
        request = make_request(tuple(prompt_of(length, seed)), **sampling)
        sequence = Sequence(len(self.outputs) + 1, request)
        self.outputs[sequence.sequence_id] = []
        self.logprobs[sequence.sequence_id] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> PlannedStep:
        step = self.scheduler.plan()
        check_books(self.scheduler)
        results = self.runner.execute(step.batch)
        self.scheduler.plan_ahead(step)
        self.take(step, results)
        return step

    def take(self, step: PlannedStep, results: RunnerResult) -> None:
        """Record what a step has drawn."""
        self.results = results
        for output in self.scheduler.apply(step, results):
            self.outputs[output.sequence.sequence_id] += output.token_ids
            self.logprobs[output.sequence.sequence_id] += output.logprobs
        check_books(self.scheduler)

    @property
    def num_begun(self) -> int:
        return self.scheduler.statistics().counters.plans_ahead["begun"]


def stop_token(runner: ModelRunner) -> int:
    """Return a token that ends the third output of `answers` in the middle."""
    node = Node(runner, goes_on=False)
    node.add(5, 6, 3, **DRAWN)
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    [output] = node.outputs.values()
    return next(token for token in output[2:] if output.index(token) >= 2)


def all_kinds(node: Node, ends: int) -> list[Any]:
    """Return what requests of every kind drew: their outputs, and then their log probabilities.

    The first row of each four ends in the middle, so that the others lie behind a gap.
    """
    loads: list[list[dict[str, Any]]] = [
        [FILTERED | {"logprobs": 3}, PENALISED | DRAWN, UNDER_GRAMMAR | DRAWN],
        [
            {"rules": TokenRules(biases=((9, 4.0), (11, -3.0)), bad_words=((9, 9), (7,)))},
            {"rules": TokenRules(allowed_token_ids=(3, 31, 32, 77)), "min_p": 0.05},
            {"min_tokens": 3, "stop_token_ids": (5, 6, 7), "logprobs": 0},
        ],
    ]
    for load in loads:
        node.add(5, 9, 3, **DRAWN, stop_token_ids=(ends,))
        for number, sampling in enumerate(load):
            node.add(6 + number, 8, number, **sampling)
        while node.scheduler.running or node.scheduler.waiting:
            node.step()
    check_idle(node.scheduler)
    return [*node.outputs.values(), *node.logprobs.values()]
