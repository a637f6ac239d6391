"""A step that both evicts cached blocks and seats a sequence on cached blocks."""

from __future__ import annotations

from tests.support.engine.build import STRICT, Engine, make_prompt, make_request
from tests.support.engine.hash_runner import expected_tokens


def test_a_growing_decode_does_not_evict_the_prefix_of_a_sequence_admitted_beside_it() -> None:
    engine = Engine(num_blocks=8, seats=2, **STRICT)
    shared, other = make_prompt(8, seed=1), make_prompt(8, seed=2)
    for name, prompt in (("shared", shared), ("other", other)):
        engine.add(make_request(prompt, name=name, max_tokens=1))
        engine.run()
    # Four blocks are cached, oldest first those of `shared`; this one takes the four free ones.
    growing = engine.add(make_request(make_prompt(15, seed=3), name="growing", max_tokens=4))
    engine.step()
    engine.step()
    assert growing.num_computed == 16
    assert engine.scheduler.pool.counts().free == 0
    follower = engine.add(make_request((*shared, 5), name="follower", max_tokens=2))
    engine.step()
    assert follower.num_cached_tokens == 8
    assert len(growing.block_table) == 5
    assert not set(growing.block_table) & set(follower.block_table)
    engine.run()
    for sequence in (growing, follower):
        request = sequence.request
        assert engine.outputs[sequence.sequence_id] == expected_tokens(
            request.prompt_token_ids, request.sampling
        )


def test_blocks_of_a_victim_are_not_promised_to_two() -> None:
    engine = Engine(num_blocks=10, seats=4, enable_priority_scheduling=True, **STRICT)
    kept = engine.add(make_request(3, seed=1, priority=1, max_tokens=12, ignore_eos=True))
    victim = engine.add(make_request(17, seed=2, max_tokens=12, ignore_eos=True))
    engine.step()
    important = engine.add(make_request(17, seed=3, priority=2, max_tokens=2))
    # Four of the victim's blocks hold this one's start: with them it needs more than what is left.
    follower = engine.add(make_request((*make_prompt(16, seed=2), 5), max_tokens=2))
    step = engine.plan()
    assert step.num_preempted == 1
    assert step.sequences == [kept, important]
    engine.apply(step)
    engine.run()
    for sequence in (kept, victim, important, follower):
        request = sequence.request
        assert engine.outputs[sequence.sequence_id] == expected_tokens(
            request.prompt_token_ids, request.sampling
        )


def test_two_that_share_cached_blocks_take_them_once() -> None:
    engine = Engine(num_blocks=4, seats=2, **STRICT)
    shared = make_prompt(8)
    engine.add(make_request((*shared, 1), max_tokens=1))
    engine.run()
    assert engine.scheduler.pool.counts().cached == 2
    for last in (2, 3):
        engine.add(make_request((*shared, last), max_tokens=2, ignore_eos=True))
    step = engine.plan()
    assert [len(sequence.block_table) for sequence in step.sequences] == [3, 3]
    assert step.sequences[0].block_table[:2] == step.sequences[1].block_table[:2]
    assert engine.scheduler.pool.num_available == 0
