"""The results of a step, recorded together, do what the same results do one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from typing import Any

import pytest

from engine.core.runner_contract import (
    RunnerResult,
)
from engine.core.step import step_results
from engine.core.step.step_in_flight import PlannedStep
from engine.core.step.step_results import StepOutput
from tests.support.engine.build import Engine, make_prompt, make_request, state_of
from tests.support.examples import everyday


def made(method: str, seed: int) -> Engine:
    """A small engine: blocks are filled, prompts end and sequences are preempted all the time."""
    engine = Engine(
        num_blocks=20,
        seats=6,
        budget=14,
        block_size=2,
        method=method,
        num_drafts=0 if method == "none" else 2,
        skip_ahead_window=2,
        retract_decode_steps=0,
        # A sequence that resumes from host memory decodes behind the unfinished chunk of a prompt.
        long_prefill_token_threshold=3,
        reservation_policy="none",
        preemption_mode="swap",
        num_host_blocks=20,
    )
    rng = random.Random(seed)
    prompt = make_prompt(20)
    for number in range(16):
        given: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(4)}
        if rng.random() < 0.3:
            given["stop_token_ids"] = tuple(rng.sample(range(1000), 64))
        # Equal prompts fill equal blocks in one step: the first that is published stays.
        length = rng.randint(1, 20)
        request = make_request(prompt[:length], name=f"r{number}", **given)
        engine.add(request, is_exported=rng.random() < 0.1)
    return engine


def run(engine: Engine, step: PlannedStep) -> RunnerResult:
    for copy in step.swap_outs:
        engine.runner.swap_out(copy.block_ids, copy.host_block_ids)
    for copy in step.swap_ins:
        engine.runner.swap_in(copy.host_block_ids, copy.block_ids)
    return engine.runner.execute(step.batch)


def tell(outputs: Items[StepOutput]) -> list[object]:
    return [
        (o.sequence.sequence_id, o.first_index, o.token_ids, o.logprobs, o.finish_reason)
        for o in outputs
    ]


@pytest.mark.parametrize("few", [0, step_results.FEW])
@pytest.mark.parametrize("method", ["none", "ngram", "mtp"])
@pytest.mark.parametrize("seed", range(everyday(3, of=8)))
def test_results_together_are_results_one_after_the_other(
    method: str, seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_results, "FEW", few)
    together, apart = made(method, seed), made(method, seed)
    most_drawn = 0
    while together.scheduler.waiting or together.scheduler.running:
        step, same = together.plan(), apart.plan()
        results = run(together, step)
        assert results == run(apart, same)
        parts = [
            apart.scheduler.apply(same.only([entry]), results.only([entry]))
            for entry in range(len(results))
        ]
        outputs = together.scheduler.apply(step, results)
        assert tell(outputs) == [told for part in parts for told in tell(part)]
        assert state_of(together.scheduler) == state_of(apart.scheduler)
        most_drawn = max(most_drawn, len(outputs))
        for engine in (together, apart):
            for sequence in list(engine.scheduler.exporting.values()):
                engine.scheduler.release(sequence)
    assert most_drawn > step_results.FEW, "sequences did not decode together"
