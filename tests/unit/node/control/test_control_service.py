"""The gRPC service over a real server: who is refused, what is answered, what ends a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import Overloaded, PeerProtocolError
from common.ids import AttemptId
from common.nodes import Role
from common.request import FinishReason
from kv_transfer.contract import Ticket
from node.control import control_service, output_streams, router_calls
from node.control.tickets import ticket_from_proto
from node.flow import inbox
from node.flow.messages import (
    AbortAttempt,
    CallRefused,
    PromptAccepted,
    Reserved,
    RouterGone,
    StartedLocally,
    Submit,
)
from protos import pdserve_node_pb2 as pb
from tests.support.nodes.control_server import (
    GOOD,
    RECEIVED_AT_S,
    REQUEST,
    ROUTER,
    TICKET,
    Service,
    prefill,
    reserve,
    spoiled,
)
from tests.support.nodes.node_caller import NodeCaller

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
        (spoiled(protocol_version=1), "protocol version is 1: wanted 2 or 3"),
        (spoiled(protocol_version=0), "protocol version is 0: wanted 2 or 3"),
        (spoiled(sender_id=""), "sender_id has 0 characters"),
        (pb.Envelope(), "protocol version is 0"),
    ],
)
@pytest.mark.parametrize("call", ["Stream", "Drain"])
async def test_every_call_refuses_an_envelope_that_is_not_for_this_life_and_protocol(
    start: Start, call: str, envelope: pb.Envelope, words: str
) -> None:
    service = await start(Role.DECODE)
    calls: dict[str, Callable[[], Any]] = {
        "Stream": lambda: NodeCaller(service.stub, envelope).greet(),
        "Drain": lambda: service.stub.Drain(pb.DrainRequest(envelope=envelope)),
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[call]()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert words in str(caught.value.details())
    assert service.inbox.seen == []
    assert not service.drain.requested.is_set()


async def test_a_stream_that_does_not_say_whose_it_is_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_service, "GREETING_TIMEOUT_S", 0.0)
    service = await start(Role.DECODE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Stream().read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "sent no envelope within 0 s" in str(caught.value.details())


async def test_a_stream_that_ends_before_it_said_whose_it_is_ends(start: Start) -> None:
    service = await start(Role.DECODE)
    call = service.stub.Stream()
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert "ended before its first envelope" in str(caught.value.details())


# --- requests -------------------------------------------------------------------------------------


async def test_a_reservation_comes_back_as_its_ticket(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    service.inbox.answer_with = Reserved(TICKET)
    reply = await caller.ask(reserve(must_prefill_locally=True, may_wait=True))
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
    caller = await service.subscribe()
    service.inbox.answer_with = StartedLocally(128)
    reply = await caller.ask(reserve())
    assert reply.local.num_cached_tokens == 128
    assert reply.WhichOneof("outcome") == "local"


async def test_a_refusal_says_why_when_to_come_back_and_what_room_there_is(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    service.inbox.answer_with = CallRefused(Overloaded("full", retry_after_s=2.5), 7, 1)
    refusal = (await caller.ask(reserve())).refusal
    assert (refusal.code, refusal.message, refusal.retry_after_ms) == ("overloaded", "full", 2500)
    assert (refusal.free_blocks, refusal.free_seats) == (7, 1)


@pytest.mark.covers("S58")
async def test_refusals_are_counted_by_reason_wherever_they_are_made(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    # The service by itself, then the step thread, twice.
    late = reserve()
    late.request.deadline_ms = 0
    await caller.ask(late)
    service.inbox.answer_with = CallRefused(Overloaded("full"))
    await caller.ask(reserve())
    await caller.ask(reserve())
    service.inbox.answer_with = StartedLocally(0)
    await caller.ask(reserve())
    assert service.service.refusals == {
        "deadline_exceeded": 0,
        "draining": 0,
        "invalid_request": 1,
        "layout_mismatch": 0,
        "overloaded": 2,
    }


@pytest.mark.parametrize("ticket", [TICKET, None])
async def test_a_prompt_is_taken_with_or_without_a_ticket(
    start: Start, ticket: Ticket | None
) -> None:
    service = await start(Role.PREFILL)
    caller = await service.subscribe()
    service.inbox.answer_with = PromptAccepted()
    reply = await caller.ask(prefill(ticket))
    assert reply.WhichOneof("outcome") == "accepted"
    (submit,) = service.inbox.seen
    assert (submit.ticket, submit.is_prompt) == (ticket, True)


async def test_a_prompt_can_be_refused(start: Start) -> None:
    service = await start(Role.PREFILL)
    caller = await service.subscribe()
    service.inbox.answer_with = CallRefused(Overloaded("full"))
    assert (await caller.ask(prefill())).refusal.code == "overloaded"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
async def test_whatever_its_role_a_node_takes_prompts_and_reservations(
    start: Start, role: Role
) -> None:
    """A router may know its earlier role."""
    service = await start(role)
    caller = await service.subscribe()
    service.inbox.answer_with = PromptAccepted()
    assert (await caller.ask(prefill())).WhichOneof("outcome") == "accepted"
    service.inbox.answer_with = Reserved(TICKET)
    assert (await caller.ask(reserve())).WhichOneof("outcome") == "ticket"
    assert [message.is_prompt for message in service.inbox.seen] == [True, False]


async def set_role(service: Service, role: str, envelope: pb.Envelope = GOOD) -> pb.RoleReply:
    reply: pb.RoleReply = await service.stub.SetRole(pb.RoleRequest(envelope=envelope, role=role))
    return reply


async def test_a_role_is_changed_and_the_earlier_one_told(start: Start) -> None:
    service = await start(Role.PREFILL)
    assert (await set_role(service, "decode")).earlier == "prefill"
    assert (await set_role(service, "decode")).earlier == "decode"
    assert service.role.current is Role.DECODE


@pytest.mark.parametrize("name", ["router", "decoder", "", "x" * 999])
async def test_a_word_that_is_no_role_is_refused(start: Start, name: str) -> None:
    service = await start(Role.PREFILL)
    refusal = (await set_role(service, name)).refusal
    assert refusal.code == "invalid_request"
    assert "wanted prefill, decode, mixed" in refusal.message
    assert service.role.current is Role.PREFILL


async def test_a_node_that_leaves_keeps_its_role(start: Start) -> None:
    service = await start(Role.PREFILL)
    service.drain.requested.set()
    assert (await set_role(service, "mixed")).refusal.code == "draining"
    assert service.role.current is Role.PREFILL


async def test_a_role_for_another_life_is_refused(start: Start) -> None:
    service = await start(Role.PREFILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_role(service, "mixed", spoiled(receiver_epoch=99))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert service.role.current is Role.PREFILL


async def test_a_call_that_asks_for_nothing_is_refused(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.say(pb.RouterMessage(calls=[pb.Call(id=7)]))
    reply = (await caller.call.read()).replies[0]
    assert (reply.call_id, reply.refusal.code) == (7, PeerProtocolError.code)


async def test_what_comes_together_is_answered_call_by_call(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    service.inbox.answer_with = StartedLocally(0)
    bad = pb.Call(id=2)
    calls = [pb.Call(id=1, reserve=reserve()), bad, pb.Call(id=3, reserve=reserve())]
    await caller.say(pb.RouterMessage(calls=calls))
    outcomes: dict[int, str | None] = {}
    while len(outcomes) < 3:
        for reply in (await caller.call.read()).replies:
            outcomes[reply.call_id] = reply.WhichOneof("outcome")
    assert outcomes == {1: "local", 2: "refusal", 3: "local"}


async def test_a_malformed_request_is_refused_by_field(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    empty = reserve()
    del empty.request.prompt_token_ids[:]
    hot = reserve()
    hot.request.sampling.temperature = -1.0
    for message, words in ((empty, "prompt is empty"), (hot, "temperature is -1.0")):
        refusal = (await caller.ask(message)).refusal
        assert refusal.code == "invalid_request"
        assert words in refusal.message
    assert service.inbox.seen == []


@pytest.mark.covers("V03")
async def test_a_malformed_ticket_is_refused(start: Start) -> None:
    service = await start(Role.PREFILL)
    caller = await service.subscribe()
    message = prefill()
    message.ticket.lease_token = 0
    refusal = (await caller.ask(message)).refusal
    assert (refusal.code, "no lease" in refusal.message) == ("invalid_request", True)


async def test_a_full_inbox_is_an_overloaded_refusal(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    for reply_to in range(1000, 1003):
        service.inbox.put(
            Submit(request=REQUEST, router=ROUTER, reply_to=reply_to, received_at_s=0.0)
        )
    assert (await caller.ask(reserve())).refusal.code == "overloaded"


async def test_a_call_waits_no_longer_than_its_request_and_a_late_answer_finds_nobody(
    start: Start,
) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    short = replace(REQUEST, deadline_s=0.001)
    assert (await caller.ask(reserve(short))).refusal.code == "deadline_exceeded"
    (submit,) = service.inbox.seen
    assert isinstance(submit, Submit)
    service.replies.resolve(submit.reply_to, Reserved(TICKET))
    service.inbox.take_all()
    service.inbox.answer_with = StartedLocally(0)
    assert (await caller.ask(reserve())).WhichOneof("outcome") == "local"
    assert len(service.replies) == 0


async def test_a_call_whose_stream_ends_leaves_nothing(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.begin(reserve())
    await service.inbox.has_seen.wait()
    assert len(service.replies) == 1
    caller.call.cancel()
    await service.replies.forgotten.wait()
    assert len(service.replies) == 0


async def test_nothing_is_taken_of_a_stream_that_another_one_has_replaced(start: Start) -> None:
    """As what was on its way on a connection that its router gave up, and arrives at last."""
    service = await start(Role.DECODE)
    said: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()

    async def messages() -> AsyncIterator[pb.RouterMessage]:
        while True:
            yield await said.get()

    said.put_nowait(pb.RouterMessage(envelope=GOOD))
    context: Any = None
    stream = service.service.Stream(messages(), context)
    await anext(stream)
    service.streams.open(ROUTER)
    said.put_nowait(pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve())]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert said.empty()
    assert service.inbox.seen == [RouterGone(ROUTER)]
    assert [message async for message in stream] == []


async def test_calls_without_a_reply_are_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_calls, "MAX_WAITING_CALLS", 1)
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.begin(reserve())
    await service.inbox.has_seen.wait()
    refusal = (await caller.ask(reserve())).refusal
    assert (refusal.code, "1 calls of router#1 wait" in refusal.message) == ("overloaded", True)
    assert len(service.inbox.seen) == 1


@pytest.mark.parametrize(
    "message",
    [
        pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve())] * 2),
        pb.RouterMessage(calls=[pb.Call()] * (router_calls.MAX_CALLS_PER_MESSAGE + 1)),
        pb.RouterMessage(
            aborts=pb.Attempts(
                request_ids=["a"] * (router_calls.MAX_ABORTS_PER_MESSAGE + 1),
                attempts=[1] * (router_calls.MAX_ABORTS_PER_MESSAGE + 1),
            )
        ),
        pb.RouterMessage(aborts=pb.Attempts(request_ids=[""], attempts=[1])),
        pb.RouterMessage(aborts=pb.Attempts(request_ids=["a"], attempts=[0])),
        pb.RouterMessage(aborts=pb.Attempts(request_ids=["a"])),
    ],
)
async def test_what_no_router_says_ends_the_stream(start: Start, message: pb.RouterMessage) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.say(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.wait_ended()
    assert caught.value.code() in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert service.inbox.seen[-1] == RouterGone(ROUTER)
    assert len(service.replies) == 0


# --- aborts ---------------------------------------------------------------------------------------


def aborts(*names: str) -> pb.RouterMessage:
    return pb.RouterMessage(aborts=pb.Attempts(request_ids=names, attempts=[2] * len(names)))


async def test_an_abort_names_router_and_attempts_and_follows_its_call(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    message = aborts("a", "b")
    message.calls.append(pb.Call(id=1, reserve=reserve()))
    service.inbox.answer_with = StartedLocally(0)
    await caller.say(message)
    while not (await caller.call.read()).replies:
        pass
    assert isinstance(service.inbox.seen[0], Submit)
    assert service.inbox.seen[1] == AbortAttempt(ROUTER, (AttemptId("a", 2), AttemptId("b", 2)))


@pytest.mark.covers("F97")
async def test_no_abort_is_lost_where_the_inbox_is_full_of_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_BESIDE", 1)
    monkeypatch.setattr(router_calls, "FULL_INBOX_PAUSE_S", 0.0)
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.say(aborts("a"))
    await caller.say(aborts("b"))
    await service.inbox.has_seen.wait()
    for _ in range(3):  # heartbeats: nothing more is taken, and the stream goes on
        assert await caller.call.read() == pb.NodeMessage()
    assert service.inbox.seen == [AbortAttempt(ROUTER, (AttemptId("a", 2),))]
    service.inbox.take_all()
    service.inbox.has_seen.clear()
    await service.inbox.has_seen.wait()
    assert service.inbox.seen[1] == AbortAttempt(ROUTER, (AttemptId("b", 2),))


# --- streams --------------------------------------------------------------------------------------


async def test_heartbeats_tell_of_a_step_that_does_not_end(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    while not service.progress.stuck_s:
        service.progress.look(1.0)
    stuck_ms = round(1000 * service.progress.stuck_s)
    await caller.call.read()  # may have been on its way
    assert await caller.call.read() == pb.NodeMessage(stuck_ms=stuck_ms)
    service.progress.look(None)
    await caller.call.read()
    assert await caller.call.read() == pb.NodeMessage()


@pytest.mark.covers("F121")
async def test_what_a_router_sends_comes_back_in_the_next_messages(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.say(pb.RouterMessage(echo=7))
    while (heard := await caller.call.read()) == pb.NodeMessage():
        pass  # a heartbeat that was on its way
    assert heard == pb.NodeMessage(echo=7)
    await caller.say(aborts("a"))
    assert await caller.call.read() == pb.NodeMessage(echo=7), "no number changes nothing"


async def test_a_router_with_many_nodes_is_answered_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start(Role.DECODE)
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 3600.0)
    caller = await service.subscribe()
    await caller.say(pb.RouterMessage(echo=7, beat_ms=900))
    while (heard := await caller.call.read()) == pb.NodeMessage():
        pass  # a heartbeat that was on its way
    assert heard == pb.NodeMessage(echo=7)


async def test_outputs_reach_their_router(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    service.say(1, finish_reason=FinishReason.LENGTH)
    (output,) = await caller.next_outputs()
    assert (output.id, output.first_index, output.token_ids) == (REQUEST.id, 1, (41,))
    assert output.details.finish_reason is FinishReason.LENGTH


async def test_a_stream_that_ends_makes_its_router_gone_once(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    caller.call.cancel()
    await service.inbox.has_seen.wait()
    assert service.inbox.seen == [RouterGone(ROUTER)]


async def test_a_router_that_has_said_all_gets_a_good_end(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    await caller.call.done_writing()
    await caller.wait_ended()
    assert await caller.call.code() is grpc.StatusCode.OK
    assert service.inbox.seen == [RouterGone(ROUTER)]


async def test_a_second_stream_of_a_router_ends_its_first(start: Start) -> None:
    service = await start(Role.DECODE)
    first = await service.subscribe()
    second = await service.subscribe()
    assert service.inbox.seen == [RouterGone(ROUTER)]
    await first.wait_ended()
    service.say(1)
    (output,) = await second.next_outputs()
    assert output.first_index == 1


async def test_a_stopping_node_ends_its_streams_well(start: Start) -> None:
    service = await start(Role.DECODE)
    caller = await service.subscribe()
    service.say(1)
    service.streams.stop()
    (output,) = await caller.next_outputs()
    assert output.first_index == 1
    await caller.wait_ended()
    assert await caller.call.code() is grpc.StatusCode.OK
