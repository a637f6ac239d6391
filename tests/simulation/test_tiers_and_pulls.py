"""Pool, host memory, disk, pulls and warming at once, under random faults: no answer is wrong.

Sources die, evict, start again under their names, and do not have what routers say they have.
Policies, sampling and grammars are drawn too, and tenants with equal prompts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import PullRefused, WarmNode
from tests.simulation.scripted_node import BLOCK_SIZE, Node, NodeSize
from tests.simulation.storm import FAULTS, Conversations, run_to_the_end
from tests.simulation.world import PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

NUM_RUNS = everyday(10, of=160)
OTHER = Incarnation("q", 1)
MORE_FAULTS = ["evict", "refuse pull", "restart", "warm"]


class AllTiers(Conversations):
    """Conversations with every tier; a third node is warmed by the others, and warms them."""

    def __init__(self, seed: int, faults: list[str], folder: Path, *, is_async: bool) -> None:
        self.folder = folder
        super().__init__(seed, faults, is_async=is_async)
        self.fault_share, self.ask_share, self.num_to_ask = 0.01, 0.02, 60
        self.num_actions *= 2
        self.num_lives = 1
        self.world.join(OTHER, self._size("none"))
        self.all_nodes = list(self.world.nodes.values())
        """Those that have died too."""

    def _size(self, method: str) -> NodeSize:
        size = super()._size(method)
        has_disk = self.rng.random() < 0.7
        return replace(
            size,
            keeps_prefixes=True,
            disk_path=self.folder if has_disk else None,
            num_disk_blocks=self.rng.choice([3, 99, 99]),
            num_blocks=self.rng.randint(9, 14),
            num_host_blocks=8,
        )

    def _prompt(self, length: int) -> int | tuple[int, ...]:
        """One of a few beginnings, so that they are used again, or what was said before."""
        if self.rng.random() < 0.5:
            return (*make_prompt(16, self.rng.randrange(4)), length)
        prompt = super()._prompt(length)
        return prompt if isinstance(prompt, int) else prompt[:28]

    def _ask(self) -> None:
        """Name a source that has something, has less than is said, is busy, or is not there."""
        rng, router = self.rng, self.world.router
        nodes = [node.me for node in self.world.nodes.values()]
        source = rng.choice([*nodes, Incarnation("p", 77)])
        num_tokens, num_queued = BLOCK_SIZE * rng.randint(1, 15), rng.choice([0, 100])
        router.source = PrefixSource(source, num_tokens, num_queued_tokens=num_queued)
        if rng.random() < 0.3:
            router.source = None
        super()._ask()

    def _has_prefill(self) -> bool:
        return self.world.router.prefill in self.world.nodes

    # --- faults -------------------------------------------------------------------------------

    def _kill_prefill(self) -> bool:
        return self._has_prefill() and super()._kill_prefill()

    def _evict(self) -> bool:
        pool = self.rng.choice(list(self.world.nodes.values())).scheduler.pool
        pool.release(pool.allocate(self.rng.randint(0, pool.num_available), BlockUse.RUNNING))
        return True

    def _refuse_pull(self) -> bool:
        landings = [
            (node.me, token)
            for node in self.world.nodes.values()
            for token in node.connector.landings
        ]
        if landings:
            node, token = self.rng.choice(landings)
            self.world.to_nodes.append((node, PullRefused(token)))
        return bool(landings)

    def _warm(self) -> bool:
        source, new = self.rng.sample([node.me for node in self.world.nodes.values()] * 2, 2)
        self.world.to_nodes.append((source, WarmNode(ROUTER, new)))
        return True

    def _restart(self) -> bool:
        """The prefill node, which may have died before, comes back under its name."""
        world = self.world
        if self._has_prefill():
            world.kill(world.p, is_noticed=self.rng.random() < 0.7)
        world.notice(world.p.me)
        self.num_lives += 1
        me = Incarnation(PREFILL.node_id, self.num_lives)
        world.p = world.join(me, self._size("none"))
        self.all_nodes.append(world.p)
        world.router.prefill = me
        return True


@pytest.mark.covers("F135")
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_every_tier_and_pull_under_faults_gives_right_answers(
    is_async: bool, tmp_path: Path
) -> None:
    pulls: Counter[str] = Counter()
    found: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    num_fetched = 0
    for seed in range(NUM_RUNS):
        folder = tmp_path / str(seed)
        storm = AllTiers(seed, [*FAULTS, *MORE_FAULTS], folder, is_async=is_async)
        run_to_the_end(storm, seed)
        happened += storm.happened
        for node in storm.all_nodes:
            counters = node.scheduler.statistics().counters
            pulls += Counter(counters.pulls)
            found += Counter(counters.prefix_blocks_found)
            num_fetched += counters.num_fetched_tokens
    # Of each there are four times as many or more, in every ten runs.
    few = NUM_RUNS / 10
    assert min(happened[fault] for fault in MORE_FAULTS) > few, happened
    assert min(pulls[how] for how in ("landed", "failed", "missed", "declined")) > few, pulls
    assert min(found[tier] for tier in ("pool", "host", "disk")) > few, found
    assert num_fetched > few * BLOCK_SIZE


class Tenants(World):
    """Two prefill nodes whose pools hold two prompts, with host memory below them, and a disk."""

    def __init__(self, disk_path: Path | None) -> None:
        size = NodeSize(
            num_blocks=9,
            max_model_len=28,
            num_host_blocks=24 if disk_path is None else 8,
            keeps_prefixes=True,
            disk_path=disk_path,
        )
        super().__init__(prefill=size, decode=NodeSize(num_blocks=48, caching=False))
        self.q = self.join(OTHER, size)

    def use_every_way(self, salt: str) -> None:
        """Ask each prompt twice in turn, then another node, then for all of them again."""
        for family in FAMILIES:
            for last in (1, 2):
                self.ask_one(family, salt, last, self.p, None)
            self.ask_one(family, salt, 3, self.q, self.p)
        for family in FAMILIES:
            self.ask_one(family, salt, 4, self.p, None)

    def ask_one(self, family: int, salt: str, last: int, at: Node, source: Node | None) -> None:
        self.router.prefill = at.me
        self.router.source = None if source is None else PrefixSource(source.me, 16)
        prompt, name = (*make_prompt(16, family), last), str(len(self.router.asked))
        asked = self.ask(prompt, max_tokens=3, name=name, cache_salt=salt, ignore_eos=True)
        assert_finished(self, asked)

    def found(self) -> Counter[str]:
        """The blocks that prompts found, by tier, and the tokens that were pulled."""
        found: Counter[str] = Counter()
        for node in self.nodes.values():
            counters = node.scheduler.statistics().counters
            found += Counter(counters.prefix_blocks_found)
            found["pulled"] += counters.num_pulled_tokens
        return found


FAMILIES = range(1, 7)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tenant_finds_nothing_of_another_one_in_any_tier(tier: str, tmp_path: Path) -> None:
    world = Tenants(tmp_path / "d" if tier == "disk" else None)
    world.use_every_way("a")
    before = world.found()
    assert min(before[way] for way in ("pool", tier, "pulled")) > 0, before
    for number, family in enumerate((*FAMILIES, *FAMILIES)):
        at, source = (world.p, world.q) if number % 2 else (world.q, world.p)
        world.ask_one(family, f"b{number}", 5, at, source)
    assert world.found() == before
    for last in (6, 7):
        world.ask_one(1, "a", last, world.p, None)
    assert world.found() != before, "the first one still finds its own"
