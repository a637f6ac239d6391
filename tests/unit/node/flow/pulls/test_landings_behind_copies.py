"""Where steps copy in host memory, a pull's landing opens behind the copies that it waits for."""

from __future__ import annotations

from itertools import count

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import Role
from common.settings.config import Config
from engine.core.kept_prefixes import MOST_AT_ONCE
from engine.core.step.step_in_flight import PlannedStep
from node.flow.messages import Effect, OpenLanding, Submit
from node.flow.node_flow import NodeFlow
from node.flow.pulls.pull_cost import PullCost
from simulator.node import flow_of
from tests.support.engine.build import Engine, make_prompt, make_request
from tests.support.engine.hash_runner import VOCAB_SIZE
from tests.support.engine.keeping import fill_and_release, keeping, rest

NUM_BLOCKS = 200
NUM_PULLED = 120


def full() -> tuple[Engine, NodeFlow]:
    """A pool that prompts have used twice and filled, and a flow where computing takes long."""
    engine = keeping(2 * NUM_BLOCKS, num_blocks=NUM_BLOCKS, budget=1000)
    for family in range(1, 21):
        for _ in range(2):
            fill_and_release(engine, 10, family)
            rest(engine)
    flow = flow_of(
        Config(role=Role.PREFILL),
        engine.runner,
        engine.scheduler,
        Incarnation("p", 1),
        vocab_size=VOCAB_SIZE,
        new_lease_token=count(1).__next__,
        pull_cost=PullCost(1.0, float),
    )
    return engine, flow


def wish(num_blocks: int) -> Submit:
    source = PrefixSource(Incarnation("q", 1), 4 * num_blocks)
    request = make_request(make_prompt(4 * num_blocks + 1, 99), max_tokens=1)
    return Submit(
        request=request,
        router=Incarnation("r", 1),
        reply_to=1,
        received_at_s=0.0,
        is_prompt=True,
        source=source,
    )


def opened(effects: list[Effect]) -> list[OpenLanding]:
    return [one for one in effects if isinstance(one, OpenLanding)]


def begin_step(flow: NodeFlow) -> tuple[PlannedStep, list[Effect]]:
    step, effects = flow.begin_step(0.0)
    flow.scheduler.check()
    return step, effects


def test_a_landing_opens_with_the_step_that_makes_the_last_of_its_copies() -> None:
    _, flow = full()
    before = flow.scheduler.prefix_transfers.latest(2 * NUM_BLOCKS)
    assert not opened(flow.on_message(wish(NUM_PULLED), 0.0))
    copied: list[int] = []
    while True:
        step, effects = begin_step(flow)
        in_step = [block for copy in step.swap_outs for block in copy.block_ids]
        assert 0 < len(in_step) <= MOST_AT_ONCE, "or it would not be asked for again"
        copied += in_step
        if found := opened(effects):
            break
    (landing,) = found
    assert len(landing.ticket.target_block_ids) == NUM_PULLED
    assert len(set(copied).intersection(landing.ticket.target_block_ids)) > MOST_AT_ONCE
    assert all(map(flow.scheduler.prefix_transfers.has, before))
    assert not flow.pulls.wait_for_room


def test_a_pull_that_evicts_nothing_that_is_to_be_kept_begins_at_once() -> None:
    _, flow = full()
    assert opened(flow.on_message(wish(1), 0.0))
    assert not flow.pulls.wait_for_room
