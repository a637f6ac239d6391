"""A new node warms itself with what another one has used last, and serves meanwhile."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from node.flow.messages import Drain, PullRefused, WarmNode
from node.flow.pulls import prefix_pulls
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

NEW = Incarnation("n", 1)
PROMPT = make_prompt(21, 5)
NUM_BLOCKS = 5
WISH = WarmNode(ROUTER, NEW)


class Warming(World):
    """A prefill node, a decode node that caches nothing, and a new prefill node."""

    def __init__(self, *, num_blocks: int = 48) -> None:
        size = NodeSize(num_blocks=48)
        super().__init__(prefill=size, decode=NodeSize(num_blocks=48, caching=False))
        self.new = self.join(NEW, NodeSize(num_blocks=num_blocks))

    def know(self, *prompts: tuple[int, ...]) -> None:
        """The prefill node computes these."""
        for number, prompt in enumerate(prompts):
            assert_finished(self, self.ask(prompt, max_tokens=3, name=f"before {number}"))

    def warm(self, source: Incarnation = PREFILL) -> None:
        self.to_nodes.append((source, WISH))

    def ask_new(self, prompt: tuple[int, ...]) -> int:
        """Ask the new node; return how much of the prompt it computed."""
        self.router.prefill = NEW
        before = self.new.num_computed()
        assert_finished(self, self.ask(prompt, max_tokens=3, name=f"at new {len(prompt)}"))
        return self.new.num_computed() - before


@pytest.mark.parametrize("part", [1, 2, 256])
def test_a_new_node_has_what_the_other_one_has_used_last(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", part)
    world = Warming()
    world.know(PROMPT)
    world.warm()
    world.settle()
    counters = world.new.scheduler.statistics().counters
    assert counters.num_fetched_tokens == counters.num_pulled_tokens == 4 * NUM_BLOCKS
    world.kill(world.p, is_noticed=False)
    assert world.ask_new((*PROMPT, 1, 2)) == len(PROMPT) + 2 - 4 * NUM_BLOCKS


def test_what_runs_on_the_source_counts_as_used_last() -> None:
    """A system prompt that is always in use is what a new node needs first."""
    world = Warming()
    world.know(make_prompt(17, 9), PROMPT)
    asked = world.ask((*make_prompt(17, 9), 1, 2, 3), max_tokens=30, name="running")
    world.step_until(lambda: bool(world.p.scheduler.pool.counts().running), frames=False)
    pool = world.p.scheduler.pool
    running = [pool.prefix_cache.find(one) for one in pool.latest(4)]
    assert all(block is not None and not pool.is_evictable(block) for block in running)
    world.warm()
    world.settle()
    assert_finished(world, asked)
    world.kill(world.p, is_noticed=False)
    assert world.ask_new((*make_prompt(17, 9), 7)) == 18 - 16


def test_prompts_are_served_meanwhile_and_wait_for_no_part() -> None:
    world = Warming()
    world.know(PROMPT)
    world.warm()
    world.step_until(lambda: len(world.new.flow.pulls) > 0, frames=False)
    world.router.prefill = NEW
    asked = world.ask(make_prompt(9, 2), max_tokens=1, name="at once")
    world.step_until(lambda: asked.is_done, frames=False)
    assert len(world.new.flow.pulls) == 1, "its blocks have not landed"
    world.settle()
    world.check_closed()


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_a_source_that_dies_in_the_middle_leaves_what_has_landed(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, is_one_sided: bool
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", 1)
    world = Warming()
    world.network.is_one_sided = is_one_sided
    world.know(PROMPT)
    world.warm()
    for _ in range(num_steps):
        world.step()
    world.kill(world.p, is_noticed=False)
    world.notice(PREFILL)
    world.settle()
    for token in list(world.new.connector.quarantined):
        world.new.connector.fence(token)
    world.settle()  # no time has passed
    num_landed = world.new.scheduler.pool.counts().cached
    assert world.ask_new((*PROMPT, 1)) == len(PROMPT) + 1 - 4 * num_landed


def test_a_refused_part_ends_it_and_another_router_may_begin_again() -> None:
    world = Warming()
    world.know(PROMPT)
    world.warm()
    world.step_until(lambda: len(world.new.flow.pulls) > 0, frames=False)
    [token] = world.new.connector.landings
    world.to_nodes.append((NEW, PullRefused(token)))
    world.step(frames=False)
    world.warm()
    world.settle()
    world.check_closed()
    assert world.new.pulls() == {"failed": 1, "landed": 1}


@pytest.mark.parametrize("source", [PREFILL, DECODE])
def test_nothing_is_taken_from_a_node_that_has_nothing(source: Incarnation) -> None:
    world = Warming()
    world.warm(source)
    world.settle()
    assert not world.offered
    assert world.new.pulls() == {}
    assert world.ask_new(PROMPT) == len(PROMPT)


def test_nothing_is_taken_from_a_node_that_drains() -> None:
    world = Warming()
    world.know(PROMPT)
    world.p.inbox.put(Drain(100.0))
    world.warm()
    world.settle()
    assert not world.offered


@pytest.mark.covers("F136")
def test_a_source_of_another_layout_has_none_of_the_blocks() -> None:
    """The router does not choose one; were it chosen, no ticket would fit it."""
    world = Warming()
    world.know(PROMPT)
    world.p.flow.sends._fingerprint = "another layout"
    world.warm()
    world.settle()
    assert world.new.pulls() == {"failed": 1}
    assert world.ask_new(PROMPT) == len(PROMPT)


def test_it_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", 1)
    monkeypatch.setattr(prefix_pulls, "FETCH_S", 1.0)
    world = Warming()
    world.know(PROMPT)
    world.warm()
    world.step_until(lambda: bool(world.new.connector.landings))
    world.advance(1.0)
    world.settle()
    assert world.new.pulls() == {"landed": 1}


def test_no_more_than_half_of_a_small_node_is_filled() -> None:
    world = Warming(num_blocks=8)
    world.know(PROMPT, make_prompt(21, 8))
    world.warm()
    world.settle()
    assert world.new.scheduler.pool.counts().cached == 4
