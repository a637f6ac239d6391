"""A runner that ran one step of decodes several times: as if each had been planned by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from common.request import FinishReason
from engine.core.blocks.block_pool import BlockUse
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


def after_another_one(policy: str, num_blocks: int) -> Engine:
    """As `decoding`, up to 31 tokens, in a pool in which another prompt was cached before."""
    engine = Engine(block_size=SIZE, num_blocks=num_blocks, reservation_policy=policy)
    engine.add(make_request(60, seed=7, max_tokens=1))
    engine.run()
    engine.outputs.clear()
    for name, length in enumerate(LENGTHS):
        engine.add(make_request(length, seed=name, max_tokens=31, ignore_eos=True))
    engine.step()
    return engine


def drawn_by(engine: Engine, begin: int, end: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[begin:end]) for tokens in engine.outputs.values()]


@pytest.mark.parametrize("policy", ["learned", "global_ratio", "token_ratio", "fixed_blocks"])
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_what_a_full_block_changes_happens_when_it_is_full(policy: str, num_blocks: int) -> None:
    """Tokens 8, 12, 24 and 28 fill blocks; the smaller pool evicts what is cached for the next."""
    whole, apart, at_once = (after_another_one(policy, num_blocks) for _ in range(3))
    whole.run()
    step, planned = at_once.scheduler.plan(), apart.plan()
    for begin, end in pairwise((1, 8, 12, 24, 28)):
        for _ in range(begin, end):
            apart.apply(planned)
            planned = apart.plan()
        tokens = np.array(drawn_by(whole, begin, end), np.int64)
        assert at_once.scheduler.go_on(step.batch, tokens, 0.0)
        assert state_of(at_once.scheduler) == state_of(apart.scheduler)
    has_evicted = at_once.scheduler.pool.num_evicted > 0
    assert has_evicted == (num_blocks == 7)
    tokens_of_all = drawn_by(whole, 1, 31)
    results = RunnerResult(map(DrawnTokens, tokens_of_all), num_steps=30, num_recorded=27)
    outputs = list(at_once.scheduler.apply(step, results))
    assert [(one.first_index, one.finish_reason) for one in outputs] == [
        (1, FinishReason.LENGTH)
    ] * 2
    assert [one.token_ids for one in outputs] == tokens_of_all
    assert state_of(at_once.scheduler) == state_of(whole.scheduler)
    check_books(at_once.scheduler)


def test_a_step_goes_on_only_where_the_same_one_would_be_planned() -> None:
    tokens = np.zeros((2, 7), np.int64)

    def is_refused(engine: Engine, change: Callable[[Engine], object]) -> bool:
        step = engine.scheduler.plan()
        change(engine)
        before = state_of(engine.scheduler)
        is_going_on = engine.scheduler.go_on(step.batch, tokens, 0.1)
        return not is_going_on and state_of(engine.scheduler) == before

    def nothing(engine: Engine) -> None: ...

    def one_waits(engine: Engine) -> None:
        engine.add(make_request(3))

    def no_block_is_left(engine: Engine) -> None:
        pool = engine.scheduler.pool
        pool.allocate(pool.num_available, BlockUse.RUNNING)

    assert not is_refused(after_another_one("learned", 64), nothing)
    assert is_refused(after_another_one("learned", 64), one_waits)
    assert is_refused(after_another_one("learned", 64), no_block_is_left)
    keeping = Engine(block_size=SIZE, num_blocks=64, num_host_blocks=8, keeps_prefixes=True)
    for name, length in enumerate(LENGTHS):
        keeping.add(make_request(length, seed=name, max_tokens=31, ignore_eos=True))
    keeping.step()
    assert is_refused(keeping, nothing), "each plan may copy prefixes to host memory"
