"""What is known of the next step while one runs: a plan made from it is the one made afterwards.

`Engine.plan` compares the two wherever nothing unforeseen happened.
"""

from __future__ import annotations

import pytest

from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import STRICT, Engine, check_idle, make_request, status_of
from tests.support.engine.hash_runner import expected_tokens


@pytest.mark.parametrize("policy", ["token_ratio", "global_ratio"])
def test_blocks_kept_back_are_those_for_the_sequences_as_they_will_be(policy: str) -> None:
    engine = Engine(
        num_blocks=30, seats=8, caching=False, is_ahead=True,
        reservation_policy=policy, skip_ahead_window=0,
    )  # fmt: skip
    for seed in range(12):
        engine.add(make_request(5 + seed, seed=seed, max_tokens=8 + seed, ignore_eos=True))
    num_kept_back = set()
    while engine.scheduler.waiting:
        engine.step()
        num_kept_back.add(engine.scheduler.statistics().counters.num_growth_blocks)
    assert len(num_kept_back) > 3
    assert engine.num_as_foreseen > 10


def test_cached_blocks_of_one_that_ends_are_claimed_once() -> None:
    engine = Engine(num_blocks=6, seats=3, is_ahead=True, **STRICT)
    prompt = make_request(8, seed=1).prompt_token_ids
    first = engine.add(make_request((*prompt, 1), max_tokens=3, ignore_eos=True))
    other = engine.add(make_request(3, seed=2, max_tokens=6, ignore_eos=True))
    # Of its five blocks two are cached, and three more are not there beside them.
    second = engine.add(make_request((*prompt, *range(500, 511)), max_tokens=1))
    engine.run_until(lambda: status_of(first) is SequenceStatus.FINISHED)
    step = engine.plan()
    assert engine.was_ahead
    assert step.sequences == [other]
    engine.apply(step)
    engine.run()
    for sequence in (first, other, second):
        request = sequence.request
        right = expected_tokens(request.prompt_token_ids, request.sampling)
        assert engine.outputs[sequence.sequence_id] == right
    check_idle(engine.scheduler)
