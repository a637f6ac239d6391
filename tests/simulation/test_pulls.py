"""A prefill node pulls what the decode node has cached: the same tokens, and nothing is left."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from kv_transfer.contract import Commit
from node.flow.messages import AbortAttempt, Drain, SendBlocks
from node.flow.pulls.pull_cost import MOST_PAUSES, Pauses, PullCost
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, assert_finished
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday
from tests.support.nodes.timed_pulls import on_pulled

NEVER = 1_000_000


def world_that_pulls(**given: object) -> World:
    world = World(**given)  # type: ignore[arg-type]
    world.router.may_pull = True
    return world


def first_turn(world: World, max_tokens: int = 16) -> tuple[int, ...]:
    """An answered request; returns the prompt of the next turn, which the decode node knows."""
    asked = world.ask(9, max_tokens=max_tokens, name="first")
    assert_finished(world, asked)
    return (*asked.request.prompt_token_ids, *asked.answer(), *make_prompt(3, 5))


def next_turn(world: World, prompt: tuple[int, ...], **given: object) -> Asked:
    return world.ask(prompt, max_tokens=6, name="next", **given)


def test_a_prefill_node_computes_only_what_is_new() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    before = world.p.num_computed()
    asked = next_turn(world, prompt)
    world.settle()
    (ended,) = world.p.flow.attempts.take_ended()
    assert_finished(world, asked)
    assert world.p.pulls() == {"landed": 1}
    assert (ended.num_pulled_tokens, ended.sequence.num_cached_tokens) == (16, 24)
    num_cached = (9 + 16 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert world.p.num_computed() - before == len(prompt) - num_cached
    # The first prompt's whole blocks were computed here.
    assert world.p.scheduler.statistics().counters.num_pulled_tokens == num_cached - 8


def test_without_leave_nothing_is_pulled() -> None:
    world = World()
    prompt = first_turn(world)
    before = world.p.num_computed()
    assert_finished(world, next_turn(world, prompt))
    assert world.p.pulls() == {}
    assert world.p.num_computed() - before == len(prompt) - 8


def test_what_is_cached_here_is_not_pulled() -> None:
    world = world_that_pulls()
    prompt = first_turn(world, max_tokens=2)
    assert_finished(world, next_turn(world, prompt))
    assert world.p.pulls() == {}


def test_a_pull_that_costs_more_than_computing_is_declined_and_tried_again_later() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    world.token_s = 0.0
    assert_finished(world, next_turn(world, prompt))
    assert world.p.pulls() == {"declined": 1}


@pytest.mark.parametrize(("num_before", "outcome"), [(5, "declined"), (30, "landed")])
def test_a_prompt_that_would_wait_here_is_pulled_meanwhile(num_before: int, outcome: str) -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    world.token_s = world.pull_cost.expected_s(16) / 40
    before = world.ask(num_before, max_tokens=4, seed=3, name="before")
    assert_finished(world, before, next_turn(world, prompt))
    assert world.p.pulls() == {outcome: 1}


def test_no_room_is_no_reason_to_wait() -> None:
    world = world_that_pulls(prefill=NodeSize(num_blocks=8, max_model_len=32))
    prompt = first_turn(world)
    sent = world.ask(20, max_tokens=4, seed=3, name="being sent")
    world.step_until(lambda: 0 in sent.tokens, frames=False)
    asked = next_turn(world, prompt)
    for _ in range(4):
        world.step(frames=False)
    assert world.p.pulls() == {"no_room": 1}
    assert_finished(world, sent, asked)


def test_a_source_that_never_sends_is_waited_for_a_moment() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: any(isinstance(m, SendBlocks) for _, m in world.to_nodes))
    world.to_nodes = [(to, m) for to, m in world.to_nodes if not isinstance(m, SendBlocks)]
    world.settle()
    assert not asked.tokens
    assert len(world.p.scheduler.prefix_transfers) == 1
    world.advance(6.0)
    assert_finished(world, asked)
    assert world.p.pulls() == {"failed": 1}


def test_a_source_that_gives_up_is_not_waited_for_and_is_asked_again() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: bool(world.d.connector.transfers), frames=False)
    [token] = world.d.connector.transfers
    world.d.connector.abort(token)
    assert_finished(world, asked)
    assert world.p.pulls() == {"missed": 1}
    again = world.ask((*prompt, *asked.answer(), 5, 6, 7), max_tokens=6, name="third")
    assert_finished(world, again)
    assert world.p.pulls() == {"missed": 1, "landed": 1}


def test_a_commit_for_other_tokens_is_not_believed() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(
        lambda: any(f.kind == "commit" and f.receiver == PREFILL for f in world.network.frames),
        frames=False,
    )
    for frame in world.network.frames:
        if frame.kind == "commit" and frame.receiver == PREFILL:
            frame.commit = Commit(num_tokens=4, first_token_id=0)
    assert_finished(world, asked)
    assert world.p.pulls() == {"failed": 1}


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int, is_one_sided: bool) -> None:
    world = world_that_pulls()
    world.network.is_one_sided = is_one_sided
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    for _ in range(num_steps):
        world.step()
    world.router.abort(asked)
    for node in (PREFILL, DECODE):
        world.to_nodes.append((node, AbortAttempt(ROUTER, (asked.request.id,))))
    world.settle()
    world.advance(30.0)
    world.settle()
    world.check_closed()
    assert_finished(world, world.ask(prompt, max_tokens=6, name="after"))


@pytest.mark.parametrize("is_late", [False, True])
def test_blocks_that_a_sender_may_still_write_stay_quarantined(is_late: bool) -> None:
    world = world_that_pulls()
    world.network.is_one_sided = True
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(
        lambda: any(f.kind == "open" and f.receiver == PREFILL for f in world.network.frames),
        frames=False,
    )
    world.network.deliver_all()
    [landing] = world.p.connector.landings.values() or [None]
    if landing is None:
        pytest.fail("the pull landed before it could be given up")
    world.p.connector.lose_sender(DECODE)
    world.p.turn()
    counts = world.p.scheduler.pool.counts()
    assert counts.quarantined == len(landing.ticket.target_block_ids)
    if is_late:
        world.settle()
    for token in list(world.p.connector.quarantined):
        world.p.connector.fence(token)
    assert_finished(world, asked)
    assert world.p.pulls() == {"failed": 1}


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_copy_that_fails_costs_the_pull(who: str) -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    node = world.p if who == "p" else world.d
    node.runner.fail_next_copy = True
    world.step_until(lambda: not node.runner.fail_next_copy)
    world.settle()
    world.advance(30.0)
    assert_finished(world, asked)
    assert world.p.pulls() == {"failed" if who == "p" else "missed": 1}


def test_a_drained_source_sends_before_it_leaves() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: bool(world.d.connector.transfers), frames=False)
    world.d.inbox.put(Drain(100.0))
    world.d.turn()
    assert world.d.num_drained == 0
    assert_finished(world, asked)
    world.d.turn()
    assert world.d.num_drained == 1
    assert world.p.pulls() == {"landed": 1}


def test_a_source_whose_attempt_is_over_leaves_when_nobody_reads_its_blocks() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: bool(world.d.connector.transfers), frames=False)
    world.router.abort(asked)
    world.to_the_node(DECODE, AbortAttempt(ROUTER, (asked.request.id,)))
    world.d.inbox.put(Drain(100.0))
    for _ in range(3):
        world.step(frames=False)
    assert len(world.d.flow.attempts) == 0
    assert world.d.num_drained == 0, "its blocks are read"
    world.to_the_node(PREFILL, AbortAttempt(ROUTER, (asked.request.id,)))
    world.settle()
    world.d.turn()
    assert world.d.num_drained == 1


def test_the_landing_of_an_aborted_prompt_is_closed_at_once() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: bool(world.p.connector.landings), frames=False)
    world.router.abort(asked)
    world.to_the_node(PREFILL, AbortAttempt(ROUTER, (asked.request.id,)))
    world.p.turn()
    assert not world.p.connector.landings
    world.p.turn()
    assert len(world.p.scheduler.prefix_transfers) == 0


@pytest.mark.parametrize("is_one_sided", [False, True])
def test_a_node_that_is_asked_again_changes_nothing(is_one_sided: bool) -> None:
    world = world_that_pulls()
    world.network.is_one_sided = is_one_sided
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: any(isinstance(m, SendBlocks) for _, m in world.to_nodes))
    [message] = [m for _, m in world.to_nodes if isinstance(m, SendBlocks)]
    world.d.inbox.put(message)
    world.step_until(lambda: bool(asked.tokens))
    assert world.p.pulls() == {"landed": 1}
    cached = world.p.runner.kv_bytes[:, :, list(message.ticket.target_block_ids)].copy()
    world.d.inbox.put(message)  # its landing is over, and its blocks may be another's
    world.step_until(lambda: bool(world.d.connector.transfers), frames=False)
    assert_finished(world, asked)
    now = world.p.runner.kv_bytes[:, :, list(message.ticket.target_block_ids)]
    assert (now == cached).all()
    assert world.p.pulls() == {"landed": 1}


def test_costs_are_corrected_by_what_pulls_take() -> None:
    cost = PullCost(1000.0, lambda num_tokens: num_tokens / 1000)
    assert cost.is_worth(1000)
    for _ in range(40):
        on_pulled(cost, 1000, 10.0)
    assert 1.28 <= cost.expected_s(1000) <= 1.41, "bounded: 64 times as slow"
    assert not cost.is_worth(1000)
    declined = 1
    while not cost.is_worth(1000):
        declined += 1
    assert declined < 20, "a pull is tried again"
    on_pulled(cost, 1000, 0.001)
    assert cost.expected_s(1000) < 0.003


def test_one_quick_pull_shows_that_a_link_is_quick() -> None:
    """An H100 computes an 8B model's tokens ten times as fast as the guess would bring their KV."""
    cost = PullCost(147_456.0, lambda num_tokens: num_tokens / 25_000)
    assert not cost.is_worth(10_000), "more than it takes to compute them, as is guessed"
    on_pulled(cost, 512, 0.003)
    assert cost.is_worth(10_000)
    assert cost.expected_s(10_000) == pytest.approx(0.003 * 10_000 / 512, rel=0.1)


