"""A node that is silent, hangs or is not reached: what is placed on it, and when it is trusted."""

from __future__ import annotations

import asyncio

import pytest

from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from protos import pdserve_node_pb2 as pb
from router.cluster.view import DispatcherView
from router.core.generation import TokenChunk
from router.dispatch.client.calls_beside import CallsBeside
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.liveness.pace import USUAL
from tests.integration.fake_node import FakeNode
from tests.integration.scripted_cluster import Cluster, asked, ids, start, tick, tokens, wait_until
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.observing.live_readings import scaling


def suspected(router: Dispatcher) -> list[str]:
    return [str(node.incarnation) for node in router.pool.nodes() if node.is_suspected]


async def cut_off(cluster: Cluster, router: Dispatcher, node: FakeNode) -> None:
    """The node is heard until it is suspected, and nothing that was sent reaches it any more."""
    tick(router, node, USUAL.echo_every)
    await wait_until(lambda: node.echo > 0, "the node has a number")
    await cluster.beat(node)
    node.repeats_numbers = False
    for _ in range(USUAL.echo_every + USUAL.unreached):
        tick(router, node, 1)
        await cluster.beat(node)
    assert suspected(router) == [str(node.incarnation)]


async def reach_again(cluster: Cluster, router: Dispatcher, node: FakeNode) -> None:
    """It repeats the latest number."""
    node.repeats_numbers = True
    tick(router, node, USUAL.echo_every)
    client = router.pool.client(node.incarnation)
    assert client is not None
    await wait_until(lambda: node.echo == client.liveness.latest, "the node has the number")
    await cluster.beat(node)


async def test_a_silent_node_is_given_nothing_new_until_it_is_heard(cluster: Cluster) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    d1 = await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    tick(router, d0, USUAL.suspicion)
    assert suspected(router) == ["d0#1"]
    count = "pdserve_router_nodes_suspected_total"
    assert cluster.registry.get_sample_value(count) == 1
    assert DispatcherView(router, scaling).is_ready()
    answers = [start(router) for _ in range(4)]
    await asked(d1, 4)
    assert d0.asked == []
    await cluster.beat(d0)
    assert suspected(router) == []
    for answer in answers:
        answer.cancel()


async def test_the_only_node_is_chosen_although_it_is_suspected(cluster: Cluster) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    tick(router, d0, USUAL.suspicion)
    assert suspected(router) == ["d0#1"]
    assert DispatcherView(router, scaling).is_ready()
    answer = start(router)
    await asked(d0)
    answer.cancel()


async def test_a_node_whose_step_hangs_is_given_nothing_new_until_the_step_ends(
    cluster: Cluster,
) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    d1 = await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    d0.stuck_ms = 3250
    await cluster.beat(d0)
    assert suspected(router) == ["d0#1"]
    answers = [start(router) for _ in range(4)]
    await asked(d1, 4)
    assert d0.asked == []
    await cluster.beat(d0)
    d0.stuck_ms = 0
    await cluster.beat(d0)
    assert suspected(router) == []
    count = "pdserve_router_nodes_suspected_total"
    assert cluster.registry.get_sample_value(count) == 1, "counted once"
    for answer in answers:
        answer.cancel()


@pytest.mark.covers("F121")
async def test_a_node_that_is_heard_and_not_reached_gets_nothing_new_until_it_is(
    cluster: Cluster,
) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    d1 = await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    await cut_off(cluster, router, d0)
    answers = [start(router) for _ in range(4)]
    await asked(d1, 4)
    assert d0.asked == []
    await cluster.beat(d0)
    assert suspected(router) == ["d0#1"], "a heartbeat does not show that it is reached"
    await reach_again(cluster, router, d0)
    assert suspected(router) == []
    for answer in answers:
        answer.cancel()


async def held_up_by(node: FakeNode, router: Dispatcher) -> asyncio.Task[list[TokenChunk]]:
    """Start a request that the node is asked for, and never replies to."""

    async def never(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
        await asyncio.Event().wait()
        raise AssertionError

    node.on_reserve = never
    answer = start(router)
    await asked(node)
    return answer


@pytest.mark.covers("F121")
async def test_a_request_that_only_a_suspected_node_took_is_asked_where_another_one_comes(
    cluster: Cluster,
) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    await cut_off(cluster, router, d0)
    answer = await held_up_by(d0, router)
    d1 = await cluster.add("d1", Role.DECODE)
    await cluster.refresh()
    request = await asked(d1)
    d1.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_told", [True, False])
async def test_a_request_that_only_a_suspected_node_took_is_asked_where_another_one_decodes(
    cluster: Cluster, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    p0 = await cluster.add("p0", Role.PREFILL)
    router = await cluster.router()
    await cut_off(cluster, router, d0)
    answer = await held_up_by(d0, router)

    async def take_role(_beside: CallsBeside, role: Role, _number: int, _others: object) -> Role:
        p0.role = role
        return Role.PREFILL

    monkeypatch.setattr(CallsBeside, "set_role", take_role)
    if is_told:
        await router.pool.set_role(p0.incarnation, Role.MIXED)
    else:
        p0.role = Role.MIXED
        await p0.renew()
        await cluster.refresh()
    request = await asked(p0)
    p0.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


@pytest.mark.covers("F121")
async def test_an_answer_goes_on_where_it_is_heard_and_elsewhere_when_it_is_not(
    cluster: Cluster,
) -> None:
    d0 = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d0)
    d0.push(tokens(request.id, 0, 10, is_started=True))
    d1 = await cluster.add("d1", Role.DECODE)
    await cluster.refresh()
    await wait_until(lambda: len(router.pool.nodes()) == 2, "both heard")
    await cut_off(cluster, router, d0)
    assert d1.asked == []
    tick(router, d0, USUAL.suspicion)
    await asked(d1)
    count = "pdserve_router_nodes_suspected_total"
    assert cluster.registry.get_sample_value(count) == 1, "one suspicion, which grew"
    answer.cancel()
