"""The gRPC service over a real server: who is refused, what is answered, what ends a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import Overloaded
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import FinishReason
from kv_transfer.connector import Ticket
from node import control_service, output_streams
from node.control_service import MAX_ABORTS_PER_CALL
from node.messages import (
    Abort,
    Accepted,
    Refused,
    Reserved,
    RouterGone,
    StartedLocally,
    StatusQuery,
    Submit,
)
from node.tickets import ticket_from_proto
from protos import pdserve_node_pb2 as pb
from tests.unit.node.control_server import (
    END,
    GOOD,
    RECEIVED_AT_S,
    REQUEST,
    ROUTER,
    STATUS,
    TICKET,
    Service,
    prefill,
    reserve,
    spoiled,
)

Start = Callable[[Role], Any]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 0.01)
    services: list[Service] = []

    async def begin(role: Role) -> Service:
        service = Service(role)
        await service.server.start()
        services.append(service)
        return service

    yield begin
    for service in services:
        service.streams.stop()
        await service.channel.close(None)
        await service.server.stop(None)


# --- envelopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (spoiled(receiver_epoch=2), "the message is for node#2, this is node#3"),
        (spoiled(receiver_epoch=4), "the message is for node#4, this is node#3"),
        (spoiled(receiver_id="another"), "the message is for another#3"),
        (spoiled(protocol_version=2), "protocol version is 2: wanted 1"),
        (spoiled(protocol_version=0), "protocol version is 0: wanted 1"),
        (spoiled(sender_id=""), "sender_id has 0 characters"),
        (pb.Envelope(), "protocol version is 0"),
    ],
)
@pytest.mark.parametrize("call", ["Stream", "Reserve", "Prefill", "Abort", "Status"])
async def test_every_call_refuses_an_envelope_that_is_not_for_this_life_and_protocol(
    start: Start, call: str, envelope: pb.Envelope, words: str
) -> None:
    service = await start(Role.PREFILL if call == "Prefill" else Role.DECODE)
    messages = {
        "Stream": pb.StreamRequest(envelope=envelope),
        "Reserve": reserve(envelope),
        "Prefill": prefill(envelope),
        "Abort": pb.AbortRequest(envelope=envelope),
        "Status": pb.StatusRequest(envelope=envelope),
    }
    begun = getattr(service.stub, call)(messages[call])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (begun.read() if call == "Stream" else begun)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert words in str(caught.value.details())
    assert service.inbox.seen == []


# --- requests -------------------------------------------------------------------------------------


async def test_a_reservation_comes_back_as_its_ticket(start: Start) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    service.inbox.answer_with = Reserved(TICKET)
    reply = await service.stub.Reserve(reserve(GOOD, must_prefill_locally=True, may_wait=True))
    assert reply.WhichOneof("outcome") == "ticket"
    assert ticket_from_proto(reply.ticket, REQUEST.id) == TICKET
    (submit,) = service.inbox.seen
    assert submit == Submit(
        request=REQUEST,
        router=ROUTER,
        reply_to=submit.reply_to,
        received_at_s=RECEIVED_AT_S,
        must_prefill_locally=True,
        may_wait=True,
    )


async def test_a_local_start_says_what_was_cached(start: Start) -> None:
    service = await start(Role.MIXED)
    await service.subscribe()
    service.inbox.answer_with = StartedLocally(128)
    reply = await service.stub.Reserve(reserve(GOOD))
    assert reply.local.num_cached_tokens == 128
    assert reply.WhichOneof("outcome") == "local"


async def test_a_refusal_says_why_when_to_come_back_and_what_room_there_is(start: Start) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    service.inbox.answer_with = Refused(Overloaded("full", retry_after_s=2.5), 7, 1)
    refusal = (await service.stub.Reserve(reserve(GOOD))).refusal
    assert (refusal.code, refusal.message, refusal.retry_after_ms) == ("overloaded", "full", 2500)
    assert (refusal.free_blocks, refusal.free_seats) == (7, 1)


async def test_s58_refusals_are_counted_by_reason_whoever_refuses(start: Start) -> None:
    service = await start(Role.DECODE)
    # The service by itself, then the step thread, twice.
    await service.stub.Reserve(reserve(GOOD))
    await service.subscribe()
    service.inbox.answer_with = Refused(Overloaded("full"))
    await service.stub.Reserve(reserve(GOOD))
    await service.stub.Reserve(reserve(GOOD))
    service.inbox.answer_with = StartedLocally(0)
    await service.stub.Reserve(reserve(GOOD))
    assert service.service.refusals == {
        "deadline_exceeded": 0,
        "draining": 0,
        "invalid_request": 0,
        "layout_mismatch": 0,
        "node_lost": 1,
        "overloaded": 2,
    }


@pytest.mark.parametrize("ticket", [TICKET, None])
async def test_a_prompt_is_taken_with_or_without_a_ticket(
    start: Start, ticket: Ticket | None
) -> None:
    service = await start(Role.PREFILL)
    await service.subscribe()
    service.inbox.answer_with = Accepted()
    reply = await service.stub.Prefill(prefill(GOOD, ticket))
    assert not reply.HasField("refusal")
    (submit,) = service.inbox.seen
    assert submit.ticket == ticket


async def test_a_prompt_can_be_refused(start: Start) -> None:
    service = await start(Role.PREFILL)
    await service.subscribe()
    service.inbox.answer_with = Refused(Overloaded("full"))
    assert (await service.stub.Prefill(prefill(GOOD))).refusal.code == "overloaded"


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_router_that_does_not_listen_is_refused(start: Start, role: Role) -> None:
    service = await start(role)
    await service.subscribe(Incarnation(ROUTER.node_id, 2))
    if role is Role.PREFILL:
        refusal = (await service.stub.Prefill(prefill(GOOD))).refusal
    else:
        refusal = (await service.stub.Reserve(reserve(GOOD))).refusal
    assert refusal.code == "node_lost"
    assert "router router#1 has no open token stream" in refusal.message
    assert service.inbox.seen == []


async def test_each_role_takes_its_own_calls_only(start: Start) -> None:
    for role, call in (
        (Role.PREFILL, "Reserve"),
        (Role.DECODE, "Prefill"),
        (Role.MIXED, "Prefill"),
    ):
        service = await start(role)
        message = reserve(GOOD) if call == "Reserve" else prefill(GOOD)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(service.stub, call)(message)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_malformed_request_is_refused_by_field(start: Start) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    empty = reserve(GOOD)
    del empty.request.prompt_token_ids[:]
    hot = reserve(GOOD)
    hot.request.sampling.temperature = -1.0
    for message, words in ((empty, "prompt is empty"), (hot, "temperature is -1.0")):
        refusal = (await service.stub.Reserve(message)).refusal
        assert refusal.code == "invalid_request"
        assert words in refusal.message
    assert service.inbox.seen == []


async def test_a_malformed_ticket_is_refused(start: Start) -> None:
    service = await start(Role.PREFILL)
    await service.subscribe()
    message = prefill(GOOD)
    message.ticket.lease_token = 0
    refusal = (await service.stub.Prefill(message)).refusal
    assert (refusal.code, "no lease" in refusal.message) == ("invalid_request", True)


async def test_a_full_inbox_is_an_overloaded_refusal(start: Start) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    for reply_to in range(1000, 1003):
        service.inbox.put(StatusQuery(reply_to))
    assert (await service.stub.Reserve(reserve(GOOD))).refusal.code == "overloaded"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Status(pb.StatusRequest(envelope=GOOD))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_waits_no_longer_than_its_request_and_a_late_answer_finds_nobody(
    start: Start,
) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    short = replace(REQUEST, deadline_s=0.001)
    assert (await service.stub.Reserve(reserve(GOOD, short))).refusal.code == "deadline_exceeded"
    (submit,) = service.inbox.seen
    assert isinstance(submit, Submit)
    service.replies.resolve(submit.reply_to, Reserved(TICKET))
    await asyncio.sleep(0)
    assert service.replies._futures == {}


async def test_a_call_that_is_given_up_leaves_nothing(start: Start) -> None:
    service = await start(Role.DECODE)
    await service.subscribe()
    call = service.stub.Reserve(reserve(GOOD))
    await service.inbox.has_seen.wait()
    assert len(service.replies._futures) == 1
    call.cancel()
    await service.replies.forgotten.wait()
    assert service.replies._futures == {}


# --- aborts ---------------------------------------------------------------------------------------


async def test_an_abort_names_router_and_attempts(start: Start) -> None:
    service = await start(Role.DECODE)
    attempts = [pb.AbortRequest.Attempt(request_id=name, attempt=2) for name in ("a", "b")]
    await service.stub.Abort(pb.AbortRequest(envelope=GOOD, attempts=attempts))
    assert service.inbox.seen == [Abort(ROUTER, (AttemptId("a", 2), AttemptId("b", 2)))]


@pytest.mark.parametrize(
    "attempts",
    [
        [pb.AbortRequest.Attempt(request_id="", attempt=1)],
        [pb.AbortRequest.Attempt(request_id="a", attempt=0)],
        [pb.AbortRequest.Attempt(request_id="a", attempt=1)] * (MAX_ABORTS_PER_CALL + 1),
    ],
)
async def test_a_malformed_abort_is_an_error(start: Start, attempts: list[Any]) -> None:
    service = await start(Role.DECODE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Abort(pb.AbortRequest(envelope=GOOD, attempts=attempts))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert service.inbox.seen == []


# --- status ---------------------------------------------------------------------------------------


async def test_the_status_is_the_nodes_books(start: Start) -> None:
    service = await start(Role.MIXED)
    service.inbox.answer_with = STATUS
    reply = await service.stub.Status(pb.StatusRequest(envelope=GOOD))
    assert (reply.node_id, reply.epoch, reply.role) == ("node", 3, "mixed")
    blocks = reply.blocks
    assert (blocks.free, blocks.cached, blocks.running) == (1, 2, 3)
    assert (blocks.reserved, blocks.receiving, blocks.quarantined) == (4, 5, 6)
    assert reply.num_blocks == 21
    assert (reply.num_running, reply.num_waiting) == (6, 7)
    assert (reply.num_transfers, reply.num_steps, reply.num_preemptions) == (9, 10, 11)
    assert (reply.num_recomputed_tokens, reply.new_token_ratio) == (12, 0.25)
    assert (reply.num_accepted, reply.num_drafted) == (13, 14)


async def test_a_step_loop_that_does_not_answer_is_a_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_service, "STATUS_TIMEOUT_S", 0.0)
    service = await start(Role.DECODE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Status(pb.StatusRequest(envelope=GOOD))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.replies._futures == {}


# --- streams --------------------------------------------------------------------------------------


async def test_outputs_reach_their_router(start: Start) -> None:
    service = await start(Role.DECODE)
    call = await service.subscribe()
    service.say(1, finish_reason=FinishReason.LENGTH)
    output = await service.next_output(call)
    assert (output.id, output.first_index, output.token_ids) == (REQUEST.id, 1, (41,))
    assert output.finish_reason is FinishReason.LENGTH


async def test_a_stream_that_ends_makes_its_router_gone_once(start: Start) -> None:
    service = await start(Role.DECODE)
    call = await service.subscribe()
    call.cancel()
    await service.inbox.has_seen.wait()
    assert not service.streams.is_open(ROUTER)
    assert service.inbox.seen == [RouterGone(ROUTER)]


async def test_a_second_stream_of_a_router_ends_its_first(start: Start) -> None:
    service = await start(Role.DECODE)
    first = await service.subscribe()
    second = service.open_stream()
    await service.inbox.has_seen.wait()
    assert service.inbox.seen == [RouterGone(ROUTER)]
    while (batch := await first.read()) is not END:
        assert not batch.outputs
    service.say(1)
    assert (await service.next_output(second)).first_index == 1


async def test_a_stopping_node_ends_its_streams_well(start: Start) -> None:
    service = await start(Role.DECODE)
    call = await service.subscribe()
    service.say(1)
    service.streams.stop()
    assert (await service.next_output(call)).first_index == 1
    while await call.read() is not END:
        pass
    assert await call.code() is grpc.StatusCode.OK