def test_long_pulls_tell_the_bytes_and_short_ones_what_a_source_takes_to_answer() -> None:
    """A source that computes answers when its step has ended: that says nothing about the link."""
    cost = PullCost(100_000.0, float)
    for num_tokens in (500, 20_000) * 40:
        on_pulled(cost, num_tokens, 0.2 + num_tokens * 2e-6)
    for num_tokens in (500, 20_000, 100_000):
        wanted_s = 0.2 + num_tokens * 2e-6
        assert wanted_s / 2 < cost.expected_s(num_tokens) < 2 * wanted_s


def test_one_slow_pull_doubles_what_is_expected_at_most() -> None:
    cost = PullCost(100_000.0, float)
    on_pulled(cost, 1000, 0.01)
    before_s = cost.expected_s(1000)
    on_pulled(cost, 1000, 60.0)
    assert before_s < cost.expected_s(1000) <= 2 * before_s


def test_what_waits_here_counts_because_a_pull_goes_on_beside_it() -> None:
    cost = PullCost(1e6, lambda num_tokens: num_tokens / 10_000)
    assert not cost.is_worth(1000)
    cost = PullCost(1e6, lambda num_tokens: num_tokens / 10_000)
    assert cost.is_worth(1000, 20_000)


def test_a_guess_is_tried_soon() -> None:
    """Else it would say for ever that no pull pays."""
    cost = PullCost(147_456.0, lambda num_tokens: num_tokens / 25_000)
    declined = 0
    while not cost.is_worth(10_000):
        declined += 1
    assert declined <= 3


