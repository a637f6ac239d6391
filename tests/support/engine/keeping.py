"""An engine with a small pool, whose prefixes are kept in host memory, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.statistics import StepCounters
from engine.core.step.step_in_flight import PlannedStep
from tests.support.engine.build import (
    STRICT,
    Engine,
    check_idle,
    make_prompt,
    make_request,
    num_cached_tokens_and_blocks,
    num_late_copies,
)
from tests.support.engine.hash_runner import expected_tokens

NEVER = 1_000_000
FULL_BLOCKS = 400
"""The blocks of a pool that is full of families of prompts."""
FAMILIES = range(1, 20)
FAMILY_BLOCKS = 20
LARGE = 99
"""The family of a prompt that is far larger than all before."""
LATE = pytest.mark.parametrize("num_copy_polls", [None, 0, 2], ids=["in step", "late", "later"])
"""How copies are made: before the step, or beside the steps, and ended so many steps later."""


def keeping(num_host_blocks: int = 16, **given: Any) -> Engine:
    """A pool of 6 blocks of 4 tokens: a prompt of 13 tokens and its output take 4 of them."""
    settings = {"num_blocks": 6, "seats": 1, "keeps_prefixes": True, **STRICT, **given}
    return Engine(num_host_blocks=num_host_blocks, **settings)


def ask(engine: Engine, family: int, *, length: int = 13, **given: Any) -> Sequence:
    """Answer a prompt of 13 tokens, whose first three blocks are full."""
    salt = given.pop("cache_salt", "")
    given = {"max_tokens": 2, "ignore_eos": True, "cache_salt": salt, **given}
    sequence = engine.add(make_request(make_prompt(length, family), **given))
    engine.run()
    check_answer(engine, sequence)
    check_idle(engine.scheduler)
    return sequence


def check_answer(engine: Engine, sequence: Sequence) -> None:
    request = sequence.request
    right = expected_tokens(request.prompt_token_ids, request.sampling)
    assert engine.outputs[sequence.sequence_id] == right


def use_twice(engine: Engine, family: int) -> None:
    ask(engine, family)
    assert ask(engine, family).num_cached_tokens == 12


def rest(engine: Engine) -> None:
    """Go on as long as there is anything to be copied, as a node does."""
    for _ in range(100):
        step = engine.plan()
        assert not step.sequences
        engine.apply(step)
        if not step.made_progress and not num_late_copies(engine.scheduler):
            return
    raise AssertionError("it never rests")


def evict(engine: Engine) -> None:
    """Fill the pool with what is used once, when all has been copied out."""
    rest(engine)
    for _ in range(engine.scheduler.pool.num_blocks // 3):
        ask(engine, 20 + len(engine.outputs))
    rest(engine)


def probe(family: int, **given: Any) -> Sequence:
    return Sequence(999, make_request(make_prompt(13, family), **given))


def counters(engine: Engine) -> StepCounters:
    return engine.scheduler.statistics().counters


def in_pool(engine: Engine, family: int) -> int:
    _, num_blocks = num_cached_tokens_and_blocks(engine.scheduler, probe(family))
    return num_blocks


def finish_copies(engine: Engine) -> None:
    engine.runner.num_copy_polls = 0


def fill_and_release(engine: Engine, num_blocks: int, family: int) -> None:
    """Compute a prompt of so many blocks, all of which then are cached."""
    prompt = make_prompt(4 * num_blocks, family)
    engine.add(make_request(prompt, max_tokens=1))
    engine.run_until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))


def full_pool(num_host_blocks: int = 2 * FULL_BLOCKS, **given: object) -> Engine:
    """A pool of 400 blocks that 19 prompts have used twice and filled, some of it copied ahead."""
    engine = keeping(
        num_host_blocks,
        **{"num_blocks": FULL_BLOCKS, "budget": 2000, "max_model_len": 4 * FULL_BLOCKS, **given},
    )
    for family in FAMILIES:
        for _ in range(2):
            fill_and_release(engine, FAMILY_BLOCKS, family)
            rest(engine)
    return engine


def full_pool_since_used(**given: object) -> Engine:
    """A full pool after another prompt: the copies ahead of what comes next are not made yet."""
    engine = full_pool(**given)  # type: ignore[arg-type]
    fill_and_release(engine, 60, LARGE + 1)
    return engine


def ask_large(engine: Engine, num_blocks: int, **kind: bool) -> Sequence:
    prompt = make_prompt(4 * num_blocks - 3, LARGE)
    return engine.add(make_request(prompt, max_tokens=1), **kind)


def found_by_family(engine: Engine) -> dict[int, int]:
    """How many blocks of each family are found."""
    probes = {one: Sequence(999, make_request(make_prompt(80, one))) for one in FAMILIES}
    return {one: engine.scheduler.num_cached_tokens(probe) // 4 for one, probe in probes.items()}


def check_all_found(engine: Engine) -> None:
    """Raise `AssertionError` if a block of a family that was used twice is neither in the pool nor
    in host memory."""
    assert found_by_family(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)


def steps_until(engine: Engine, is_done: Callable[[], bool]) -> Iterator[PlannedStep]:
    """Plan and make steps, each of which is returned when it is planned."""
    while not is_done():
        will_end = num_late_copies(engine.scheduler)
        step = engine.plan()
        assert step.made_progress or will_end, "nobody would ask again"
        yield step
        engine.apply(step)


def num_copied(step: PlannedStep) -> int:
    late = (copy.block_ids for copy in step.swap_copies if copy.is_out)
    return sum(map(len, [*late, *(copy.block_ids for copy in step.swap_outs)]))
