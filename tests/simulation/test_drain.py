"""Nodes that leave: at every point of a request's life, and in random orders.

Two prefill and two decode nodes under a router that decides as the real one does. Whatever the
moment, nobody's answer is lost or changed, and the node ends with every block free or cached.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from common.errors import Draining
from common.ids import Incarnation
from node.flow.messages import CallRefused, Drain, StartedLocally
from tests.simulation.drained_cluster import OTHER_DECODE, OTHER_PREFILL, Cluster
from tests.simulation.flow_router import Client
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import (
    DECODE,
    PREFILL,
    World,
    ask_until_committed,
    assert_finished,
    right_answer,
)
from tests.support.engine.build import make_request
from tests.support.engine.choices import FREE_METHODS, METHODS
from tests.support.engine.tool_grammars import GRAMMARS
from tests.support.examples import everyday

PREFILLERS = (PREFILL, OTHER_PREFILL)
LONG_S = 1000.0


def asked(world: Cluster) -> list[Client]:
    """Handoffs and local prompts of several lengths."""
    lengths = (9, 3, 17, 5)
    return [
        world.ask(length, name=f"c{i}", seed=i, max_tokens=12, ignore_eos=True)  # type: ignore[misc]
        for i, length in enumerate(lengths)
    ]


def steps_of_a_life() -> int:
    world, num_steps = Cluster(), 0
    clients = asked(world)
    while not all(client.outcomes for client in clients):
        world.step()
        num_steps += 1
    return num_steps


NUM_STEPS = steps_of_a_life()
POINTS = range(0, NUM_STEPS + 1, everyday(13, of=1))
"""At which steps of a life a node leaves."""


@pytest.mark.parametrize("timeout_s", [0.0, LONG_S])
@pytest.mark.parametrize("name", [DECODE, OTHER_DECODE, PREFILL])
def test_a_node_may_leave_at_every_point_of_a_request_s_life(
    name: Incarnation, timeout_s: float
) -> None:
    num_continued = num_prefilled = 0
    for num_steps in POINTS:
        for is_between_frames in (False, True):
            world = Cluster()
            clients = asked(world)
            for _ in range(num_steps):
                world.step()
            world.step(frames=is_between_frames)
            world.drain(world.nodes[name], timeout_s)
            world.end(*clients)
            assert [node.me for node in world.gone] == [name]
            num_continued += sum(known > 0 for client in clients for _, known in client.asked)
            num_prefilled += sum(
                known > 0
                for client in clients
                for node, known in client.asked
                if node in PREFILLERS
            )
    has_to_hand_over = timeout_s == 0.0 and name == DECODE
    assert (num_prefilled > 0) == has_to_hand_over, "long ones are handed over like prompts"
    assert (num_continued > 0) == has_to_hand_over, num_continued


def test_all_first_nodes_may_leave_at_once() -> None:
    for num_steps in POINTS:
        world = Cluster()
        clients = asked(world)
        for _ in range(num_steps):
            world.step()
        for node in (world.d, world.p):
            world.drain(node, 0.0)
        world.end(*clients)
        assert len(world.gone) == 2


def test_what_is_new_goes_to_the_next_node_and_what_runs_stays() -> None:
    world = Cluster()
    (first, *_) = clients = asked(world)
    world.step_until(lambda: len(first.tokens) > 2)
    world.drain(world.d, LONG_S)
    late = world.ask(9, name="late", max_tokens=5)
    world.end(*clients, late)  # type: ignore[arg-type]
    assert [node for node, _ in late.asked] == [DECODE, OTHER_DECODE, PREFILL]  # type: ignore[attr-defined]
    assert {node for node, _ in first.asked} == {DECODE, PREFILL}, "it was not moved"


def test_a_reservation_made_before_still_takes_its_landing() -> None:
    world = World()
    one = ask_until_committed(world)
    world.d.inbox.put(Drain(LONG_S))
    world.d.turn()
    assert world.d.num_drained == 0, "a landing is open"
    assert_finished(world, one)
    assert world.d.num_drained == 1


@pytest.mark.covers("F115")
def test_a_prefill_node_waits_for_the_last_acknowledgement() -> None:
    world = World()
    one = ask_until_committed(world)
    world.p.inbox.put(Drain(0.0))
    world.settle(frames=False)
    assert world.p.num_drained == 0, "its blocks are on the wire"
    assert_finished(world, one)
    assert world.p.num_drained == 1


def test_blocks_in_quarantine_are_waited_for() -> None:
    world = World()
    world.network.is_one_sided = True
    one = ask_until_committed(world)
    world.network.deliver(world.network.frames[0])
    world.network.frames = []
    world.d.inbox.put(Drain(0.0))
    for _ in range(5):
        world.d.turn()
    assert len(world.d.flow.attempts) == 0
    assert world.d.connector.quarantined, "its sender may still write"
    assert world.d.num_drained == 0
    world.d.connector.fence(101)
    world.d.turn()
    assert world.d.num_drained == 1
    world.messages_arrive()
    assert one.outcomes == ["failed: draining"]


@pytest.mark.covers("F116")
def test_an_idle_node_has_drained_at_once_and_says_so_once() -> None:
    world = World()
    world.d.inbox.put(Drain(LONG_S))
    world.d.inbox.put(Drain(LONG_S))
    world.d.turn()
    assert world.d.num_drained == 1
    world.settle()
    assert world.d.num_drained == 1
    assert world.d.flow.snapshot().load.is_draining


def test_the_first_time_out_counts() -> None:
    world = World(threshold=None)
    world.ask(5, max_tokens=50, ignore_eos=True)
    world.step_until(lambda: world.d.num_steps > 2)
    world.d.inbox.put(Drain(5.0))
    world.d.inbox.put(Drain(0.0))
    world.d.turn()
    assert len(world.d.flow.attempts) == 1
    world.advance(5.0)
    world.d.turn()
    assert len(world.d.flow.attempts) == 0


def test_reservations_that_wait_for_room_are_sent_elsewhere_at_once() -> None:
    world = World(decode=NodeSize(seats=1))
    world.ask(9, max_tokens=8, ignore_eos=True)
    waiting = world.ask(9, name="waits", may_wait=True)
    world.step()
    world.step()
    world.d.inbox.put(Drain(LONG_S))
    world.step()
    world.messages_arrive()
    assert waiting.outcomes == ["refused: draining"]
    world.settle()
    world.check_closed()
    assert world.d.num_drained == 1


@pytest.mark.covers("F02")
def test_a_repeated_question_is_answered_as_before() -> None:
    # The first answer may have been lost on its way.
    world = World(threshold=None)
    one = world.ask(5, max_tokens=30, ignore_eos=True)
    world.step_until(lambda: world.d.num_steps > 2)
    world.d.inbox.put(Drain(LONG_S))
    world.router.send_reserve(one)
    world.messages_arrive()
    world.d.turn()
    answers = [answer for said in world.to_router for _, answer in said.answers]
    assert answers == [StartedLocally(0)]
    new = world.ask(5, name="new")
    world.messages_arrive()
    world.d.turn()
    answers = [answer for said in world.to_router for _, answer in said.answers]
    assert isinstance(answers[0], CallRefused)
    assert isinstance(answers[0].error, Draining)
    world.settle()
    assert new.outcomes == ["refused: draining"]
    assert one.outcomes == ["finished"]


@pytest.mark.parametrize("num_known", [1, 3, 4, 7, 11])
@pytest.mark.parametrize("method", FREE_METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("threshold", [None, 0])
def test_an_answer_goes_on_behind_what_another_node_gave(
    num_known: int, method: str, temperature: float, threshold: int | None
) -> None:
    size = NodeSize(budget=7, method=method, num_drafts=2)
    world = World(threshold=threshold, decode=size, prefill=size)
    whole = make_request(9, max_tokens=12, ignore_eos=True, temperature=temperature)
    known = tuple(right_answer(whole)[:num_known])
    rest = world.ask(
        9, max_tokens=12, ignore_eos=True, temperature=temperature, output_token_ids=known
    )
    world.settle()
    assert rest.outcomes == []
    has_handoff = threshold == 0 and num_known < 11
    assert rest.is_local is not has_handoff, "the last token needs no handoff"
    assert [rest.tokens[i] for i in range(num_known, 12)] == right_answer(whole)[num_known:]
    assert min(rest.tokens) == num_known, "nothing is said twice"


def test_all_blocks_of_a_continued_answer_stay_until_nobody_can_write_them() -> None:
    """Those behind the prompt too: a sender writes them as well."""
    world = World()
    world.network.is_one_sided = True
    known = tuple(right_answer(make_request(9, max_tokens=40, ignore_eos=True))[:11])
    one = world.ask(9, max_tokens=40, ignore_eos=True, output_token_ids=known)
    world.step_until(lambda: 11 in one.tokens, frames=False)
    (landing,) = world.d.connector.landings.values()
    assert len(landing.ticket.target_block_ids) == 5, "20 tokens"
    world.network.deliver(world.network.frames[0])
    world.router.abort(one)
    world.messages_arrive()
    world.d.turn()  # checks that none of these blocks is free
    assert world.d.connector.quarantined


def test_answers_that_nobody_can_continue_are_refused() -> None:
    world = World(decode=NodeSize(max_model_len=16))
    too_long = world.ask(9, max_tokens=40, output_token_ids=tuple(range(1, 8)), name="long")
    unknown = world.ask(9, max_tokens=40, output_token_ids=(10_000,), name="unknown")
    at_prefill = world.ask(9, max_tokens=1, name="prefill")
    world.settle()
    assert too_long.outcomes == unknown.outcomes == ["refused: invalid_request"]
    assert at_prefill.outcomes == ["finished"]
    assert "prompt and its answer so far have 16 tokens" in str(too_long.error)
    assert "token id 10000" in str(unknown.error)


NUM_RUNS = everyday(10, of=150)


def test_nodes_may_leave_in_any_order_of_events() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        size = NodeSize(
            budget=rng.randint(5, 20),
            num_blocks=rng.randint(12, 24),
            seats=rng.randint(2, 4),
            method=rng.choice(METHODS),
            num_drafts=2,
        )
        world = Cluster(threshold=rng.choice([0, 6, None]), size=size)
        clients: list[Any] = []
        leaving = [world.d] + ([world.p] if PREFILL in world.nodes else [])
        for number in range(150):
            if len(clients) < 6 and rng.random() < 0.2:
                clients.append(
                    world.ask(
                        rng.randint(1, 16),
                        name=f"c{len(clients)}",
                        seed=rng.randint(0, 3),
                        max_tokens=rng.randint(1, 14),
                        grammar=(None, *GRAMMARS)[len(clients) % (1 + len(GRAMMARS))],
                        deadline_s=500.0,
                    )
                )
            if leaving and number > 20 and rng.random() < 0.03:
                node = leaving.pop(rng.randrange(len(leaving)))
                world.drain(node, rng.choice([0.0, 0.3, LONG_S]))
            _random_event(world, rng)
            world.end_drained()
        for node in leaving:
            world.drain(node, 0.0)
        try:
            world.end(*clients)
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
        happened["gone"] += len(world.gone)
        happened["continued"] += sum(k > 0 for client in clients for _, k in client.asked)
    assert happened["gone"] > NUM_RUNS
    assert happened["continued"] > NUM_RUNS // 4, happened


def _random_event(world: Cluster, rng: random.Random) -> None:
    match rng.choice(["turn", "turn", "message", "said", "frame", "frame", "time"]):
        case "turn":
            world.turn(rng.choice(list(world.nodes.values())))
        case "message" if world.to_nodes:
            world.to_the_node(*world.to_nodes.pop(0))
        case "said" if world.to_router:
            world.to_the_router(world.to_router.pop(0))
        case "frame" if world.network.frames:
            world.network.deliver(world.network.frames[0])
        case "time":
            world.advance(0.05)
