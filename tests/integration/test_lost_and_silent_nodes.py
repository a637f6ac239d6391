"""The dispatcher when nodes fall silent, when all streams end at once, and under a burst."""

from __future__ import annotations

import asyncio

import pytest

from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from protos import pdserve_node_pb2 as pb
from router.core.attempts import State
from router.dispatch.dispatcher import Dispatcher
from tests.integration.fake_node import FakeNode
from tests.integration.scripted_cluster import (
    DEADLINE_S,
    GREEDY,
    PROMPT,
    Cluster,
    asked,
    ids,
    no_placements,
    start,
    tokens,
    wait_until,
)
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.http.read_answer import read


async def test_a_burst_is_spread_before_the_first_reservation_is_granted(cluster: Cluster) -> None:
    prefillers = [await cluster.add(name, Role.PREFILL) for name in ("p0", "p1")]
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router(policy="least_loaded")
    go_on = asyncio.Event()
    grant = d.on_reserve

    async def reserve(request: GenerationRequest, is_local: bool) -> pb.Reply:
        await go_on.wait()
        return await grant(request, is_local)

    d.on_reserve = reserve
    answers = [start(router) for _ in range(6)]
    await asked(d, 6)
    go_on.set()
    for p in prefillers:
        await asked(p, 3)
        for request in p.asked:
            p.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert [ids(answer) for answer in await asyncio.gather(*answers)] == [[10]] * 6
    assert [len(p.asked) for p in prefillers] == [3, 3]
    assert [view.num_requests for view in router.pool.nodes()] == [0, 0, 0]


async def test_a_router_whose_streams_all_end_at_once_continues_every_answer(
    cluster: Cluster,
) -> None:
    """As after a time in which it stood still: each node cut it off, and is heard again."""
    nodes = [await cluster.add(f"d{number}", Role.DECODE) for number in range(4)]
    router = await cluster.router()
    answers = [start(router) for _ in range(8)]
    await wait_until(lambda: sum(len(d.asked) for d in nodes) == 8, "all asked")
    for d in nodes:
        for request in d.asked:
            d.push(tokens(request.id, 0, 10, is_started=True))
        d.asked.clear()
    await wait_until(lambda: all(flow.has_first_token for flow in router.flows()), "token 0")
    for d in nodes:
        d.end_streams()
    answers.append(start(router))
    while not all(answer.done() for answer in answers):
        for d in nodes:
            for request in d.asked:
                num_known = len(request.output_token_ids)
                rest = (10, 11, 12)[num_known:]
                d.push(tokens(request.id, num_known, *rest, finish_reason=FinishReason.STOP))
            d.asked.clear()
        await asyncio.sleep(0.002)
    assert [ids(answer.result()) for answer in answers] == [[10, 11, 12]] * 9


async def test_a_new_request_waits_for_a_node_that_is_about_to_be_heard(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    d.end_streams()
    await wait_until(lambda: not router.pool.nodes(), "d0 is lost")
    answer = start(router)
    request = await asked(d)
    d.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


async def granted(cluster: Cluster, router: Dispatcher) -> tuple[FakeNode, FakeNode]:
    """The node that took the only request, and the other one.

    A heartbeat behind a suspicion would end a second attempt while its node is being asked: there
    are none here, and a node's messages come in order.
    """
    await wait_until(
        lambda: [flow.state for flow in router.flows()] == [State.LOCAL], "the grant is read"
    )
    first, second = sorted(cluster.nodes, key=lambda node: not node.asked)
    return first, second


async def test_a_silent_node_s_answer_goes_on_elsewhere_before_it_is_lost(
    cluster: Cluster,
) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    first, second = await granted(cluster, router)
    request = await asked(first)
    first.push(tokens(request.id, 0, 10, is_started=True))
    await reading
    router.pool.on_suspected(first.incarnation, "a test", is_heard=False)
    again = await asked(second)
    assert (again.id.attempt, again.output_token_ids) == (2, (10,))
    second.push(tokens(again.id, 1, 11, is_started=True))
    assert [chunk.token_ids for chunk in await anext(stream)] == [(11,)]
    await wait_until(lambda: first.aborted == [request.id], "the silent one is told")
    first.push(tokens(request.id, 1, 11, 12))
    second.push(tokens(again.id, 2, 12, finish_reason=FinishReason.STOP))
    assert [chunk.token_ids for chunk in await anext(stream)] == [(12,)]
    await no_placements(cluster)


@pytest.mark.covers("F138")
async def test_an_answer_goes_on_at_a_node_that_computes_as_the_lost_one_did(
    cluster: Cluster,
) -> None:
    """In the middle of a rollout the first idle node has other weights or settings."""
    old = await cluster.add("d0", Role.DECODE)
    router = await cluster.router(policy="least_loaded")
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(old)
    old.push(tokens(request.id, 0, 10, is_started=True))
    await reading
    new = await cluster.add("d1", Role.DECODE, fingerprint="new")
    alike = await cluster.add("d2", Role.DECODE)
    await cluster.refresh()
    await wait_until(lambda: len(router.pool.nodes()) == 3, "all nodes heard")
    await old.stop()
    again = await asked(alike)
    assert again.output_token_ids == (10,)
    await alike.stop()
    assert (await asked(new)).output_token_ids == (10,), "rather than not at all"
    await stream.aclose()


async def test_a_silent_node_that_is_heard_first_keeps_its_answer(cluster: Cluster) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    first, second = await granted(cluster, router)
    request = await asked(first)
    router.pool.on_suspected(first.incarnation, "a test", is_heard=False)
    again = await asked(second)
    first.push(tokens(request.id, 0, 10, is_started=True))
    # Once or twice: a grant that the router reads behind the first token is aborted again.
    await wait_until(lambda: again.id in second.aborted, "the second attempt is aborted")
    first.push(tokens(request.id, 1, 11, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10, 11]
    await no_placements(cluster)
