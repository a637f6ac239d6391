"""A runner that ran one step of decodes several times: as if each had been planned by itself."""

from __future__ import annotations

import pytest

from common.request import FinishReason
from engine.core.runner_contract import DrawnTokens, RunnerResult
from tests.support.engine.build import Engine, check_books, make_request, state_of

SIZE = 16
LENGTHS = (5, 9)


def decoding(policy: str, max_tokens: tuple[int, int] = (8, 8)) -> Engine:
    """Two sequences that decode their second token next, with room in their blocks."""
    engine = Engine(block_size=SIZE, num_blocks=8, reservation_policy=policy)
    for name, length in enumerate(LENGTHS):
        engine.add(make_request(length, seed=name, max_tokens=max_tokens[name], ignore_eos=True))
    engine.step()
    return engine


def run_at_once(engine: Engine, drawn: list[tuple[int, ...]]) -> list[FinishReason | None]:
    scheduler = engine.scheduler
    step = scheduler.plan()
    assert step.batch.is_plain
    results = RunnerResult([DrawnTokens(tokens) for tokens in drawn], num_steps=len(drawn[0]))
    return [output.finish_reason for output in scheduler.apply(step, results)]


@pytest.mark.parametrize("policy", ["learned", "global_ratio", "token_ratio", "fixed_blocks"])
@pytest.mark.parametrize("num_steps", [1, 2, 6, 7])
def test_several_steps_at_once_leave_the_state_that_each_of_them_would(
    policy: str, num_steps: int
) -> None:
    """Token 8 ends both outputs, and position 16 fills the first block of the longer one."""
    apart, at_once = decoding(policy), decoding(policy)
    before = {one.sequence_id: one.num_output for one in apart.scheduler.running}
    for _ in range(num_steps):
        apart.step()
    drawn = [tuple(apart.outputs[one][before[one] :]) for one in before]
    assert [len(tokens) for tokens in drawn] == [num_steps] * 2
    reasons = run_at_once(at_once, drawn)
    assert reasons == [FinishReason.LENGTH if num_steps == 7 else None] * 2
    assert state_of(at_once.scheduler) == state_of(apart.scheduler)
    check_books(at_once.scheduler)


def test_one_of_several_ends_and_the_others_go_on() -> None:
    """Position 16, the last of seven, fills a block of the one that goes on."""
    apart, at_once = (decoding("learned", (8, 20)) for _ in range(2))
    for _ in range(7):
        apart.step()
    drawn = [tuple(tokens[1:8]) for tokens in apart.outputs.values()]
    assert run_at_once(at_once, drawn) == [FinishReason.LENGTH, None]
    assert state_of(at_once.scheduler) == state_of(apart.scheduler)
    (left,) = at_once.scheduler.running
    assert left.output_token_ids == apart.outputs[left.sequence_id][:8]
    assert left.num_hashed_blocks == 1
    check_books(at_once.scheduler)
