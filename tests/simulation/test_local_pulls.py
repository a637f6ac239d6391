"""Nodes that compute prompts themselves pull as prefill nodes do: decode nodes and mixed ones."""

from __future__ import annotations

from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from node.flow.messages import FetchBlocks, PullRefused
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

OTHER = Incarnation("m", 1)
SHARED = make_prompt(21, 5)
NUM_HELD = 5 * BLOCK_SIZE
SIZE = NodeSize(num_blocks=48)


class TwoMixed(World):
    """Two mixed nodes; `m` is asked second, and told that `d` has the start of the prompt."""

    def __init__(self) -> None:
        super().__init__(threshold=None, decode=SIZE)
        self.holder, self.receiver = self.d, self.join(OTHER, SIZE, None)
        assert_finished(self, self.ask(SHARED, max_tokens=4, name="first"))
        self.router.decode, self.router.source = OTHER, PrefixSource(DECODE, NUM_HELD)


class ShortPrompts(World):
    """A decode node that computes short prompts itself; a prefill node has the start of them."""

    def __init__(self) -> None:
        super().__init__(threshold=64, prefill=SIZE, decode=SIZE)
        self.holder, self.receiver = self.p, self.d
        assert_finished(self, self.ask(SHARED, max_tokens=1, name="first"))
        self.router.prefill, self.router.source = None, PrefixSource(PREFILL, NUM_HELD)


MAKES: list[type[TwoMixed | ShortPrompts]] = [TwoMixed, ShortPrompts]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}, {"max_tokens": 1}]


def the_next(world: TwoMixed | ShortPrompts, **given: Any) -> Asked:
    given.setdefault("max_tokens", 4)
    return world.ask((*SHARED, 1, 2, 3), name="next", **given)


@pytest.mark.covers("F135")
@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKES)
def test_what_another_node_has_is_pulled(
    make: type[TwoMixed | ShortPrompts], way: dict[str, Any], is_one_sided: bool
) -> None:
    world = make()
    world.network.is_one_sided = is_one_sided
    assert_finished(world, the_next(world, **way))
    counters = world.receiver.scheduler.statistics().counters
    assert world.receiver.pulls() == {"landed": 1}
    assert counters.num_pulled_tokens == NUM_HELD
    assert counters.num_chunk_tokens == len(SHARED) + 3 - NUM_HELD


@pytest.mark.parametrize("make", MAKES)
def test_a_source_that_is_gone_is_not_waited_for(make: type[TwoMixed | ShortPrompts]) -> None:
    world = make()
    asked = the_next(world)
    world.step_until(lambda: len(world.receiver.flow.pulls) > 0, frames=False)
    world.kill(world.holder, is_noticed=False)
    world.notice(world.holder.me)
    assert_finished(world, asked)  # no time has passed
    assert world.receiver.pulls() == {"failed": 1}


@pytest.mark.parametrize("num_steps", range(1, 10, everyday(3, of=1)))
@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_an_abort_at_any_moment_leaves_nothing(
    make: type[TwoMixed | ShortPrompts], is_one_sided: bool, num_steps: int
) -> None:
    world = make()
    world.network.is_one_sided = is_one_sided
    asked = the_next(world)
    for _ in range(num_steps):
        world.step(frames=num_steps % 2 == 0)
    world.router.abort(asked)
    world.settle()
    world.advance(30.0)
    world.settle()
    world.check_closed()


@pytest.mark.parametrize("make", MAKES)
def test_an_earlier_deadline_ends_the_wait(make: type[TwoMixed | ShortPrompts]) -> None:
    world = make()
    asked = the_next(world, deadline_s=2.0)
    world.step_until(lambda: len(world.receiver.flow.pulls) > 0, frames=False)
    world.advance(3.0)
    world.settle()
    world.advance(30.0)
    world.settle()
    world.check_closed()
    assert asked.outcomes == ["failed: deadline_exceeded"]


@pytest.mark.parametrize("make", MAKES)
def test_what_a_node_that_leaves_has_is_fetched(make: type[TwoMixed | ShortPrompts]) -> None:
    """A mixed node is what stays where there is no prefill node."""
    world = make()
    hashes = tuple(world.holder.scheduler.pool.latest(NUM_HELD // BLOCK_SIZE))
    fetch = FetchBlocks(ROUTER, world.holder.me, hashes)
    world.to_nodes.append((world.receiver.me, fetch))
    world.settle()
    world.to_nodes.append((world.receiver.me, PullRefused(1)))
    world.settle()
    world.router.source = None
    before = world.receiver.num_computed()
    assert_finished(world, the_next(world))
    after = world.receiver.num_computed()
    assert after - before < len(SHARED)
