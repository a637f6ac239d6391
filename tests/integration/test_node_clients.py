"""The router's end of one node, on real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from common.errors import DeadlineExceeded, NodeLost, Overloaded, PdserveError
from common.files.keys_folder import Keys
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import GenerationRequest, RequestOutput, SamplingParams
from common.version import PROTOCOL_VERSION, UNNAMED_PROTOCOL
from pdserve.keys.keys_init import HOLDERS
from protos import pdserve_node_pb2 as pb
from router.core.candidates import NodeAway
from router.core.known.block_reports import BlockReport
from router.core.request_flow import DecodeGrant
from router.dispatch.client import node_calls, node_clients, node_messages, stream_calls
from router.dispatch.client.fairness import OUTPUTS_AT_ONCE, PARTS, TURNS_FOR_OTHERS, part_size
from router.dispatch.client.node_clients import NodeClient
from router.dispatch.client.stream_calls import Caller, UnsentCalls
from router.dispatch.liveness.pace import USUAL, WIDE
from router.dispatch.liveness.silence import BUSY_TICKS, LOSS_TICKS, TICK_S
from tests.integration.fake_node import FakeNode, record_of
from tests.integration.patient_pings import have_patience
from tests.support import key_folders
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.key_folders import expired, issue, make_keys, put, with_certificate
from tests.support.kv.links import Link
from tests.support.stores.memory_store import MemoryStore

ROUTER = Incarnation("router-0", 1)
REQUEST = GenerationRequest(
    id=AttemptId("req", 1),
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=4),
    deadline_s=30.0,
)


PAUSE_S = 1.0


class Asker:
    """Waits for what becomes of a call."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.caller: Caller[Any] = Caller(self.outcome.set_result, self._on_failed)

    def _on_failed(self, error: PdserveError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def ask(client: NodeClient, request: GenerationRequest = REQUEST) -> asyncio.Future[Any]:
    caller = (asker := Asker()).caller
    client.calls.reserve_nowait(request, caller, must_prefill_locally=False, may_wait=False)
    return asker.outcome


async def reserve(
    client: NodeClient, request: GenerationRequest = REQUEST
) -> DecodeGrant | PdserveError:
    reply: DecodeGrant | PdserveError = await ask(client, request)
    return reply


async def prefill(client: NodeClient) -> PdserveError | None:
    asker = Asker()
    client.calls.prefill_nowait(REQUEST, asker.caller, None)
    refusal: PdserveError | None = await asker.outcome
    return refusal


async def hang(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
    await asyncio.Event().wait()
    raise AssertionError


def outputs_of(name: str, count: int) -> list[RequestOutput]:
    return [RequestOutput(id=AttemptId(name, 1), first_index=index) for index in range(count)]


class Log:
    """A listener that writes down what it was told."""

    def __init__(self) -> None:
        self.heard: list[RequestOutput] = []
        self.num_messages = 0
        self.num_running = 1
        self.stuck_s = 0.0
        self.is_reached = True
        self.suspected: list[str] = []
        self.num_suspected_and_heard = 0
        self.lost: list[str] = []
        self.blocks: list[BlockReport] = []

    def on_heard(self, _node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        self.num_messages += 1
        self.stuck_s = stuck_s
        self.is_reached = is_reached

    def on_outputs(self, _node: Incarnation, outputs: Sequence[RequestOutput]) -> None:
        self.heard += outputs

    def on_blocks(self, _node: Incarnation, report: BlockReport) -> None:
        self.blocks.append(report)

    def on_for_others(self, _node: Incarnation, message: pb.NodeMessage) -> None:
        words = (message.pulls, message.refused_pulls, message.offered_hashes, message.warm_from)
        assert not any(words), "no node of these tests has anything for others"

    def on_suspected(self, _node: Incarnation, reason: str, *, is_heard: bool) -> None:
        self.suspected.append(reason)
        self.num_suspected_and_heard += is_heard

    def on_lost(self, _node: Incarnation, reason: str) -> None:
        self.lost.append(reason)


async def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.002)
    pytest.fail("not within 10 s")


@asynccontextmanager
async def connected(
    *,
    epoch: int = 1,
    is_linked: bool = False,
    protocol: int = UNNAMED_PROTOCOL,
    served: Keys | None = None,
    keys: Keys | None = None,
) -> AsyncIterator[tuple[FakeNode, NodeClient, Log]]:
    """A node in its first life and a client for life `epoch` of it, which nobody ticks.

    One of the protocol version before this one is not pinged: it seems not to run. With
    `is_linked` there is a network between them that loses what it is told to.
    """
    node = FakeNode("d0", Role.DECODE)
    await node.start(MemoryStore(ManualClock()), keys=served)
    address = f"127.0.0.1:{node.port}"
    if is_linked:
        node.link = Link(node.port)
        address = node.link.address
    record = replace(record_of(Incarnation("d0", epoch), Role.DECODE, address), protocol=protocol)
    log = Log()
    client = NodeClient(record, ROUTER, log, log.on_outputs, clock=ManualClock(), keys=keys)
    client.start()
    yield node, client, log
    await client.close()
    await node.die()
    if node.link is not None:
        node.link.close()


def tick(client: NodeClient, num_ticks: int) -> None:
    for _ in range(num_ticks):
        client.tick()


async def test_a_silent_node_is_suspected_then_lost_and_heard_again_when_it_speaks() -> None:
    async with connected() as (_node, client, log):
        for life in (1, 2):
            await wait_until(lambda life=life: log.num_messages == life)  # type: ignore[misc]
            tick(client, USUAL.suspicion - 1)
            assert len(log.suspected) == life - 1
            tick(client, 1)
            assert len(log.suspected) == life
            tick(client, LOSS_TICKS - USUAL.suspicion)
            await wait_until(lambda life=life: len(log.lost) == life)  # type: ignore[misc]
        assert log.suspected == ["nothing was heard for 1.25 s"] * 2
        assert log.lost == ["nothing was heard for 5.0 s"] * 2


async def test_a_node_that_speaks_now_and_then_is_not_suspected() -> None:
    async with connected() as (node, client, log):
        node.repeats_numbers = False  # ticks come faster here than any answer
        for num_messages in range(1, 10):
            await wait_until(lambda n=num_messages: log.num_messages == n)  # type: ignore[misc]
            tick(client, USUAL.suspicion - 1)
            node.push()
        assert (log.suspected, log.lost) == ([], [])


@pytest.mark.parametrize("repeats", [False, True])
async def test_a_silent_node_that_answers_pings_is_busy_and_suspected_later(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_patience(monkeypatch)
    async with connected(protocol=PROTOCOL_VERSION) as (node, client, log):
        await wait_until(lambda: client.is_running() and log.num_messages == 1)
        if repeats:
            await wait_repeated(node, client, log)
        tick(client, BUSY_TICKS - 1)
        assert log.suspected == []
        tick(client, 1)
        assert log.suspected == ["nothing was heard for 3.0 s, although its process runs"]


async def test_under_load_calls_that_follow_each_other_share_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_calls, "message_pause_s", lambda num_running, since_s: PAUSE_S)
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        stopped = StoppedTime()
        first = asyncio.create_task(reserve(client))
        for _ in range(20):  # by itself it would be on its way
            await asyncio.sleep(0)
        second = asyncio.create_task(reserve(client, replace(REQUEST, id=AttemptId("b", 1))))
        await asyncio.sleep(0)
        stopped.advance(PAUSE_S)
        await asyncio.gather(first, second)
        assert node.num_messages == 1


async def ticks_until_suspected(node: FakeNode, client: NodeClient, log: Log) -> int:
    """The ticks that bring a suspicion; the node says something before each of them."""
    for number in range(1, 100):
        num_messages, was_heard = log.num_messages, not node.is_unheard
        node.push()
        if was_heard:
            await wait_until(lambda n=num_messages: log.num_messages > n)  # type: ignore[misc]
        client.tick()
        if log.suspected:
            return number
    pytest.fail("never suspected")


async def wait_repeated(node: FakeNode, client: NodeClient, log: Log) -> None:
    """Return when the node has repeated a number to this router."""
    tick(client, USUAL.echo_every)
    await wait_until(lambda: node.echo > 0)
    num_messages = log.num_messages
    node.push()
    await wait_until(lambda: log.num_messages > num_messages)
    assert log.suspected == []


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_back", [False, True], ids=["to the node", "from the node"])
async def test_a_loss_in_one_direction_is_noticed_within_two_seconds(is_back: bool) -> None:
    async with connected(is_linked=True) as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        await wait_repeated(node, client, log)
        assert node.link is not None
        node.link.cut_one_way(is_back=is_back)
        node.is_unheard = is_back
        assert await ticks_until_suspected(node, client, log) * TICK_S <= 2.0 - TICK_S
        assert log.num_suspected_and_heard == (not is_back)
        if not is_back:
            node.push()
            await wait_until(lambda: not log.is_reached)
        node.link.mend()
        node.is_unheard = False
        tick(client, USUAL.echo_every)
        await wait_until(lambda: node.echo == client.liveness.latest)
        node.push()
        await wait_until(lambda: log.is_reached)
        assert log.lost == []


async def test_a_node_of_many_is_told_how_long_it_may_be_silent_and_judged_so() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        client.tick(is_wide=True)
        await wait_repeated(node, client, log)  # A stream that is slower stays so.
        assert node.beat_ms == WIDE.beat_ms
        tick(client, LOSS_TICKS)
        await wait_until(lambda: log.num_messages == 3)
        tick(client, USUAL.suspicion)
        assert log.suspected == [f"nothing was heard for {ticks} s" for ticks in (2.0, 1.25)]


async def test_a_node_of_an_earlier_release_repeats_nothing_and_is_not_suspected() -> None:
    async with connected() as (node, client, log):
        node.repeats_numbers = False
        await wait_until(lambda: log.num_messages == 1)
        for number in range(2, 30):
            node.push()
            await wait_until(lambda n=number: log.num_messages == n)  # type: ignore[misc]
            client.tick()
        assert (log.suspected, log.is_reached) == ([], True)


async def test_a_node_that_was_silent_repeats_old_numbers_first_and_is_trusted() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        await wait_repeated(node, client, log)
        tick(client, BUSY_TICKS)
        assert len(log.suspected) == 1
        num_messages, node.echo = log.num_messages, 1
        node.push()
        await wait_until(lambda: log.num_messages > num_messages)
        assert log.is_reached
        tick(client, 1)
        assert len(log.suspected) == 1


async def test_a_node_that_was_never_heard_is_not_suspected() -> None:
    async with connected(epoch=2) as (node, client, log):
        await wait_until(lambda: node.num_refused > 0)
        tick(client, LOSS_TICKS)
        assert (log.suspected, log.lost) == ([], [])


async def test_a_node_that_ends_the_stream_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Mock(return_value=0.0)
    monkeypatch.setattr(node_clients, "backoff_s", pauses)
    async with connected() as (node, _client, log):
        for lost in range(3):
            await wait_until(lambda lost=lost: log.num_messages == lost + 1)  # type: ignore[misc]
            node.end_streams()
            await wait_until(lambda lost=lost: len(log.lost) == lost + 1)  # type: ignore[misc]
        assert log.lost == ["the node ended the stream"] * 3
        assert pauses.call_args_list.count(call(0)) == 3, "as it was heard, it is tried again soon"


async def test_a_connection_that_the_network_has_forgotten_is_replaced() -> None:
    async with connected(is_linked=True) as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        assert node.link is not None
        node.link.forget()
        tick(client, LOSS_TICKS)
        await wait_until(lambda: client.liveness.reason == "nothing was heard for 0.0 s")
        assert (log.lost, log.num_messages) == (["nothing was heard for 5.0 s"], 1)
        tick(client, LOSS_TICKS)
        await wait_until(lambda: log.num_messages == 2)
        assert isinstance(await reserve(client), DecodeGrant)


async def test_a_stream_is_opened_again_with_a_renewed_certificate(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    router = with_certificate(key_folders.router_keys(folder), expired(folder, "router"))
    async with connected(served=key_folders.node_keys(folder), keys=router) as (node, client, log):
        with pytest.raises(NodeLost):
            await reserve(client)
        assert log.num_messages == 0
        put(issue(folder, HOLDERS["router"]), folder / "router")
        assert router.reload_if_changed()
        await wait_until(lambda: log.num_messages > 0)
        assert isinstance(await reserve(client), DecodeGrant)
        node.end_streams()


async def test_a_bug_on_the_stream_is_a_lost_node_and_the_stream_is_tried_again() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        heard = log.on_heard

        def broken(_node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
            log.on_heard = heard  # type: ignore[method-assign]
            raise KeyError("bug")

        log.on_heard = broken  # type: ignore[method-assign]
        node.push_raw(pb.OutputBatch())
        await wait_until(lambda: log.lost == ["a bug: KeyError('bug')"])
        await wait_until(lambda: log.num_messages == 2)


async def test_a_bug_in_what_is_said_loses_the_node_and_the_stream_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (_node, client, log):
        await wait_until(lambda: log.num_messages == 1)

        def broken(_: UnsentCalls) -> pb.RouterMessage:
            raise KeyError("bug")

        with monkeypatch.context() as patch:
            patch.setattr(UnsentCalls, "next_message", broken)
            call = asyncio.create_task(reserve(client))
            with pytest.raises(NodeLost, match="a bug: KeyError"):
                await call
        assert log.lost == ["a bug: KeyError('bug')"]
        await wait_until(lambda: log.num_messages == 2)
        assert isinstance(await reserve(client), DecodeGrant)


@pytest.mark.covers("F63")
async def test_another_life_of_the_node_refuses_everything() -> None:
    async with connected(epoch=2) as (node, client, log):
        await wait_until(lambda: node.num_refused > 0)
        with pytest.raises(NodeAway, match="d0#2 is not heard"):
            await reserve(client)
        with pytest.raises(NodeAway, match="d0#2 is not heard"):
            await prefill(client)
        client.calls.abort_nowait(REQUEST.id)
        await client.calls.wait_sent()
        assert node.aborted == []
        assert (log.num_messages, log.lost) == (0, [])


async def test_a_node_that_is_gone_is_a_typed_error_for_what_was_asked_and_what_is() -> None:
    async with connected() as (node, client, log):
        node.on_reserve = hang
        await wait_until(lambda: log.num_messages == 1)
        call = asyncio.create_task(reserve(client))
        await wait_until(lambda: len(node.asked) == 1)
        await node.die()
        with pytest.raises(NodeLost, match="d0#1 was lost"):
            await call
        assert len(log.lost) == 1
        with pytest.raises(NodeAway, match="d0#1 is not heard"):
            await reserve(client)
        client.calls.abort_nowait(REQUEST.id)
        await client.calls.wait_sent()


async def test_a_call_is_no_longer_than_the_request_has_left() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        node.on_reserve = hang
        with pytest.raises(DeadlineExceeded, match="d0#1"):
            await reserve(client, replace(REQUEST, deadline_s=0.05))


async def test_a_reply_behind_its_deadline_is_nobodys() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        release = asyncio.Event()

        async def late(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
            await release.wait()
            return pb.Reply(local=pb.LocalStart())

        node.on_reserve = late
        with pytest.raises(DeadlineExceeded):
            await reserve(client, replace(REQUEST, deadline_s=0.05))
        release.set()
        assert isinstance(await reserve(client), DecodeGrant)
        assert log.lost == []


async def test_a_call_under_way_ends_typed_when_the_client_is_closed() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        node.on_reserve = hang
        call = asyncio.create_task(reserve(client))
        await wait_until(lambda: len(node.asked) == 1)
        await client.close()
        with pytest.raises(NodeAway, match="has left"):
            await call
        with pytest.raises(NodeAway, match="has left"):
            await reserve(client)


async def test_calls_without_a_reply_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_calls, "MAX_WAITING_CALLS", 2)
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        node.on_reserve = hang
        calls = [asyncio.create_task(reserve(client)) for _ in range(2)]
        await wait_until(lambda: len(node.asked) == 2)
        with pytest.raises(Overloaded, match="2 calls wait for replies of d0#1"):
            await reserve(client)
        for call in calls:
            call.cancel()


async def test_what_is_asked_together_travels_together_and_aborts_behind_it() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        attempts = [AttemptId(f"req-{index}", 1) for index in range(1200)]
        outcomes = [ask(client) for _ in range(600)]
        for attempt in (*attempts, *attempts):
            client.calls.abort_nowait(attempt)
        await asyncio.gather(*outcomes)
        await client.calls.wait_sent()
        await wait_until(lambda: len(node.aborted) == 1200)
        assert sorted(node.aborted) == sorted(attempts)
        assert node.num_calls_before_aborts == 600
        assert node.num_messages == 4, "600 calls in two, the last with 512 aborts, and 688"


async def test_long_prompts_are_not_put_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_calls, "BYTES_PER_MESSAGE", 250)
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        short = replace(REQUEST, prompt_token_ids=(1,) * 100)  # 100 bytes of tokens, and some more
        outcomes = [ask(client, short) for _ in range(6)]
        outcomes.append(ask(client, replace(REQUEST, prompt_token_ids=(1,) * 1000)))
        await asyncio.gather(*outcomes)
        assert len(node.asked) == 7
        assert node.num_messages == 4, "two calls in each of three, and the long one"


async def test_a_large_message_lets_others_have_their_turn_and_arrives_in_order() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        num_outputs = 2 * OUTPUTS_AT_ONCE * PARTS
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while len(log.heard) < num_outputs:
                turns += bool(log.heard)
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        node.push(*outputs_of("r", num_outputs))
        await counting
        assert [output.first_index for output in log.heard] == list(range(num_outputs))
        assert log.num_messages == 1 + PARTS
        assert turns >= (PARTS - 1) * TURNS_FOR_OTHERS


async def test_more_requests_make_larger_parts() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        log.num_running = 3 * OUTPUTS_AT_ONCE
        num_outputs = 2 * part_size(log.num_running, 0)
        node.push(*outputs_of("r", num_outputs))
        await wait_until(lambda: len(log.heard) == num_outputs)
        assert log.num_messages == 1 + 2


async def test_a_reply_does_not_wait_for_a_burst_of_tokens_that_came_before_it() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        num_outputs = 2 * OUTPUTS_AT_ONCE * PARTS
        release = asyncio.Event()

        async def behind_a_burst(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
            await release.wait()
            return pb.Reply(local=pb.LocalStart())

        node.on_reserve = behind_a_burst
        call = asyncio.create_task(reserve(client))
        await wait_until(lambda: len(node.asked) == 1)
        hear = log.on_heard

        def hear_slowly(_node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
            hear(_node, stuck_s, is_reached=is_reached)
            release.set()
            if not call.done():
                time.sleep(0.01 * log.num_messages)  # in all 60 parts 18 s

        log.on_heard = hear_slowly  # type: ignore[method-assign]
        node.push(*outputs_of("r", num_outputs))
        await call
        num_heard_at_reply = len(log.heard)
        assert 0 < num_heard_at_reply < num_outputs
        await wait_until(lambda: len(log.heard) == num_outputs)


async def test_a_node_that_is_too_far_ahead_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_messages, "MAX_WAITING_OUTPUTS", 10)
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        for _ in range(20):
            node.push(*outputs_of("r", 20))
        await wait_until(lambda: len(log.heard) == 400)
        assert [output.first_index for output in log.heard] == list(range(20)) * 20
        assert log.num_messages >= 20, "no message was read before the one before was passed on"


async def test_a_stream_that_breaks_while_it_is_not_read_leaves_the_next_one_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_messages, "MAX_WAITING_OUTPUTS", 10)
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        heard = log.on_heard

        def broken(_node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
            log.on_heard = heard  # type: ignore[method-assign]
            raise KeyError("bug")

        log.on_heard = broken  # type: ignore[method-assign]
        node.push(*outputs_of("r", 20))
        await wait_until(lambda: log.lost == ["a bug: KeyError('bug')"])
        await wait_until(lambda: log.num_messages == 2)
        node.push(*outputs_of("r", 3))
        node.push(*outputs_of("r", 4))
        await wait_until(lambda: len(log.heard) == 7)


async def test_what_came_before_the_end_of_a_stream_is_passed_on() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        node.push(*outputs_of("r", 1000))
        node.end_streams()
        await wait_until(lambda: len(log.lost) == 1)
        assert len(log.heard) == 1000
