"""A prefill node pulls from whichever node holds a prefix; what fails costs the pull alone."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import AbortAttempt, Drain, PullRefused
from node.flow.pulls import prefix_sends
from tests.simulation.scripted_node import BLOCK_SIZE, Node, NodeSize
from tests.simulation.three_nodes import (
    HELD,
    OTHER,
    SHARED,
    Three,
)
from tests.simulation.world import PREFILL, ROUTER, assert_finished
from tests.support.engine.build import check_idle, make_prompt
from tests.support.examples import everyday
from tests.support.nodes.timed_pulls import on_pulled

WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}]


@pytest.mark.covers("F135")
@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_node_pulls_from_another_one(way: dict[str, Any], is_one_sided: bool) -> None:
    world = Three()
    world.network.is_one_sided = is_one_sided
    world.the_first()
    asked = world.the_next(1, 2, 3, **way)
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == len(SHARED) + 3 - HELD.num_tokens
    assert world.q.scheduler.statistics().counters.num_pulled_tokens == HELD.num_tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("num_queued", "outcome"), [(0, "landed"), (30, "landed"), (50, "declined")]
)
def test_nothing_is_pulled_from_a_node_that_would_answer_too_late(
    num_queued: int, outcome: str, way: dict[str, Any]
) -> None:
    """Half of its step is to be waited for: that of as many tokens as the pull brings, or of 25."""
    world = Three()
    world.the_first()
    world.token_s = 10 * world.pull_cost.expected_s(HELD.num_tokens) / HELD.num_tokens
    world.router.source = HELD._replace(num_queued_tokens=num_queued)
    assert_finished(world, world.the_next(1, 2, 3, **way))
    assert world.q.pulls() == {outcome: 1}


def test_a_node_with_a_long_queue_answers_when_one_step_has_ended() -> None:
    world = Three(of_q=NodeSize(num_blocks=48, budget=30))
    world.the_first()
    world.token_s = 10 * world.pull_cost.expected_s(HELD.num_tokens) / HELD.num_tokens
    world.router.source = HELD._replace(num_queued_tokens=1_000_000)
    assert_finished(world, world.the_next(1, 2, 3))
    assert world.q.pulls() == {"landed": 1}


def test_a_busy_node_is_given_more_time_and_what_it_takes_is_held_against_that() -> None:
    world = Three()
    world.the_first()
    world.token_s = 4.0 / 30
    world.router.source = HELD._replace(num_queued_tokens=30)
    right, wrong = copy(world.pull_cost), copy(world.pull_cost)
    on_pulled(right, HELD.num_tokens, 6.0, 30)
    on_pulled(wrong, HELD.num_tokens, 6.0)
    asked = world.the_next(1)
    world.step_until_asked()
    world.advance(6.0)
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    num = 10 * HELD.num_tokens
    assert world.pull_cost.expected_s(num) == right.expected_s(num) != wrong.expected_s(num)


def test_a_prompt_for_one_token_is_pulled_too() -> None:
    world = Three()
    world.the_first()
    assert_finished(world, world.the_next(1, 2, max_tokens=1))
    assert world.q.pulls() == {"landed": 1}


def test_the_other_node_pulls_back() -> None:
    world = Three()
    world.the_first()
    grown = make_prompt(12, 9)
    assert_finished(world, world.the_next(*grown))
    world.router.prefill, world.router.source = PREFILL, PrefixSource(OTHER, 32)
    before = world.p.num_computed()
    assert_finished(world, world.the_next(*grown, 1, name="back"))
    assert world.p.pulls() == {"landed": 1}
    assert world.p.num_computed() - before == len(SHARED) + 13 - 32


def test_a_source_that_has_not_all_sends_what_it_has() -> None:
    world = Three()
    world.the_first()
    world.router.source = PrefixSource(PREFILL, HELD.num_tokens + BLOCK_SIZE)
    asked = world.the_next(*make_prompt(9, 3))
    assert_finished(world, asked)  # no time has passed
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == len(asked.request.prompt_token_ids) - HELD.num_tokens
    assert world.q.scheduler.statistics().counters.num_pulled_tokens == HELD.num_tokens


def test_a_source_that_has_nothing_says_so_at_once() -> None:
    world = Three()
    world.the_first()
    world.router.source = PrefixSource(PREFILL, 4 * BLOCK_SIZE)
    other = world.ask(make_prompt(21, 8), max_tokens=2, name="other")
    assert_finished(world, other)  # no time has passed
    assert world.q.pulls() == {"missed": 1}
    world.router.source = HELD
    assert_finished(world, world.the_next(1))
    assert world.q.pulls() == {"missed": 1, "landed": 1}, "a node that says no is asked again"


def test_a_source_that_evicted_meanwhile_says_so_at_once() -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1)
    world.step_until_asked()
    pool = world.p.scheduler.pool
    pool.release(pool.allocate(pool.num_available, BlockUse.RUNNING))
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed": 1}


def test_a_source_that_keeps_half_of_its_pool_for_others_sends_the_beginning() -> None:
    world = Three(num_blocks=8)
    world.router.source = None
    world.the_first()
    assert_finished(world, world.the_next(1))
    assert world.q.pulls() == {"landed": 1}
    assert world.q.scheduler.statistics().counters.num_pulled_tokens == 4 * BLOCK_SIZE


def test_a_source_that_answers_many_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_sends, "MOST_SENDS", 1)
    world = Three()
    other = make_prompt(21, 8)
    assert_finished(world, world.ask(other, max_tokens=2, name="other"))
    world.the_first()
    asked = [world.the_next(1), world.ask((*other, 1), max_tokens=2, name="too many")]
    assert_finished(world, *asked)
    assert world.q.pulls() == {"landed": 1, "missed": 1}


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("byte", [0, 7, 8, 15])
def test_no_other_block_is_sent_for_a_wrong_hash(place: int, byte: int) -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    message = world.step_until_asked()
    world.lose(message)
    hashes = [bytearray(one) for one in message.block_hashes]
    hashes[place][byte] ^= 1
    wrong = replace(message, block_hashes=tuple(map(bytes, hashes)))
    world.to_nodes.append((PREFILL, wrong))
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed" if place else "missed": 1}
    pulled = world.q.scheduler.statistics().counters.num_pulled_tokens
    assert pulled == place * BLOCK_SIZE, "the blocks before it alone"


@pytest.mark.covers("F135")
@pytest.mark.parametrize("change", ["fingerprint", "fewer hashes", "within a block"])
def test_a_pull_that_does_not_fit_is_refused_at_once(change: str) -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    message = world.step_until_asked()
    world.lose(message)
    wrong = {
        "fingerprint": replace(message, ticket=replace(message.ticket, fingerprint="other")),
        "fewer hashes": replace(message, block_hashes=message.block_hashes[1:]),
        "within a block": replace(message, ticket=replace(message.ticket, num_cached_tokens=1)),
    }[change]
    world.to_nodes.append((PREFILL, wrong))
    world.settle()
    assert not world.p.connector.transfers
    assert_finished(world, asked)  # no time has passed
    assert world.q.pulls() == {"failed": 1}


def test_a_salt_is_in_the_hashes() -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2, cache_salt="another tenant")
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed": 1}
    assert world.q.num_computed() == len(asked.request.prompt_token_ids)


def test_a_node_is_not_told_to_pull_from_itself() -> None:
    world = Three()
    world.the_first()
    world.router.source = PrefixSource(OTHER, 20)
    assert_finished(world, world.the_next(1))
    assert world.q.pulls() == {}


@pytest.mark.parametrize("source", [Incarnation("p", 7), Incarnation("nobody", 1)])
def test_a_source_that_the_router_does_not_know_is_not_waited_for(source: Incarnation) -> None:
    """It has started again under its name, or was never there."""
    world = Three()
    world.the_first()
    world.router.source = PrefixSource(source, 20)
    assert_finished(world, world.the_next(1))  # no time has passed
    assert world.q.pulls() == {"failed": 1}
    assert_finished(world, world.the_next(1, 2, name="again"))
    assert world.q.pulls() == {"failed": 1}, "what was computed is cached"


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(0, 9, everyday(3, of=1)))
def test_a_source_whose_loss_the_router_notices_is_not_waited_for(
    num_steps: int, is_one_sided: bool
) -> None:
    world = Three()
    world.network.is_one_sided = is_one_sided
    world.the_first()
    asked = world.the_next(1, 2)
    world.step_until_asked()
    for _ in range(num_steps):
        world.step(frames=False)
    world.kill(world.p, is_noticed=False)
    world.notice(PREFILL)
    world.settle()
    for token in list(world.q.connector.quarantined):
        world.q.connector.fence(token)
    assert_finished(world, asked)  # no time has passed
    assert world.q.pulls() == {"failed": 1}


def test_a_source_that_does_not_reach_the_other_node_says_so_at_once() -> None:
    """A firewall lets KV through one way only, and the source knows by now."""
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    world.step_until(lambda: bool(world.p.connector.transfers), frames=False)
    world.p.connector.on_peer_lost(OTHER)
    assert_finished(world, asked)  # no time has passed
    assert world.q.pulls() == {"failed": 1}


def test_a_refusal_that_comes_late_or_twice_changes_nothing() -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1)
    token = world.step_until_asked().ticket.lease_token
    assert_finished(world, asked)
    world.to_nodes += 2 * [(OTHER, PullRefused(token))]
    assert_finished(world, world.the_next(1, 2, name="after"))
    assert world.q.pulls() == {"landed": 1}


@pytest.mark.parametrize("num_steps", range(0, 9, everyday(3, of=1)))
def test_a_refusal_at_any_moment_leaves_nothing(num_steps: int) -> None:
    """Also while what has landed is copied to where steps read it."""
    world = Three()
    world.q.runner.num_copy_polls = 3
    world.the_first()
    asked = world.the_next(1, 2)
    token = world.step_until_asked().ticket.lease_token
    for _ in range(num_steps):
        world.step(frames=num_steps % 2 == 0)
    world.to_nodes.append((OTHER, PullRefused(token)))
    world.settle()
    world.advance(30.0)
    assert_finished(world, asked)


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 9, everyday(3, of=1)))
def test_a_source_that_dies_costs_nothing_but_time(num_steps: int, is_one_sided: bool) -> None:
    world = Three()
    world.network.is_one_sided = is_one_sided
    world.the_first()
    asked = world.the_next(1, 2)
    for _ in range(num_steps):
        world.step(frames=False)
    for frame in world.network.frames[: num_steps // 2]:
        world.network.deliver(frame)
    world.kill(world.p, is_noticed=False)
    world.settle()
    world.advance(6.0)
    for connector in world.network.connectors.values():
        connector.on_peer_lost(PREFILL)
    for token in list(world.q.connector.quarantined):
        world.q.connector.fence(token)
    assert_finished(world, asked)


@pytest.mark.parametrize("num_steps", range(1, 9, everyday(3, of=1)))
def test_a_source_that_stops_says_so(num_steps: int) -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    for _ in range(num_steps):
        world.step(frames=False)
    world.stop(world.p)
    check_idle(world.p.scheduler)
    world.kill(world.p, is_noticed=False)
    for connector in world.network.connectors.values():
        connector.on_peer_lost(PREFILL)
    world.settle()
    world.advance(6.0)
    assert_finished(world, asked)


@pytest.mark.parametrize("num_steps", range(1, 9, everyday(3, of=1)))
def test_a_source_that_drains_sends_before_it_leaves(num_steps: int) -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    for _ in range(num_steps):
        world.step(frames=False)
    world.p.inbox.put(Drain(100.0))
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    world.p.turn()
    assert world.p.num_drained == 1


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int, is_one_sided: bool) -> None:
    world = Three()
    world.network.is_one_sided = is_one_sided
    world.the_first()
    asked = world.the_next(1, 2)
    for _ in range(num_steps):
        world.step(frames=num_steps % 2 == 0)
    world.router.abort(asked)
    world.settle()
    world.advance(30.0)
    world.settle()
    world.check_closed()
    assert_finished(world, world.the_next(1, 2, name="after"))
    assert not {"failed", "avoided"} & world.q.pulls().keys(), "its source is not blamed"


def test_prompts_with_the_same_start_wait_for_one_pull() -> None:
    world = Three()
    world.the_first()
    asked = [world.the_next(number, name=f"n{number}") for number in range(3)]
    assert_finished(world, *asked)
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == 3 * (len(SHARED) + 1 - HELD.num_tokens)


def test_a_pull_goes_on_while_one_prompt_waits_for_it() -> None:
    world = Three()
    world.the_first()
    asked = [world.the_next(number, name=f"n{number}") for number in range(3)]
    world.step_until(lambda: bool(world.p.connector.transfers), frames=False)
    for gone in asked[:2]:
        world.router.abort(gone)
    world.step(frames=False)
    assert world.q.connector.landings
    assert_finished(world, asked[2])
    assert world.q.pulls() == {"landed": 1}


def test_a_pull_for_nobody_is_refused() -> None:
    world = Three()
    world.the_first()
    asked = [world.the_next(number, name=f"n{number}") for number in range(3)]
    world.step_until(lambda: bool(world.p.connector.transfers), frames=False)
    for gone in asked:
        world.router.abort(gone)
    world.step(frames=False)
    assert not [t for t in world.q.connector.landings if t in world.q.flow.pulls]
    world.settle()
    world.check_closed()


def test_a_prompt_that_lacks_much_more_pulls_for_itself() -> None:
    world = Three()
    long = make_prompt(24, 9)
    assert_finished(world, world.ask((*SHARED[:20], *long), max_tokens=2, name="long"))
    world.the_first()
    short = world.the_next(1, name="short")
    world.router.source = PrefixSource(PREFILL, 44)
    whole = world.ask((*SHARED[:20], *long, 1, 2), max_tokens=2, name="whole")
    assert_finished(world, short, whole)
    assert world.q.pulls() == {"landed": 2}


@pytest.mark.parametrize(("who", "outcome"), [("p", "missed"), ("q", "failed")])
def test_a_copy_that_fails_costs_the_pull(who: str, outcome: str) -> None:
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    world.step_until_asked()
    node: Node = getattr(world, who)
    node.runner.fail_next_copy = True
    world.step_until(lambda: not node.runner.fail_next_copy)
    world.settle()
    world.advance(30.0)
    assert_finished(world, asked)
    assert world.q.pulls() == {outcome: 1}


def test_blocks_are_kept_until_their_copy_has_ended() -> None:
    """The pull is over for `q` before `p` has copied what it sends."""
    world = Three()
    world.the_first()
    world.p.runner.num_copy_polls = 9
    asked = world.the_next(1, 2)
    world.step_until(lambda: bool(world.p.connector.transfers), frames=False)
    world.router.abort(asked)
    world.messages_arrive()
    world.q.turn()
    world.network.deliver_all()
    assert not world.p.connector.transfers
    assert world.p.runner.copies, "the copy is under way"
    world.p.turn()
    assert len(world.p.scheduler.prefix_transfers) == 1
    world.settle()
    world.check_closed()


def test_an_attempt_that_is_over_waits_for_no_pull() -> None:
    """Its decode node gave the handoff up while the prompt waited."""
    world = Three()
    world.the_first()
    asked = world.the_next(1, 2)
    world.step_until(lambda: bool(world.q.connector.landings), frames=False)
    world.to_nodes.append((world.d.me, AbortAttempt(ROUTER, (asked.request.id,))))
    world.settle()
    world.advance(30.0)
    world.settle()
    for node in world.nodes.values():
        check_idle(node.scheduler)
        assert len(node.flow.attempts) == 0
        assert not node.connector.landings
