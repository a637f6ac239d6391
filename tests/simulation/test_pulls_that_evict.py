"""A pull that evicts more than was copied ahead waits until that is in host memory too."""

from __future__ import annotations

from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from engine.core import kept_prefixes
from engine.core.blocks import leaving_blocks
from engine.core.sequences.sequence import Sequence
from node.flow.messages import AbortAttempt, Drain, FetchBlocks
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import check_idle, make_prompt, make_request
from tests.support.examples import everyday

OTHER = Incarnation("q", 1)
FAMILIES = range(1, 15)
FAMILY_TOKENS = 2 * BLOCK_SIZE
LONG = make_prompt(20 * BLOCK_SIZE, 50)
AT_ONCE = 3
NEVER = 1_000_000


@pytest.fixture(autouse=True)
def _little_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_blocks, "LEAST_AHEAD", 2)
    monkeypatch.setattr(leaving_blocks, "STEPS_AHEAD", 0)
    monkeypatch.setattr(kept_prefixes, "MOST_AT_ONCE", AT_ONCE)


class Full(World):
    """The pool of `p` is full of prompts that were used twice; `q` has a long one."""

    def __init__(self, *, num_copy_polls: int = 0, **given: Any) -> None:
        size = NodeSize(num_blocks=36, budget=200, num_host_blocks=120, keeps_prefixes=True)
        decode = NodeSize(num_blocks=120, caching=False)
        super().__init__(prefill=size, decode=decode, **given)
        self.q = self.join(OTHER, NodeSize(num_blocks=60, budget=200))
        self.router.prefill = OTHER
        assert_finished(self, self.ask((*LONG, 1), max_tokens=3))
        self.router.prefill = PREFILL
        for family in FAMILIES:
            for last in (1, 2):
                assert_finished(self, self.ask(self.prompt(family, last), max_tokens=3))
        self.p.runner.num_copy_polls = num_copy_polls
        assert len(self.p.scheduler.pool.prefix_cache) > len(LONG) // BLOCK_SIZE

    def prompt(self, family: int, last: int) -> tuple[int, ...]:
        return (*make_prompt(FAMILY_TOKENS, family), last)

    def ask_long(self, last: int, num_tokens: int = len(LONG), **given: Any) -> Asked:
        """`p` is asked for the start of the long prompt, and told that `q` has it."""
        self.router.source = PrefixSource(OTHER, len(LONG))
        given = {"max_tokens": 3, "ignore_eos": True, **given}
        prompt = (*LONG[:num_tokens], last)
        return self.ask(prompt, name=f"long {last}", may_wait=True, **given)

    def wait_for_room(self) -> None:
        """Go on until a pull of `p` waits."""
        self.step_until(lambda: self.p.flow.pulls.wait_for_room)

    def num_kept(self) -> int:
        """The families that `p` has, in its pool or in host memory."""
        probes = [Sequence(999, make_request(self.prompt(one, 3))) for one in FAMILIES]
        return [self.p.scheduler.num_cached_tokens(one) for one in probes].count(FAMILY_TOKENS)

    def check_kept(self) -> None:
        """Nothing is lost, and all of it is right."""
        assert self.num_kept() == len(FAMILIES)
        self.router.source = None
        before = self.p.num_computed()
        again = [
            self.ask(self.prompt(family, 3), max_tokens=3, may_wait=True) for family in FAMILIES
        ]
        assert_finished(self, *again)
        assert self.p.num_computed() - before == len(FAMILIES)
        self.check_closed()


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("num_copy_polls", [0, 2])
def test_what_a_pull_evicts_is_in_host_memory_first(num_copy_polls: int, is_async: bool) -> None:
    world = Full(num_copy_polls=num_copy_polls, is_async=is_async)
    asked, before = world.ask_long(1), world.p.num_computed()
    assert_finished(world, asked)
    assert world.p.pulls() == {"landed": 1}
    assert world.p.num_computed() - before == 1
    world.check_kept()


def test_others_are_served_while_it_waits() -> None:
    world = Full(num_copy_polls=NEVER)
    asked = world.ask_long(1)
    world.wait_for_room()
    short = world.ask((7,), max_tokens=1, name="short")
    world.step_until(lambda: short.is_done)
    assert not asked.tokens
    world.p.runner.num_copy_polls = 0
    assert_finished(world, asked)
    assert world.p.pulls() == {"landed": 1}


