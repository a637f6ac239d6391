"""The dispatcher against scripted nodes on real gRPC connections, and a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from jsonschema import Draft202012Validator

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
)
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import FinishReason, GenerationRequest, RequestCounts, SamplingParams
from common.version import PROTOCOL_VERSION, VERSION
from pdserve.local_cluster.free_ports import free_loopback_port
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_proto
from router.cluster.admin_calls import UnknownNode
from router.cluster.role import give_role
from router.cluster.shapes import ClusterAnswer
from router.cluster.view import DispatcherView
from router.core.attempts import State
from router.core.generation import TokenChunk
from router.dispatch.dispatcher import Dispatcher
from router.http.described import schema_of
from router.watch.choice_trace import ChoiceTrace
from tests.integration.fake_node import IDLE, record_of
from tests.integration.scripted_cluster import (
    DEADLINE_S,
    GREEDY,
    PROMPT,
    Cluster,
    asked,
    ids,
    no_placements,
    placement_written,
    start,
    tokens,
    wait_until,
)
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.http.read_answer import QueueSink, read
from tests.support.observing.live_readings import scaling


def queued_tokens(router: Dispatcher) -> list[float]:
    """Return the prompt tokens that count on each node, ordered by id."""
    return [view.num_queued_tokens for view in router.pool.nodes()]


async def test_prefill_then_decode(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    tickets: list[pb.Ticket | None] = []

    async def accept(_request: GenerationRequest, ticket: pb.Ticket | None) -> pb.Reply:
        tickets.append(ticket)
        return pb.Reply(accepted=pb.Accepted())

    p.on_prefill = accept
    answer = start(router)
    request = await asked(p)
    assert d.asked[0].id == request.id
    assert request.prompt_token_ids == PROMPT
    assert 0 < request.deadline_s <= DEADLINE_S
    (ticket,) = tickets
    assert ticket is not None
    assert ticket.lease_token == 7
    assert queued_tokens(router) == [0, len(PROMPT)]
    (placed,) = router.recent_placements
    assert (placed.decode, placed.prefill) == (d.incarnation, p.incarnation)
    assert placed.reason
    d.push(tokens(request.id, 1, 11, 12, is_started=True))
    p.push(tokens(request.id, 0, 10))
    d.push(tokens(request.id, 3, 13, finish_reason=FinishReason.STOP))
    chunks = await answer
    assert ids(chunks) == [10, 11, 12, 13]
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[0].counts == RequestCounts(16)
    await no_placements(cluster)
    assert (p.aborted, d.aborted) == ([], [])
    assert queued_tokens(router) == [0, 0]


async def test_a_decode_node_alone_prefills_locally(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    wishes: list[bool] = []

    async def reserve(_request: GenerationRequest, is_local: bool) -> pb.Reply:
        wishes.append(is_local)
        return pb.Reply(local=pb.LocalStart(num_cached_tokens=3))

    d.on_reserve = reserve
    answer = start(router)
    request = await asked(d)
    assert queued_tokens(router) == [len(PROMPT)]
    d.push(tokens(request.id, 0, 10, is_started=True))
    await wait_until(lambda: queued_tokens(router) == [0], "prompt computed")
    d.push(tokens(request.id, 1, 11, finish_reason=FinishReason.LENGTH))
    assert ids(await answer) == [10, 11]
    assert wishes == [True]


async def test_one_token_needs_the_prefill_node_alone(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router, SamplingParams(max_tokens=1))
    request = await asked(p)
    p.push(tokens(request.id, 0, 10, finish_reason=FinishReason.LENGTH))
    assert ids(await answer) == [10]
    assert d.asked == []


@pytest.mark.covers("F39")
async def test_a_first_token_that_ends_the_answer_releases_the_reservation(
    cluster: Cluster,
) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(p)
    p.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]
    await wait_until(lambda: d.aborted == [request.id], "reservation aborted")


@pytest.mark.covers("F05")
async def test_a_refusal_leads_to_the_next_node(cluster: Cluster) -> None:
    first = await cluster.add("d0", Role.DECODE)
    second = await cluster.add("d1", Role.DECODE)
    router = await cluster.router()

    async def refuse(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
        full = Overloaded("no seat", retry_after_s=2.5)
        return pb.Reply(refusal=refusal_to_proto(full))

    first.on_reserve = refuse
    answer = start(router)
    request = await asked(second)
    second.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]
    assert len(first.asked) == 1

    second.on_reserve = refuse
    with pytest.raises(Overloaded) as full:
        await start(router)
    assert full.value.retry_after_s == 2.5


async def test_nobody_is_there(cluster: Cluster) -> None:
    router = await cluster.router()
    missing = "no decode or mixed node is heard, the placement store lists none"
    with pytest.raises(Overloaded, match=f"^{missing}$"):
        await start(router)
    view = DispatcherView(router, scaling)
    assert not view.is_ready()
    assert view.why_not_ready() == view.describe()["router"]["not_ready"] == missing


@pytest.mark.covers("F84")
async def test_a_lost_prefill_node_is_replaced_before_the_first_token(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    first = await asked(p)
    await p.die()
    second = await asked(d, 2)
    assert second.id == AttemptId(first.id.choice_id, 2)
    await wait_until(lambda: d.aborted == [first.id], "the first reservation aborted")
    d.push(tokens(first.id, 0, 99, is_started=True))  # of the fenced attempt
    d.push(tokens(second.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


@pytest.mark.parametrize("has_other", [False, True])
async def test_a_lost_decode_node_s_answer_goes_on_at_the_next_one(
    cluster: Cluster, has_other: bool
) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE, port=free_loopback_port())
    other = await cluster.add("d1", Role.DECODE) if has_other else None
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(p)
    p.push(tokens(request.id, 0, 10))
    assert [chunk.token_ids for chunk in await reading] == [(10,)]
    await d.die()
    if other is None:  # the answer waits for the next life of its node
        cluster.nodes.remove(d)
        other = await cluster.add("d0", Role.DECODE, epoch=2, port=d.port)
        await cluster.refresh()
    second = await asked(other)
    assert (second.id.attempt, second.output_token_ids) == (2, (10,))
    other.push(tokens(second.id, 1, 11, 12, finish_reason=FinishReason.STOP))
    rest = [chunk async for chunks in stream for chunk in chunks]
    assert [(chunk.first_index, chunk.token_ids) for chunk in rest] == [(1, (11, 12))]
    await wait_until(lambda: p.aborted == [request.id], "prefill aborted")
    await no_placements(cluster)


async def test_a_node_of_an_earlier_release_keeps_its_role(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    with pytest.raises(InvalidRequest, match="d0#1 is of an earlier version"):
        await give_role(router.pool, "d0", Role.PREFILL)
    assert [node.record.role for node in router.pool.nodes()] == [Role.DECODE] * 2
    with pytest.raises(UnknownNode):
        await give_role(router.pool, "d2", Role.MIXED)
    await d.die()
    with pytest.raises(NodeLost):
        await give_role(router.pool, "d0", Role.PREFILL)


async def test_the_prefill_node_may_die_once_decode_has_started(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(p)
    p.push(tokens(request.id, 0, 10))
    await reading
    d.push(tokens(request.id, 1, 11, is_started=True))
    assert [chunk.token_ids for chunk in await anext(stream)] == [(11,)]
    await p.die()
    await wait_until(lambda: len(router.pool.nodes()) == 1, "p0 noticed")
    d.push(tokens(request.id, 2, 12, finish_reason=FinishReason.STOP))
    assert [chunk.token_ids for chunk in await anext(stream)] == [(12,)]
    assert d.aborted == []


@pytest.mark.covers("F58")
async def test_a_client_that_goes_away_aborts_both_legs(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(p)
    p.push(tokens(request.id, 0, 10))
    await reading
    running = "pdserve_router_choices_in_progress"
    assert cluster.registry.get_sample_value(running) == 1
    await stream.aclose()
    await wait_until(lambda: d.aborted == [request.id] == p.aborted, "both legs aborted")
    assert router.num_running == 0 == cluster.registry.get_sample_value(running)
    ends = ("pdserve_router_choices_total", {"outcome": "abort"})
    assert cluster.registry.get_sample_value(*ends) == 1
    await no_placements(cluster)


@pytest.mark.covers("F12")
async def test_a_client_that_goes_away_while_a_reserve_is_under_way(cluster: Cluster) -> None:
    """The grant that comes too late is given back."""
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    go_on = asyncio.Event()

    async def reserve(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
        await go_on.wait()
        return pb.Reply(local=pb.LocalStart())

    d.on_reserve = reserve
    answer = start(router)
    request = await asked(d)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await wait_until(lambda: d.aborted == [request.id], "aborted once")
    go_on.set()
    await wait_until(lambda: d.aborted == [request.id] * 2, "aborted again after the grant")


@pytest.mark.covers("F97")
async def test_many_aborts_travel_together(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answers = [start(router) for _ in range(50)]
    await asked(d, 50)
    # A grant that the router reads behind the abort of its request would be one more message.
    await wait_until(
        lambda: all(flow.state is State.LOCAL for flow in router.flows()), "all grants are read"
    )
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    await wait_until(lambda: len(set(d.aborted)) == 50, "all aborted")
    assert d.num_messages < 25


@pytest.mark.covers("F89")
async def test_the_deadline_ends_a_request_that_nobody_answers(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=0.2)
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    # Once or twice: a grant that comes behind the deadline is aborted again.
    await wait_until(lambda: bool(d.aborted), "aborted")


async def test_an_error_from_a_node_keeps_its_type(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    for code, kind in (("invalid_request", InvalidRequest), ("what_is_this", InternalError)):
        answer = start(router)
        request = await asked(d, len(d.asked) + 1)
        d.push(
            tokens(
                request.id,
                0,
                finish_reason=FinishReason.ERROR,
                error_code=code,
                error_message="top_k",
            )
        )
        with pytest.raises(kind, match="top_k"):
            await answer


async def test_a_prompt_that_no_node_can_hold(cluster: Cluster) -> None:
    await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    with pytest.raises(InvalidRequest, match="max_model_len = 1024"):
        await anext(read(router, tuple(range(1100)), GREEDY, deadline_s=DEADLINE_S))
    with pytest.raises(InvalidRequest, match="empty"):
        await anext(read(router, (), GREEDY, deadline_s=DEADLINE_S))


@pytest.mark.covers("F63")
async def test_a_node_in_a_new_life_is_never_called_by_its_old_name(cluster: Cluster) -> None:
    """The same address, another epoch; the record in the store is the old one."""
    d = await cluster.add("d0", Role.DECODE, epoch=5)
    stale = record_of(Incarnation("d0", 4), Role.DECODE, f"127.0.0.1:{d.port}")
    await cluster.store.leave(d.incarnation)
    await cluster.store.heartbeat(stale, IDLE, lease_s=600)
    other = await cluster.add("d1", Role.DECODE)
    cluster.nodes.remove(d)
    router = await cluster.router()
    assert [node.incarnation for node in router.pool.nodes()] == [other.incarnation]
    await cluster.store.heartbeat(
        record_of(d.incarnation, d.role, f"127.0.0.1:{d.port}"), IDLE, lease_s=600
    )
    await cluster.refresh()
    await wait_until(lambda: len(router.pool.nodes()) == 2, "the new life joined")
    assert d.asked == []
    cluster.nodes.append(d)


@pytest.mark.covers("F63")
async def test_a_restarted_node_serves_again_on_the_same_port(cluster: Cluster) -> None:
    first = await cluster.add("d0", Role.DECODE, epoch=1, port=free_loopback_port())
    router = await cluster.router()
    answer = start(router)
    await asked(first)
    await first.die()
    cluster.nodes.remove(first)
    second = await cluster.add("d0", Role.DECODE, epoch=2, port=first.port)
    await cluster.refresh()
    request = await asked(second)
    assert request.id.attempt == 2
    second.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


async def test_two_routers_side_by_side(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    routers = [await cluster.router("r0"), await cluster.router("r1")]
    answers = [start(router) for router in routers for _ in range(4)]
    await asked(d, 8)
    for request in d.asked:
        # Both routers hear everything here; each takes its own.
        token = hash(request.id) % 1000
        d.push(tokens(request.id, 0, token, finish_reason=FinishReason.STOP))
    chunks = await asyncio.gather(*answers)
    results = sorted(ids(answer)[0] for answer in chunks)
    assert results == sorted(hash(request.id) % 1000 for request in d.asked)
    await no_placements(cluster)


@pytest.mark.covers("F72")
async def test_an_emptied_redis_disturbs_no_answer(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d)
    async with cluster.redis() as client:
        await client.flushall()
    d.push(tokens(request.id, 0, 10))
    d.push(tokens(request.id, 1, 11, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10, 11]


async def test_closing_a_router_ends_its_requests_and_leaves_nothing(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d)
    await placement_written(cluster)
    await router.close()
    with pytest.raises(Overloaded, match="shutting down"):
        await answer
    assert set(d.aborted) == {request.id}
    await cluster.store.leave(d.incarnation)
    async with cluster.redis() as client:
        assert [key for key in await client.keys("*") if b":epoch:" not in key] == []
    with pytest.raises(Overloaded, match="shutting down"):
        await start(router)


async def test_closing_waits_until_the_nodes_know(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d)
    await wait_until(lambda: len(router.recent_placements) == 1, "placed")
    await router.close()
    assert d.aborted == [request.id]
    with pytest.raises(Overloaded):
        await answer


async def test_the_cluster_described(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.add("p0", Role.PREFILL)
    router = await cluster.router()
    view = DispatcherView(router, scaling)
    assert view.is_ready()
    assert view.why_not_ready() == ""
    answer = start(router)
    request = await asked(d)
    await wait_until(lambda: len(router.recent_placements) == 1, "placed")
    description = view.describe()
    schema = schema_of(ClusterAnswer)
    schema["required"].remove("serving")
    Draft202012Validator(schema).validate(json.loads(json.dumps(description)))
    assert description["placement_store"] == "ok"
    assert description["router"]["router_id"] == "router-0"
    assert (description["router"]["version"], description["router"]["protocol"]) == (
        VERSION,
        PROTOCOL_VERSION,
    )
    assert all({"version", "protocol"} <= node.keys() for node in description["nodes"])
    assert [(n["node_id"], n["role"], n["num_requests"]) for n in description["nodes"]] == [
        ("d0", "decode", 1),
        ("p0", "prefill", 1),
    ]
    (placed,) = description["recent_placements"]
    assert placed["choice_id"] == request.id.choice_id
    assert (placed["decode"], placed["prefill"]) == ("d0#1", "p0#1")
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert [n["num_requests"] for n in view.describe()["nodes"]] == [0, 0]


async def test_chunks_that_came_together_are_pushed_together(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(d)
    d.push(tokens(request.id, 0, 10, is_started=True), tokens(request.id, 1, 11))
    assert [chunk.first_index for chunk in await reading] == [0, 1]
    end = tokens(request.id, 4, 14, finish_reason=FinishReason.STOP)
    d.push(tokens(request.id, 2, 12), tokens(request.id, 3, 13), end)
    assert [chunk.first_index for chunk in await anext(stream)] == [2, 3, 4]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_chunks_that_came_before_a_failure_are_pushed_before_it(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    stream = read(router, PROMPT, GREEDY, deadline_s=DEADLINE_S)
    reading = asyncio.create_task(anext(stream))
    request = await asked(d)
    failed = tokens(request.id, 1, finish_reason=FinishReason.ERROR, error_code="internal_error")
    d.push(tokens(request.id, 0, 10, is_started=True), failed)
    assert [chunk.first_index for chunk in await reading] == [0]
    with pytest.raises(InternalError):
        await anext(stream)


async def test_nothing_is_pushed_behind_an_abort(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    sink = QueueSink()
    abort = router.generate(PROMPT, GREEDY, sink, deadline_s=DEADLINE_S)
    request = await asked(d)
    d.push(tokens(request.id, 0, 10, is_started=True))
    await sink.next()
    other = start(router)
    neighbour = await asked(d, 2)
    abort()
    abort()
    end = tokens(neighbour.id, 0, 20, is_started=True, finish_reason=FinishReason.STOP)
    d.push(tokens(request.id, 1, 11), end)
    assert ids(await other) == [20]
    assert sink.is_empty
    await wait_until(lambda: d.aborted == [request.id], "the node was told once")


async def test_a_failure_is_pushed_also_when_its_trace_cannot_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(ChoiceTrace, "on_end", broken)
    router = await cluster.router()
    sink = QueueSink()
    router.generate(PROMPT, GREEDY, sink, deadline_s=DEADLINE_S)
    await wait_until(lambda: not sink.is_empty, "no node came")
    with pytest.raises(Overloaded):
        await sink.next()
    assert router.num_running == 0


async def test_what_came_together_is_sent_when_all_of_it_was_pushed(cluster: Cluster) -> None:
    """Writes that follow each other wake a client once; one between two pushes, each time."""
    calls: list[str] = []

    class Noted(QueueSink):
        def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
            calls.append("push")
            super().on_chunks(chunks)

        def send_now(self) -> None:
            calls.append("send")

    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    sinks = [Noted(), Noted()]
    for sink in sinks:
        router.generate(PROMPT, GREEDY, sink, deadline_s=DEADLINE_S)
    one, other = await asked(d), await asked(d, 2)
    d.push(tokens(one.id, 0, 10, is_started=True), tokens(other.id, 0, 20, is_started=True))
    assert [(await sink.next())[0].token_ids for sink in sinks] == [(10,), (20,)]
    d.push(tokens(one.id, 1, 11), tokens(other.id, 1, 21))
    assert [(await sink.next())[0].token_ids for sink in sinks] == [(11,), (21,)]
    assert calls == ["push", "push", "send", "send"] * 2


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
async def test_a_sink_that_raises_ends_its_own_answer_alone(
    cluster: Cluster, finish: FinishReason | None
) -> None:
    class Broken(QueueSink):
        def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
            if chunks[0].first_index:
                raise KeyError("bug")
            super().on_chunks(chunks)

    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    sink = Broken()
    router.generate(PROMPT, GREEDY, sink, deadline_s=DEADLINE_S)
    request = await asked(d)
    other = start(router)
    neighbour = await asked(d, 2)
    d.push(tokens(request.id, 0, 10, is_started=True))
    await sink.next()
    last = tokens(request.id, 1, 11, finish_reason=finish)
    d.push(last, tokens(neighbour.id, 0, 20, is_started=True))
    async with asyncio.timeout(30):
        with pytest.raises(InternalError, match="an internal error ended"):
            await sink.next()
    if finish is None:
        await wait_until(lambda: d.aborted == [request.id], "the node was told")
    d.push(tokens(neighbour.id, 1, 21, finish_reason=FinishReason.STOP))
    assert ids(await other) == [20, 21]
    assert router.num_running == 0
