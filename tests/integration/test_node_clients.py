"""The router's end of one node, on real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.clock import ManualClock
from common.errors import DeadlineExceeded, NodeLost, StaleEpoch
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import GenerationRequest, RequestOutput, SamplingParams
from placement.memory_store import MemoryStore
from protos import pdserve_node_pb2 as pb
from router.node_clients import (
    FIRST_BACKOFF_S,
    LAST_BACKOFF_S,
    OUTPUTS_AT_ONCE,
    PARTS_PER_MESSAGE,
    TURNS_FOR_OTHERS,
    NodeClient,
    backoff_s,
)
from tests.integration.fake_node import FakeNode, record_of

ROUTER = Incarnation("router-0", 1)
REQUEST = GenerationRequest(
    id=AttemptId("req", 1),
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=4),
    deadline_s=30.0,
)


class Log:
    """A listener that writes down what it was told."""

    def __init__(self) -> None:
        self.heard: list[RequestOutput] = []
        self.num_messages = 0
        self.lost: list[str] = []

    def on_heard(self, _node: Incarnation, outputs: list[RequestOutput]) -> None:
        self.num_messages += 1
        self.heard += outputs

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
    *, epoch: int = 1, silence_s: float = 5.0
) -> AsyncIterator[tuple[FakeNode, NodeClient, Log]]:
    """A node in its first life and a client for life `epoch` of it."""
    node = FakeNode("d0", Role.DECODE)
    await node.start(MemoryStore(ManualClock()))
    record = record_of(Incarnation("d0", epoch), Role.DECODE, f"127.0.0.1:{node.port}")
    log = Log()
    client = NodeClient(record, ROUTER, log, silence_s=silence_s)
    client.start()
    yield node, client, log
    await client.close()
    await node.die()


async def test_a_silent_node_is_lost_and_heard_again_when_it_speaks() -> None:
    async with connected(silence_s=0.05) as (_node, _client, log):
        await wait_until(lambda: len(log.lost) >= 2)
        assert log.lost[0] == "nothing was heard for 0.05 s"
        assert log.num_messages >= 2, "it was heard between the two losses"


async def test_a_node_that_ends_the_stream_is_lost_at_once() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        node.end_streams()
        await wait_until(lambda: log.lost == ["the node ended the stream"])
        await wait_until(lambda: log.num_messages == 2)


async def test_a_bug_on_the_stream_is_a_lost_node_and_the_stream_is_tried_again() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        heard = log.on_heard

        def broken(_node: Incarnation, outputs: list[RequestOutput]) -> None:
            log.on_heard = heard  # type: ignore[method-assign]
            raise KeyError("bug")

        log.on_heard = broken  # type: ignore[method-assign]
        node.push_raw(pb.OutputBatch())
        await wait_until(lambda: log.lost == ["a bug: KeyError('bug')"])
        await wait_until(lambda: log.num_messages == 2)


async def test_a_bug_while_aborting_ends_neither_the_next_aborts_nor_the_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)

        async def broken(_attempts: list[AttemptId]) -> None:
            raise KeyError("bug")

        with monkeypatch.context() as patch:
            patch.setattr(client, "_abort", broken)
            client.abort_nowait(REQUEST.id)
            async with asyncio.timeout(10):
                await client.wait_aborts_sent()
        client.abort_nowait(REQUEST.id)
        await client.wait_aborts_sent()
        assert node.aborted == [REQUEST.id]


async def test_another_life_of_the_node_refuses_everything() -> None:
    """F63."""
    async with connected(epoch=2) as (node, client, log):
        with pytest.raises(StaleEpoch, match="for d0#2, this is d0#1"):
            await client.reserve(REQUEST, must_prefill_locally=False, may_wait=False)
        with pytest.raises(StaleEpoch):
            await client.prefill(REQUEST, None)
        client.abort_nowait(REQUEST.id)
        await client.wait_aborts_sent()
        assert node.aborted == []
        assert (log.num_messages, log.lost) == (0, [])


async def test_a_node_that_is_gone_is_a_typed_error_and_aborts_are_given_up() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        await node.die()
        await wait_until(lambda: len(log.lost) == 1)
        with pytest.raises(NodeLost, match="d0#1"):
            await client.reserve(REQUEST, must_prefill_locally=False, may_wait=False)
        client.abort_nowait(REQUEST.id)
        await client.wait_aborts_sent()


async def test_a_call_is_no_longer_than_the_request_has_left() -> None:
    async with connected() as (node, client, _log):
        release = asyncio.Event()

        async def hang(_request: GenerationRequest, _is_local: bool) -> pb.ReserveReply:
            await release.wait()
            return pb.ReserveReply()

        node.on_reserve = hang
        short = GenerationRequest(
            id=REQUEST.id,
            prompt_token_ids=REQUEST.prompt_token_ids,
            sampling=REQUEST.sampling,
            deadline_s=0.05,
        )
        with pytest.raises(DeadlineExceeded, match="d0#1"):
            await client.reserve(short, must_prefill_locally=False, may_wait=False)
        release.set()


async def test_a_call_under_way_ends_typed_when_the_client_is_closed() -> None:
    async with connected() as (node, client, _log):
        release = asyncio.Event()

        async def hang(_request: GenerationRequest, _is_local: bool) -> pb.ReserveReply:
            await release.wait()
            return pb.ReserveReply()

        node.on_reserve = hang
        call = asyncio.create_task(
            client.reserve(REQUEST, must_prefill_locally=False, may_wait=False)
        )
        await wait_until(lambda: len(node.asked) == 1)
        await client.close()
        with pytest.raises(NodeLost, match="has left"):
            await call
        with pytest.raises(NodeLost, match="has left"):
            await client.reserve(REQUEST, must_prefill_locally=False, may_wait=False)
        release.set()


async def test_aborts_are_sent_in_bounded_messages_each_once() -> None:
    async with connected() as (node, client, log):
        await wait_until(lambda: log.num_messages == 1)
        attempts = [AttemptId(f"req-{index}", 1) for index in range(1200)]
        for attempt in (*attempts, *attempts):
            client.abort_nowait(attempt)
        await client.wait_aborts_sent()
        assert sorted(node.aborted) == sorted(attempts)
        assert node.num_abort_calls == 3


def test_the_pause_between_tries_grows_to_a_bound() -> None:
    pauses = [backoff_s(count) for count in range(100)]
    assert pauses[0] == FIRST_BACKOFF_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_BACKOFF_S


async def test_a_large_message_lets_others_have_their_turn_and_arrives_in_order() -> None:
    async with connected() as (node, _client, log):
        await wait_until(lambda: log.num_messages == 1)
        num_outputs = 2 * OUTPUTS_AT_ONCE * PARTS_PER_MESSAGE
        outputs = [
            RequestOutput(id=AttemptId("r", 1), first_index=index) for index in range(num_outputs)
        ]
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while len(log.heard) < num_outputs:
                turns += bool(log.heard)
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        node.push(*outputs)
        await counting
        assert [output.first_index for output in log.heard] == list(range(num_outputs))
        assert log.num_messages == 1 + PARTS_PER_MESSAGE
        assert turns >= (PARTS_PER_MESSAGE - 1) * TURNS_FOR_OTHERS
