"""A source sends what its pool has evicted straight from host memory, and takes no block for it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.host_pool import ONCE_SHARE
from node.flow.messages import Drain, FetchBlocks, Message, SendBlocks
from node.flow.pulls.hand_over import UNASKED_S
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.small_source import NUM_SHARED, OTHER, SmallSource
from tests.simulation.world import PREFILL, ROUTER, assert_finished
from tests.support.engine.build import check_idle, make_prompt
from tests.support.examples import everyday

SHARED = make_prompt(NUM_SHARED * BLOCK_SIZE, 1)
OTHERS = range(2, 6)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}]


class Kept(SmallSource):
    """`p` has the shared prompt, and its pool no room for it and others; `q` is asked next."""

    def __init__(self, *, num_host_blocks: int = 24, **given: Any) -> None:
        super().__init__(SHARED, {"num_host_blocks": num_host_blocks}, **given)

    def fill(self, *, num_evicted: int = NUM_SHARED) -> None:
        """Have `p` use the shared prompt twice, and evict the last blocks of it."""
        pool = self.p.scheduler.pool
        for last in (1, 2):
            self._ask_p(SHARED, last)
        self.shared = pool.latest(NUM_SHARED)
        for family in OTHERS:
            self._ask_p(make_prompt(16, family), 1)
        self._ask_p(SHARED, 3)
        for _ in range(3):
            self.step()
        ends = [pool.prefix_cache.find(one) for one in reversed(self.shared)]
        pool.evict_next([one for one in ends[:num_evicted] if one is not None])
        taken = pool.allocate(pool.num_free + num_evicted, BlockUse.RUNNING)
        pool.release(taken)
        assert self.in_pool() == NUM_SHARED - num_evicted
        assert all(self.p.scheduler.host_pool.find(one) is not None for one in self.shared)
        self.router.prefill = OTHER
        self.router.source = PrefixSource(PREFILL, len(SHARED))

    def _ask_p(self, prompt: tuple[int, ...], last: int) -> None:
        self.router.prefill, self.router.source = PREFILL, None
        assert_finished(self, self.ask((*prompt, last), max_tokens=3, ignore_eos=True))

    def step_until_sent(self) -> None:
        """Go on until `p` has pushed all pieces, none of which was read."""
        self.step_until(
            lambda: any(f.kind == "commit" and f.sender == PREFILL for f in self.network.frames),
            frames=False,
        )

    def overwrite(self) -> None:
        """Give host memory of `p` to others, as much as it gives, who write it."""
        host_pool = self.p.scheduler.host_pool
        taken = host_pool.allocate(host_pool.num_available)
        self.p.runner.host_kv[:, :, taken] = 0xEE
        host_pool.release(taken)


@pytest.mark.parametrize("num_evicted", [4, 2, 1])
@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_sent_from_where_they_are(way: dict[str, Any], num_evicted: int) -> None:
    world = Kept()
    world.fill(num_evicted=num_evicted)
    num_evictions = world.p.scheduler.pool.num_evicted
    num_copied = world.p.scheduler.statistics().counters.num_prefix_blocks_in
    assert_finished(world, world.ask_q(**way))
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == 1
    assert world.p.sent() == {"pool": NUM_SHARED - num_evicted, "host": num_evicted, "disk": 0}
    assert world.in_pool() == NUM_SHARED - num_evicted, "the pool of the source takes no part"
    assert world.p.scheduler.pool.num_evicted == num_evictions
    assert world.p.scheduler.statistics().counters.num_prefix_blocks_in == num_copied
    world.check_closed()


@pytest.mark.parametrize("num_evicted", [4, 2])
def test_what_is_sent_is_not_overwritten_meanwhile(num_evicted: int) -> None:
    world = Kept()
    world.fill(num_evicted=num_evicted)
    asked = world.ask_q()
    world.step_until_sent()
    assert world.p.scheduler.host_pool.num_read == num_evicted
    world.overwrite()
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    assert world.p.scheduler.host_pool.num_read == 0
    world.overwrite()
    assert_finished(world, world.ask_q(last=10))
    assert world.q.pulls() == {"landed": 1}


@pytest.mark.parametrize("num_host_blocks", [7, 24])
def test_a_receiver_of_an_earlier_release_gets_all_of_the_blocks_or_none(
    num_host_blocks: int,
) -> None:
    world = Kept(num_host_blocks=num_host_blocks)
    world.fill()
    asked = world.ask_q()
    world.step_until(
        lambda: any(isinstance(message, SendBlocks) for _, message in world.to_nodes), frames=False
    )
    world.to_nodes = [(to, strict(message)) for to, message in world.to_nodes]
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed" if num_host_blocks == 7 else "landed": 1}
    world.check_closed()


def strict(message: Message) -> Message:
    if not isinstance(message, SendBlocks):
        return message
    return replace(message, ticket=replace(message.ticket, may_be_short=False))


class KeptByLeaving(Kept):
    hands_over = True


def test_a_node_that_leaves_hands_over_what_only_host_memory_has() -> None:
    world = KeptByLeaving()
    world.fill()
    world.p.inbox.put(Drain(100.0))
    world.settle()
    [(offering, offered)] = world.offered
    assert offering == PREFILL
    assert set(world.shared) <= set(offered)
    world.to_nodes.append((OTHER, FetchBlocks(ROUTER, PREFILL, offered)))
    world.settle()
    assert world.p.sent()["host"] >= NUM_SHARED
    world.advance(UNASKED_S)
    world.settle()
    assert world.p.num_drained == 1
    check_idle(world.p.scheduler)
    world.kill(world.p, is_noticed=False)
    world.router.source = None
    assert_finished(world, world.ask_q())
    assert world.q.num_computed() == 1


def test_what_was_sent_is_the_last_to_give_way() -> None:
    world = Kept()
    world.fill()
    assert_finished(world, world.ask_q())
    host_pool = world.p.scheduler.host_pool
    num_once = int(ONCE_SHARE * host_pool.num_blocks)  # those come behind it
    host_pool.release(host_pool.allocate(host_pool.num_available - NUM_SHARED - num_once))
    assert all(host_pool.find(one) is not None for one in world.shared)
    world.check_closed()


def test_two_nodes_pull_the_same_blocks_at_once() -> None:
    world = Kept()
    third = world.join(Incarnation("q2", 1), NodeSize(num_blocks=24, max_model_len=28))
    world.fill()
    first = world.ask_q()
    world.step_until(lambda: len(world.p.connector.transfers) == 1, frames=False)
    world.router.prefill = third.me
    second = world.ask_q(last=11)
    world.step_until(lambda: len(world.p.connector.transfers) == 2, frames=False)
    world.overwrite()
    assert_finished(world, first, second)
    assert world.p.sent() == {"pool": 0, "host": 2 * NUM_SHARED, "disk": 0}
    assert third.scheduler.statistics().counters.pulls["landed"] == 1
    world.check_closed()


def test_a_source_that_keeps_half_of_its_host_memory_for_others_sends_the_beginning() -> None:
    world = Kept(num_host_blocks=7)
    world.fill()
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"landed": 1}
    assert world.p.sent() == {"pool": 0, "host": 3, "disk": 0}
    assert world.q.num_computed() == 1 + BLOCK_SIZE
    world.check_closed()


def test_a_source_that_has_a_block_in_neither_says_so_at_once() -> None:
    world = Kept()
    world.fill()
    asked = world.ask_q()
    world.step_until(
        lambda: any(isinstance(message, SendBlocks) for _, message in world.to_nodes), frames=False
    )
    world.overwrite()
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed": 1}
    world.check_closed()


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int, is_one_sided: bool) -> None:
    world = Kept()
    world.network.is_one_sided = is_one_sided
    world.fill(num_evicted=2)
    world.check_abort_after(num_steps)


@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_a_source_that_dies_at_any_moment_costs_the_pull(num_steps: int) -> None:
    world = Kept()
    world.fill()
    world.check_death_after(num_steps)


def test_a_receiver_that_dies_leaves_host_memory_to_others() -> None:
    world = Kept()
    world.fill()
    world.ask_q()
    world.step_until_sent()
    world.kill(world.q, is_noticed=False)
    world.p.connector.on_peer_lost(OTHER)
    world.settle()
    assert world.p.scheduler.host_pool.num_read == 0
    assert world.p.sent() == {"pool": 0, "host": 0, "disk": 0}


def test_a_copy_that_fails_costs_the_pull_and_lets_go_of_both_memories() -> None:
    """Blocks of the pool of a device are copied out first."""
    world = Kept()
    world.fill(num_evicted=2)
    asked = world.ask_q()
    world.p.runner.fail_next_copy = True
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed": 1}
    assert not world.p.runner.fail_next_copy
    world.check_closed()


@pytest.mark.covers("F135")
def test_random_evictions_losses_and_deaths_change_no_answer() -> None:
    sent: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(everyday(10, of=100)):
        choose = random.Random(seed)
        world = Kept(num_host_blocks=choose.choice([7, 12, 24]))
        world.fill(num_evicted=choose.randint(0, NUM_SHARED))
        world.network.is_one_sided = seed % 3 == 0
        asked = [world.ask_q(last=20, max_tokens=choose.randint(1, 8), seed=seed)]
        for _ in range(choose.randint(5, 40)):
            happens = choose.random()
            if happens < 0.1 and (world.p.connector.transfers or happens < 0.01):
                world.overwrite()
            elif happens < 0.15:
                asked.append(world.ask_q(last=20 + len(asked)))
            elif happens < 0.16 and world.p.me in world.nodes:
                world.kill(world.p, is_noticed=False)
                world.q.connector.on_peer_lost(PREFILL)
            elif world.network.frames and happens < 0.6:
                world.network.deliver(choose.choice(world.network.next_frames()))
            else:
                world.step(frames=False)
        world.outlast_faults()
        assert_finished(world, *asked)
        world.check_closed()
        sent += Counter(world.p.sent())
        outcomes += Counter(world.q.pulls())
    assert min(sent["pool"], sent["host"]) > 0, f"a tier has sent nothing: {sent}"
    assert {"landed", "missed", "failed"} <= set(outcomes), f"an outcome is missing: {outcomes}"