def test_a_pull_that_waits_for_too_long_is_given_up_and_computed() -> None:
    world = Full(num_copy_polls=NEVER)
    asked, before = world.ask_long(1), world.p.num_computed()
    world.wait_for_room()
    world.advance(4.0)
    for _ in range(3):
        world.step()
    assert world.p.pulls() == {}
    world.advance(1.0)
    world.step()
    assert world.p.pulls() == {"no_room": 1}
    world.p.runner.num_copy_polls = 0
    assert_finished(world, asked)
    assert world.p.num_computed() - before == len(LONG) + 1
    world.check_kept()


def test_the_time_in_which_it_waits_counts_in_that_of_the_pull() -> None:
    world = Full(num_copy_polls=NEVER)
    world.ask_long(1)
    world.wait_for_room()
    world.advance(3.0)
    world.p.runner.num_copy_polls = 0
    world.step_until(lambda: bool(world.p.connector.landings), frames=False)
    (landing,) = world.p.connector.landings.values()
    assert landing.ticket.lease_s == pytest.approx(2.0)


def test_a_request_whose_deadline_passes_meanwhile_leaves_nothing() -> None:
    world = Full(num_copy_polls=NEVER)
    asked = world.ask_long(1, deadline_s=2.0, max_tokens=1)
    world.wait_for_room()
    world.advance(2.5)
    world.step()
    assert not world.p.flow.pulls.wait_for_room
    assert len(world.p.flow.attempts) == 0
    world.p.runner.num_copy_polls = 0
    world.settle()
    assert asked.outcomes == ["failed: deadline_exceeded"]
    check_idle(world.p.scheduler)
    world.check_kept()


@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int) -> None:
    world = Full(num_copy_polls=1)
    asked, other = world.ask_long(1), world.ask_long(2, 10 * BLOCK_SIZE)
    for _ in range(num_steps):
        world.step()
    world.router.abort(asked)
    world.to_nodes.append((PREFILL, AbortAttempt(ROUTER, (asked.request.id,))))
    assert_finished(world, other)
    world.advance(30.0)
    world.settle()
    world.check_closed()
    world.check_kept()


def test_pulls_begin_in_the_order_in_which_they_came() -> None:
    world = Full(num_copy_polls=NEVER)
    first, second = world.ask_long(1), world.ask_long(2, BLOCK_SIZE)
    world.wait_for_room()
    for _ in range(3):
        world.step()
    assert len(world.p.flow.pulls) == 0, "the first one needs the room"
    world.p.runner.num_copy_polls = 0
    assert_finished(world, first, second)
    world.check_kept()


def test_prompts_that_lack_the_same_wait_for_one_pull() -> None:
    world = Full(num_copy_polls=2)
    before = world.p.num_computed()
    asked = [world.ask_long(last) for last in (1, 2, 3)]
    assert_finished(world, *asked)
    assert world.p.pulls() == {"landed": 1}
    assert world.p.num_computed() - before == 3
    world.check_kept()


@pytest.mark.parametrize("num_copy_polls", [0, 2])
def test_what_is_fetched_from_a_node_that_leaves_waits_too(num_copy_polls: int) -> None:
    world = Full(num_copy_polls=num_copy_polls)
    offered = tuple(world.q.scheduler.prefix_transfers.latest(30))
    world.to_nodes.append((PREFILL, FetchBlocks(ROUTER, OTHER, offered)))
    world.settle()
    counters = world.p.scheduler.statistics().counters
    assert counters.num_fetched_tokens >= BLOCK_SIZE * AT_ONCE * 3
    world.check_kept()


def test_what_waits_is_fetched_whatever_another_router_tells_of_meanwhile() -> None:
    world = Full(num_copy_polls=NEVER)
    offered = tuple(world.q.scheduler.prefix_transfers.latest(30))
    for known in (offered, offered[1:]):
        world.to_nodes.append((PREFILL, FetchBlocks(ROUTER, OTHER, known)))
        world.wait_for_room()
        while world.to_nodes:
            world.step()
    world.p.runner.num_copy_polls = 0
    world.settle()
    assert world.p.scheduler.prefix_transfers.has(offered[0])
    world.check_kept()


def test_a_node_that_leaves_waits_for_no_room() -> None:
    world = Full(num_copy_polls=NEVER)
    offered = tuple(world.q.scheduler.prefix_transfers.latest(30))
    world.to_nodes.append((PREFILL, FetchBlocks(ROUTER, OTHER, offered)))
    world.wait_for_room()
    world.to_nodes.append((PREFILL, Drain(5.0)))
    world.step_until(lambda: world.p.flow.is_draining)
    assert not world.p.flow.pulls.wait_for_room
    world.p.runner.num_copy_polls = 0
    world.settle()
    assert world.p.scheduler.statistics().counters.num_fetched_tokens == 0
    check_idle(world.p.scheduler)
