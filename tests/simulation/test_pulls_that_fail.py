"""After a pull that failed its source is left alone for a while; how long a pull may take."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import FetchBlocks, PullRefused
from node.flow.pause import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pause
from node.flow.pulls import prefix_pulls
from node.flow.pulls.prefix_pulls import LEAST_PATIENCE_S, TIMES_EXPECTED
from node.flow.pulls.pull_cost import FIXED_S, Pauses, PullCost
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.three_nodes import HELD, OTHER, SHARED, Three
from tests.simulation.world import PREFILL, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.nodes.timed_pulls import on_pulled

NOBODY = Incarnation("nobody", 1)


def fail(world: Three, *more: int) -> Asked:
    """A pull of `q` that its source never answers: the prompt is computed."""
    asked = fail_unchecked(world, *more)
    assert_finished(world, asked)
    return asked


def fail_unchecked(world: Three, *more: int) -> Asked:
    """The same, before the closing checks."""
    asked = world.the_next(*more, name=f"fails {more}")
    world.lose(world.step_until_asked())
    world.settle()
    world.advance(LEAST_PATIENCE_S + 1)
    world.settle()
    return asked


def evict_all(world: Three) -> None:
    """Nothing is cached on `q` any more."""
    pool = world.q.scheduler.pool
    pool.release(pool.allocate(pool.num_available, BlockUse.RUNNING))


def test_a_source_that_the_router_does_not_know_is_left_alone_as_one_that_failed() -> None:
    world = Three()
    world.the_first()
    for seed in (8, 9):
        world.router.source = PrefixSource(NOBODY, 20)
        prompt = make_prompt(21, seed)
        assert_finished(world, world.ask(prompt, max_tokens=2, name=f"{seed}"))
    assert world.q.pulls() == {"failed": 1, "avoided": 1}


def test_a_pull_that_lands_ends_the_growth_of_pauses() -> None:
    world = Three()
    world.the_first()
    fail(world, 1)
    world.advance(FIRST_PAUSE_S)
    evict_all(world)
    assert_finished(world, world.the_next(2, name="lands"))
    evict_all(world)
    fail(world, 3)
    world.advance(FIRST_PAUSE_S)
    evict_all(world)
    assert_finished(world, world.the_next(4, name="lands again"))
    assert world.q.pulls() == {"failed": 2, "landed": 2}


def test_what_was_computed_after_a_failure_was_not_pulled() -> None:
    world = Three()
    world.the_first()
    asked = fail_unchecked(world, 1)
    (ended,) = world.q.flow.attempts.take_ended()
    assert_finished(world, asked)
    assert ended.num_pulled_tokens == 0
    assert world.q.num_computed() == len(SHARED) + 1


def test_a_pull_over_a_slow_link_is_given_more_time() -> None:
    world = Three()
    world.the_first()
    for _ in range(20):
        on_pulled(world.pull_cost, HELD.num_tokens, 1000.0)
    may_take_s = TIMES_EXPECTED * world.pull_cost.expected_s(HELD.num_tokens)
    assert may_take_s > LEAST_PATIENCE_S
    asked = world.the_next(1)
    world.lose(world.step_until_asked())
    world.settle()
    world.advance((LEAST_PATIENCE_S + may_take_s) / 2)
    world.settle()
    assert not asked.tokens, "it is waited for"
    world.advance(may_take_s / 10)
    assert_finished(world, asked)
    assert world.q.pulls() == {"failed": 1}


def test_each_pull_corrects_what_the_next_one_is_expected_to_take() -> None:
    world = Three()
    world.the_first()
    before_s = world.pull_cost.expected_s(HELD.num_tokens)
    assert_finished(world, world.the_next(1))  # no time has passed
    assert world.pull_cost.expected_s(HELD.num_tokens) < before_s


def test_what_is_behind_the_largest_pull_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_pulls, "MOST_BLOCKS", 3)
    world = Three()
    world.the_first()
    assert_finished(world, world.the_next(1))
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == len(SHARED) + 1 - 3 * BLOCK_SIZE


def test_nobody_joins_a_pull_that_nobody_waits_for_any_more() -> None:
    """Its blocks may still be written, so it is there for a while."""
    world = Three()
    world.network.is_one_sided = True
    world.the_first()
    gone = world.the_next(1, name="gone")
    world.step_until(lambda: bool(world.p.connector.transfers), frames=False)
    for frame in [one for one in world.network.frames if one.kind == "open"]:
        world.network.deliver(frame)
    world.router.abort(gone)
    world.step_until(lambda: bool(world.q.connector.quarantined), frames=False)
    asked = world.the_next(2, name="asked")
    world.step_until(lambda: len(world.q.flow.pulls) == 2, frames=False)
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}


def test_a_part_that_lands_after_it_was_refused_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", 1)
    world = Three()
    world.the_first()
    world.q.runner.num_copy_polls = 3
    hashes = tuple(world.p.scheduler.pool.latest(5))
    world.to_nodes.append((OTHER, FetchBlocks(world.router.me, PREFILL, hashes)))
    token = world.step_until_asked().ticket.lease_token
    world.step_until(lambda: bool(world.q.runner.copies))
    world.to_nodes.append((OTHER, PullRefused(token)))
    world.settle()
    assert world.q.pulls() == {"failed": 1}
    world.check_closed()


def test_the_pauses_double_up_to_two_minutes_and_begin_anew_after_what_was_good() -> None:
    pause, now_s = Pause(), 1000.0
    assert not pause.is_on(now_s)
    for _ in range(2):
        for length_s in (30, 60, 120, LONGEST_PAUSE_S, LONGEST_PAUSE_S):
            pause.on_failed(now_s)
            assert pause.is_on(now_s + length_s - 0.1)
            now_s += length_s
            assert not pause.is_on(now_s), "it is over when its time has come"
        pause.on_failed(now_s)
        pause.on_good()
        assert not pause.is_on(now_s)


def test_what_fails_while_a_pause_is_on_had_begun_before_it_and_makes_it_no_longer() -> None:
    """As where several pulls of one source fail at once: it stood still, or is gone."""
    pause = Pause()
    for now_s in (1000.0, 1000.0, 1000.5, 1029.9):
        pause.on_failed(now_s)
    assert pause.is_on(1029.9)
    assert not pause.is_on(1030.0)
    pause.on_failed(1030.0)
    assert pause.is_on(1089.9)


def test_the_next_life_of_a_source_is_not_left_alone() -> None:
    pauses = Pauses()
    pauses.on_failed(OTHER, 0.0)
    assert pauses.is_on(OTHER, 1.0)
    assert not pauses.is_on(Incarnation(OTHER.node_id, OTHER.epoch + 1), 1.0)


def test_a_handoff_shows_the_time_of_a_pull_with_what_each_pull_takes_besides() -> None:
    cost = PullCost(1e6, lambda num_tokens: num_tokens / 10_000)
    cost.on_sent(1000, 1.0)
    assert cost.expected_s(1000) == pytest.approx(1.0 + FIXED_S)
    cost.on_sent(1000, 1.5)
    assert cost.expected_s(1000) == pytest.approx(1.0 + FIXED_S), "that one waited for its prompt"


def test_one_pull_is_a_quarter_of_what_the_next_one_is_expected_to_take() -> None:
    cost = PullCost(1e6, float)
    guessed_s = cost.expected_s(1000)
    assert guessed_s == pytest.approx(FIXED_S + 2.0)
    on_pulled(cost, 1000, guessed_s + 4.0)
    # All but a hundredth of it are bytes, which take so much longer.
    assert cost.expected_s(1000) == pytest.approx(guessed_s + 1.0, rel=0.01)
    for _ in range(200):
        on_pulled(cost, 1000, 0.0)
    assert cost.expected_s(1000) == pytest.approx(guessed_s / 256), "bounded"


def test_what_host_memory_has_is_not_pulled() -> None:
    size = NodeSize(num_blocks=12, num_host_blocks=24, keeps_prefixes=True)
    world = Three(of_q=size)
    world.the_first()
    world.router.source = None
    assert_finished(world, world.the_next(1, name="computes it"))
    for seed in range(20, 26):  # so that it is copied out, and evicted
        assert_finished(world, world.ask(make_prompt(33, seed), max_tokens=1, name=f"{seed}"))
        assert_finished(world, world.ask((*SHARED, 7), max_tokens=1, name=f"again {seed}"))
    assert_finished(world, world.ask(make_prompt(33, 40), max_tokens=1, name="last"))
    find = world.q.scheduler.pool.prefix_cache.find
    hashes = world.p.scheduler.pool.latest(5)
    assert any(find(one) is None for one in hashes)
    world.router.source = HELD
    before = world.q.num_computed()
    assert_finished(world, world.the_next(8, name="finds it"))
    assert world.q.pulls() == {}
    assert world.q.num_computed() - before == len(SHARED) + 1 - HELD.num_tokens
