"""Random orders and faults from a seed: whatever happens, the closing checks hold.

A failing seed is replayed by its number; nothing here depends on anything else. How often things
happen is bounded so that runs which reach too little are noticed: they happen twice as often or
more.
"""

from __future__ import annotations

from collections import Counter

import pytest

from common.ids import AttemptId
from tests.simulation.storm import FAULTS, Conversations, Storm, run_to_the_end
from tests.simulation.world import World
from tests.support.examples import everyday

NUM_RUNS = everyday(150, of=300)
NUM_CALM_RUNS = everyday(50, of=200)
NUM_CONVERSATIONS = everyday(50, of=200)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_without_faults_every_random_order_ends_in_the_right_answer(is_async: bool) -> None:
    outcomes: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(NUM_CALM_RUNS):
        storm = Storm(seed, [], is_async=is_async)
        storm.num_to_ask, storm.ask_share = 8, 0.1  # So many that they preempt each other.
        storm.run()
        storm.world.check_closed()
        outcomes += storm.world.outcomes()
        statistics = storm.world.d.scheduler.statistics()
        happened += Counter(
            accepted=statistics.counters.num_accepted,
            recomputed=statistics.counters.num_recomputed_tokens,
            swapped=statistics.counters.num_swapped_out,
            constrained=sum(
                asked.request.sampling.grammar is not None and asked.outcomes == ["finished"]
                for asked in storm.world.router.asked.values()
            ),
            **statistics.counters.preemptions,
        )
    assert set(outcomes) == {"finished", "refused: overloaded"}, outcomes
    assert outcomes["finished"] > 2 * outcomes["refused: overloaded"]
    assert len(happened) == 6, f"all of it is to happen: {happened}"


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_random_orders_and_faults_leave_nothing_behind_and_no_answer_wrong(is_async: bool) -> None:
    happened: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    num_fenced = 0
    for seed in range(NUM_RUNS):
        storm = Storm(seed, FAULTS, is_async=is_async)
        run_to_the_end(storm, seed)
        happened += storm.happened
        num_fenced += storm.num_fenced
        outcomes += storm.world.outcomes()
    assert num_fenced > NUM_RUNS / 30, "few landings were left for a fence"
    assert set(happened) == set(FAULTS), "a fault never happened"
    assert outcomes["finished"] > NUM_RUNS / 2, "the faults leave too little that works"
    assert outcomes["failed: handoff_failed"] > NUM_RUNS / 10
    assert outcomes["failed: internal_error"] > NUM_RUNS / 5


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_random_conversations_that_pull_lose_nothing(is_async: bool) -> None:
    pulls: Counter[str] = Counter()
    for seed in range(NUM_CONVERSATIONS):
        storm = Conversations(seed, FAULTS, is_async=is_async)
        run_to_the_end(storm, seed)
        for node in storm.world.nodes.values():
            pulls += Counter(node.scheduler.statistics().counters.pulls)
    assert pulls["landed"] > NUM_CONVERSATIONS / 6
    assert pulls["failed"] > NUM_CONVERSATIONS / 40


@pytest.mark.parametrize("damage", ["target", "source"])
def test_one_changed_byte_of_kv_would_be_noticed(damage: str) -> None:
    # The negative control: the same checks, with one byte of one block changed.
    world = World()
    asked = world.ask(9, max_tokens=6, ignore_eos=True)
    if damage == "source":
        world.step_until(lambda: 0 in asked.tokens, frames=False)
        attempt = world.p.flow.attempts.get(AttemptId("r0", 1))
        pool = world.p.runner.kv_bytes
    else:
        world.step_until(lambda: asked.has_started)
        attempt = world.d.flow.attempts.get(AttemptId("r0", 1))
        pool = world.d.runner.cache
    assert attempt is not None
    pool[1, 1, attempt.sequence.block_table[1], 3] ^= 1
    if damage == "source":
        with pytest.raises(AssertionError, match=r"lease 101: layer 1 of block \d+ changed"):
            world.turn()
        world.p.connector.transfers[101].pushed.clear()
    world.settle()
    with pytest.raises(AssertionError, match="answered wrong"):
        world.check_closed()


def test_a_block_that_is_kept_would_be_noticed() -> None:
    world = World()
    world.ask(9)
    world.settle()
    pool = world.p.scheduler.pool
    pool.acquire_cached([next(filter(pool.is_evictable, range(pool.num_blocks)))])
    with pytest.raises(AssertionError):
        world.check_closed()