def test_until_a_pull_has_ended_handoffs_show_how_quick_a_link_is() -> None:
    cost = PullCost(1e6, lambda num_tokens: num_tokens / 10_000)  # 1 GB for 1,000 tokens
    guessed_s = cost.expected_s(1000)
    cost.on_sent(1000, 60.0)  # it waited for its prompt
    cost.on_sent(0, 0.001)
    assert cost.expected_s(1000) == guessed_s
    assert not cost.is_worth(1000)
    cost.on_sent(1000, 0.02)
    assert cost.is_worth(1000)
    on_pulled(cost, 1000, 3.0)
    pulled_s = cost.expected_s(1000)
    cost.on_sent(1000, 0.002)
    assert cost.expected_s(1000) == pulled_s


def test_a_node_that_did_not_send_is_not_asked_for_longer_and_longer() -> None:
    pauses = Pauses()
    now_s = 100.0
    assert not pauses.is_on(DECODE, now_s)
    for pause_s in (30, 60, 120, 120):
        pauses.on_failed(DECODE, now_s)
        assert pauses.is_on(DECODE, now_s + pause_s - 0.1)
        assert not pauses.is_on(PREFILL, now_s)
        now_s += pause_s
        assert not pauses.is_on(DECODE, now_s)
    pauses.on_landed(DECODE)
    pauses.on_failed(DECODE, now_s)
    assert not pauses.is_on(DECODE, now_s + 30.0)
    for epoch in range(MOST_PAUSES):
        pauses.on_failed(Incarnation("other", epoch), now_s)
    assert not pauses.is_on(DECODE, now_s), "the oldest one is forgotten"


def test_what_failed_to_come_is_computed_at_once_the_next_time() -> None:
    world = world_that_pulls()
    prompt = first_turn(world)
    asked = next_turn(world, prompt)
    world.step_until(lambda: any(isinstance(m, SendBlocks) for _, m in world.to_nodes))
    world.to_nodes = [(to, m) for to, m in world.to_nodes if not isinstance(m, SendBlocks)]
    world.settle()
    world.advance(6.0)
    assert_finished(world, asked)
    again = world.ask((*prompt, *asked.answer(), 5, 6, 7), max_tokens=6, name="third")
    assert_finished(world, again)
    assert world.p.pulls() == {"failed": 1, "avoided": 1}
    world.advance(31.0)
    last = world.ask((*again.request.prompt_token_ids, *again.answer(), 8), max_tokens=2)
    assert_finished(world, last)
    assert world.p.pulls() == {"failed": 1, "avoided": 1, "landed": 1}
