"""A node that drains hands over what it has cached, and stays no longer than that takes."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import Drain, Drained, FetchBlocks, SendBlocks
from node.flow.pulls import prefix_pulls
from node.flow.pulls.hand_over import MOST_S, UNASKED_S
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, assert_finished, right_answer
from tests.support.engine.build import check_idle, make_prompt

OTHER = Incarnation("q", 1)
PROMPT = make_prompt(21, 5)
NUM_BLOCKS = 5


class Leaving(World):
    """Two prefill nodes and a decode node. The router asks `p`; `q` is there for later."""

    hands_over = True

    def __init__(self, *, caching: bool = False, num_blocks: int = 48) -> None:
        size = NodeSize(num_blocks=48)
        super().__init__(prefill=size, decode=NodeSize(num_blocks=48, caching=caching))
        self.q = self.join(OTHER, NodeSize(num_blocks=num_blocks))

    def drain(self, node: Node) -> tuple[BlockHash, ...]:
        """The node drains and is empty; return what it offers."""
        node.inbox.put(Drain(100.0))
        self.settle()
        assert node.num_drained == 0, "it waits for those that stay"
        [(offering, block_hashes)] = self.offered
        assert offering == node.me
        return block_hashes

    def fetch(self, source: Node, block_hashes: tuple[BlockHash, ...]) -> None:
        """The router tells `q` of them."""
        self.to_nodes.append((OTHER, FetchBlocks(ROUTER, source.me, block_hashes)))

    def leave(self, node: Node) -> None:
        """Nobody asks any more: the node is empty, ends, and is gone."""
        self.advance(UNASKED_S)
        self.settle()
        assert node.num_drained == 1
        check_idle(node.scheduler)
        self.kill(node, is_noticed=False)

    def ask_q(self, prompt: tuple[int, ...]) -> int:
        """Ask `q`; return how much of the prompt it computed."""
        self.router.prefill = OTHER
        before = self.q.num_computed()
        assert_finished(self, self.ask(prompt, max_tokens=3, name=f"at q {len(prompt)}"))
        return self.q.num_computed() - before


def first(world: World, max_tokens: int = 3) -> Asked:
    asked = world.ask(PROMPT, max_tokens=max_tokens, name="first")
    assert_finished(world, asked)
    return asked


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("part", [1, 2, 256])
def test_what_a_prefill_node_had_is_found_on_another_one(
    monkeypatch: pytest.MonkeyPatch, part: int, is_one_sided: bool
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", part)
    world = Leaving()
    world.network.is_one_sided = is_one_sided
    first(world)
    offered = world.drain(world.p)
    assert len(offered) == NUM_BLOCKS
    world.fetch(world.p, offered)
    world.settle()
    assert world.q.pulls() == {"landed": -(-NUM_BLOCKS // part)}
    world.leave(world.p)
    assert world.ask_q((*PROMPT, 1, 2)) == len(PROMPT) + 2 - 4 * NUM_BLOCKS


def test_what_a_decode_node_answered_is_found_on_a_prefill_node() -> None:
    world = Leaving(caching=True)
    asked = first(world, max_tokens=16)
    offered = world.drain(world.d)
    world.fetch(world.d, offered)
    world.settle()
    world.leave(world.d)
    history = (*PROMPT, *asked.answer())
    request = asked.request
    assert asked.answer() == right_answer(request)
    num_held = (len(history) - 1) // 4
    assert len(offered) == num_held
    find = world.q.scheduler.pool.prefix_cache.find
    assert all(find(one) is not None for one in offered)
    assert world.q.scheduler.pool.counts().cached == num_held


def test_the_latest_are_offered_first_each_behind_what_is_before_it() -> None:
    world = Leaving()
    first(world)
    other = make_prompt(9, 8)
    assert_finished(world, world.ask(other, max_tokens=2, name="later"))
    offered = world.drain(world.p)
    find = world.p.scheduler.pool.prefix_cache.find
    world.ask(other, max_tokens=1, name="refused")
    assert [find(one) for one in offered] == [find(one) for one in dict.fromkeys(offered)]
    world.fetch(world.p, offered[:2])
    world.settle()
    world.leave(world.p)
    world.settle()
    assert world.ask_q((*other, 1)) == len(other) + 1 - 8


def test_a_node_without_anything_cached_leaves_at_once() -> None:
    world = Leaving()
    world.p.inbox.put(Drain(100.0))
    world.settle()
    assert world.p.num_drained == 1
    assert world.offered == []


def test_a_node_that_nobody_asks_leaves_soon() -> None:
    world = Leaving()
    first(world)
    world.drain(world.p)
    world.advance(UNASKED_S / 2)
    world.settle()
    assert world.p.num_drained == 0
    world.leave(world.p)
    assert len(world.offered) == 1, "it offers once"


def test_a_node_that_is_asked_slowly_leaves_all_the_same() -> None:
    world = Leaving()
    first(world)
    offered = world.drain(world.p)
    begun_at_s = world.clock.now_s()
    for _ in range(10):
        if world.p.num_drained:
            break
        world.fetch(world.p, offered[:1])
        world.q.scheduler.pool.release(
            world.q.scheduler.pool.allocate(world.q.scheduler.pool.num_available, BlockUse.RUNNING)
        )
        world.settle()
        world.advance(UNASKED_S * 0.9)
        world.settle()
    assert MOST_S <= world.clock.now_s() - begun_at_s <= MOST_S + UNASKED_S


def test_a_node_that_still_sends_when_its_time_is_over_waits_for_the_end_of_that() -> None:
    """Nothing is due meanwhile: the step thread would turn without a pause."""
    world = Leaving()
    first(world)
    world.fetch(world.p, world.drain(world.p))
    world.step_until(lambda: len(world.p.flow.sends) == 1)
    world.advance(MOST_S + UNASKED_S)
    now_s = world.clock.now_s()
    assert not any(isinstance(one, Drained) for one in world.p.flow.on_time(now_s))
    due_s = world.p.flow.next_deadline_s()
    assert due_s is None or due_s > now_s
    world.settle()
    world.leave(world.p)


def test_what_is_there_is_not_pulled_again() -> None:
    world = Leaving()
    first(world)
    world.ask_q(PROMPT)
    world.fetch(world.p, world.drain(world.p))
    world.settle()
    assert world.q.pulls() == {}


def test_two_routers_fetch_once() -> None:
    world = Leaving()
    first(world)
    offered = world.drain(world.p)
    world.fetch(world.p, offered)
    world.fetch(world.p, offered)
    world.settle()
    assert world.q.pulls() == {"landed": 1}
    world.leave(world.p)


@pytest.mark.parametrize("part", [1, 2, 256])
def test_no_more_than_half_of_what_is_free_is_filled(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """What came first, and is used most, would be evicted for what comes last."""
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", part)
    world = Leaving(num_blocks=6)
    first(world)
    world.fetch(world.p, world.drain(world.p))
    world.settle()
    assert world.q.pulls() == {"landed": -(-3 // part)}
    assert world.q.scheduler.pool.counts().cached == 3


def test_a_block_that_is_gone_ends_its_part() -> None:
    world = Leaving()
    first(world)
    offered = world.drain(world.p)
    world.fetch(world.p, (*offered[:2], bytes(16), *offered[2:]))
    world.settle()
    assert world.q.pulls() == {"landed": 1}
    world.leave(world.p)
    assert world.ask_q(PROMPT) == len(PROMPT) - 8


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_node_that_dies_while_it_hands_over(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, is_one_sided: bool
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", 2)
    world = Leaving()
    world.network.is_one_sided = is_one_sided
    first(world)
    world.fetch(world.p, world.drain(world.p))
    for _ in range(num_steps):
        world.step(frames=num_steps % 2 == 0)
    world.kill(world.p, is_noticed=False)
    world.settle()
    world.advance(6.0)
    for connector in world.network.connectors.values():
        connector.on_peer_lost(PREFILL)
    for token in list(world.q.connector.quarantined):
        world.q.connector.fence(token)
    world.settle()
    world.check_closed()
    world.ask_q((*PROMPT, 1))


def test_prompts_are_served_meanwhile_and_wait_for_no_part() -> None:
    world = Leaving()
    first(world)
    world.fetch(world.p, world.drain(world.p))
    world.step_until(lambda: any(isinstance(m, SendBlocks) for _, m in world.to_nodes))
    world.to_nodes = [(to, m) for to, m in world.to_nodes if not isinstance(m, SendBlocks)]
    world.router.prefill = OTHER
    world.router.source = PrefixSource(PREFILL, 4 * NUM_BLOCKS)
    asked = world.ask(PROMPT, max_tokens=3, name="meanwhile")
    world.settle()
    assert asked.outcomes == ["finished"], "it pulls for itself"
    assert world.q.pulls() == {"landed": 1}
    world.advance(6.0)
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1, "failed": 1}


def test_a_node_that_leaves_too_takes_nothing_over() -> None:
    world = Leaving()
    first(world)
    offered = world.drain(world.p)
    world.q.inbox.put(Drain(100.0))
    world.settle()
    world.fetch(world.p, offered)
    world.to_nodes.append((DECODE, FetchBlocks(ROUTER, PREFILL, offered)))
    world.settle()
    assert world.q.pulls() == world.d.pulls() == {}
    assert world.q.num_drained == 1


def test_a_node_that_leaves_while_it_takes_over_takes_no_further_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_pulls, "PART_BLOCKS", 1)
    world = Leaving()
    first(world)
    world.fetch(world.p, world.drain(world.p))
    world.step_until(lambda: len(world.q.flow.pulls) > 0)
    world.q.inbox.put(Drain(100.0))
    world.settle()
    assert world.q.scheduler.statistics().counters.num_fetched_tokens == 4, "the one under way"
    assert len(world.q.flow.pulls) == 0
