"""A node that has a part of a prompt in its own host memory or on its own disk pulls the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.blocks import hash_full_blocks
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import AbortAttempt
from node.flow.pause import FIRST_PAUSE_S
from node.flow.pulls import pull_cost
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.three_nodes import Three
from tests.simulation.world import PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

OTHER = Incarnation("q", 1)
NUM_SHARED = 4
SHARED = make_prompt(NUM_SHARED * BLOCK_SIZE, 0)
TIERS = ["host", "disk"]


class Own(World):
    """`p` has the shared prompt in its pool, and `q` the first blocks of it, in `tier` alone."""

    def __init__(self, tier: str, path: Path, *, num_own: int = 2) -> None:
        super().__init__(decode=NodeSize(num_blocks=48, caching=False))
        has_disk = tier == "disk"
        small = NodeSize(
            num_blocks=9,
            max_model_len=28,
            num_host_blocks=8 if has_disk else 24,
            keeps_prefixes=True,
            disk_path=path if has_disk else None,
        )
        self.q = self.join(OTHER, small)
        fingerprint = self.q.runner.layout.fingerprint
        hashes = hash_full_blocks(SHARED, BLOCK_SIZE, fingerprint)
        self.settle()
        self.shared, self.own = hashes, hashes[:num_own]
        self._use(PREFILL, SHARED)
        self._use(OTHER, SHARED[: num_own * BLOCK_SIZE])
        for family in range(1, 6):
            self._use(OTHER, make_prompt(16, family))
        pool, host_pool = self.q.scheduler.pool, self.q.scheduler.host_pool
        pool.release(pool.allocate(pool.num_available, BlockUse.RUNNING))
        if has_disk:
            host_pool.release(host_pool.allocate(host_pool.num_available))
        assert all((host_pool.find(one) is None) == has_disk for one in self.own)
        self.router.prefill, self.router.source = OTHER, PrefixSource(PREFILL, len(SHARED))
        self.num_computed = self.q.num_computed()

    def _use(self, node: Incarnation, prompt: tuple[int, ...]) -> None:
        """Have a node use a prompt twice."""
        self.router.prefill, self.router.source = node, None
        for last in (1, 2):
            asked = self.ask((*prompt, last), max_tokens=3, ignore_eos=True, may_wait=True)
            assert_finished(self, asked)

    def ask_q(self, last: int = 9, **given: Any) -> Asked:
        given = {"max_tokens": 4, "may_wait": True, **given}
        return self.ask((*SHARED, last), name=f"q{last}", **given)

    def computed(self) -> int:
        """The tokens of prompts that `q` has computed of late."""
        return self.q.num_computed() - self.num_computed

    def found(self) -> dict[str, int]:
        return self.q.scheduler.statistics().counters.prefix_blocks_found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_own", [1, 2, 3])
@pytest.mark.parametrize("num_polls", [0, 3])
def test_only_what_is_in_no_own_tier_is_pulled(
    num_polls: int, num_own: int, tier: str, tmp_path: Path
) -> None:
    world = Own(tier, tmp_path, num_own=num_own)
    world.q.runner.num_copy_polls = num_polls
    if world.q.disk is not None:
        world.q.disk.num_polls = 5 * num_polls
    before = world.found()
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"landed": 1}
    assert world.p.sent()["pool"] == NUM_SHARED - num_own
    assert world.computed() == 1
    assert world.found()[tier] - before[tier] == num_own
    assert world.found()["pool"] - before["pool"] == NUM_SHARED - num_own


def test_only_what_is_pulled_counts_as_read_by_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_cost, "BYTES_PER_S", 1.0)
    world = Own("host", tmp_path, num_own=3)
    world.router.source = PrefixSource(PREFILL, len(SHARED), len(SHARED))
    cost = world.pull_cost
    least_s = cost.expected_s(2 * BLOCK_SIZE)
    world.token_s = 1.2 * least_s / BLOCK_SIZE
    assert cost.expected_s(BLOCK_SIZE + len(SHARED)) > 1.5 * least_s
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"landed": 1}


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_all_in_an_own_tier_is_not_pulled(tier: str, tmp_path: Path) -> None:
    world = Own(tier, tmp_path, num_own=NUM_SHARED)
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {}
    assert world.computed() == 1


def test_a_disk_that_is_left_alone_is_no_tier(tmp_path: Path) -> None:
    world = Own("disk", tmp_path)
    assert world.q.disk is not None
    world.q.disk.is_stuck = True
    other = world.ask((*SHARED[: 2 * BLOCK_SIZE], 5), max_tokens=3, may_wait=True)
    world.settle()
    world.advance(2 * BLOCK_SIZE * world.token_s)
    world.settle()
    assert other.outcomes == ["finished"], "it has waited long enough"
    pool, host_pool = world.q.scheduler.pool, world.q.scheduler.host_pool
    pool.release(pool.allocate(pool.num_available, BlockUse.RUNNING))
    host_pool.release(host_pool.allocate(host_pool.num_available))
    asked = world.ask_q()
    world.settle()
    assert asked.outcomes == ["finished"]
    assert world.q.pulls() == {"landed": 1}
    assert world.p.sent()["pool"] == NUM_SHARED
    world.q.disk.is_stuck = False
    world.settle()
    world.check_closed()


def test_a_prompt_that_waits_for_both_is_computed_when_neither_comes(tmp_path: Path) -> None:
    world = Own("disk", tmp_path)
    assert world.q.disk is not None
    world.q.disk.is_stuck = True
    asked = world.ask_q()
    world.step_until(lambda: len(world.p.connector.transfers) == 1, frames=False)
    world.kill(world.p, is_noticed=False)
    world.q.connector.on_peer_lost(PREFILL)
    world.settle()
    assert not asked.is_done, "it waits for the disk"
    world.advance(2 * BLOCK_SIZE * world.token_s)
    world.settle()
    assert asked.outcomes == ["finished"]
    assert world.q.pulls() == {"failed": 1}
    world.q.disk.is_stuck = False
    world.settle()
    world.check_closed()


def test_prompts_that_wait_for_a_pull_fill_the_queue() -> None:
    world = Three(of_q=NodeSize(num_blocks=48, max_queued=2))
    world.the_first()
    first = world.the_next(1, name="one")
    world.step_until_asked()
    second = world.the_next(2, name="two")
    third = world.the_next(3, name="three")
    held = world.on_the_way()[0]
    world.lose(held)
    world.settle()
    assert world.q.flow.snapshot().load.num_waiting == 2
    assert third.error is not None
    assert third.error.code == "overloaded"
    world.to_nodes.append((PREFILL, held))
    assert_finished(world, first, second)
    assert world.q.pulls() == {"landed": 1}
    assert world.q.flow.snapshot().load.num_waiting == 0
    world.check_closed()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int, tier: str, tmp_path: Path) -> None:
    world = Own(tier, tmp_path)
    if world.q.disk is not None:
        world.q.disk.num_polls = 4
    asked = world.ask_q()
    for _ in range(num_steps):
        world.step()
    world.router.abort(asked)
    world.to_nodes.append((OTHER, AbortAttempt(ROUTER, (asked.request.id,))))
    world.settle()
    world.advance(FIRST_PAUSE_S)
    world.settle()
    world.check_closed()
    assert_finished(world, world.ask_q(last=12))
