"""One token stream per router: merging, heartbeats, bounds, and exactly one end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import pytest

from common.ids import AttemptId, Incarnation
from common.prompt_logprobs import PromptLogprobs, joined
from common.request import OutputDetails, RequestOutput
from node.control import output_streams
from node.control.output_streams import PULLS_PER_MESSAGE, OutputStreams, RouterStream
from node.flow.messages import AskBlocks, OfferBlocks, RefusePull, SendOutput, WarmNode
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_from_proto
from tests.support.nodes.control_server import TICKET

R1, R2 = Incarnation("r", 1), Incarnation("q", 1)


def output(number: int) -> RequestOutput:
    return RequestOutput(id=AttemptId(f"req{number}", 1), first_index=number, token_ids=(number,))


class Batch(NamedTuple):
    """What a router reads in a message; nothing: a heartbeat."""

    replies: list[pb.Reply]
    outputs: list[RequestOutput]
    pulls: list[pb.Pull]
    offered_hashes: bytes = b""
    offered_to: int = 0
    """The epoch of the new node that is offered blocks; 0: there is none."""
    warm_from: str = ""
    refused: tuple[pb.RefusedPull, ...] = ()


def batch_of(message: pb.NodeMessage) -> Batch:
    return Batch(
        list(message.replies),
        outputs_from_proto(message.outputs) if message.HasField("outputs") else [],
        list(message.pulls),
        message.offered_hashes,
        message.offered_to.epoch,
        message.warm_from,
        tuple(message.refused_pulls),
    )


class Streams:
    """Streams whose ended routers are written down; made inside the running loop."""

    def __init__(self) -> None:
        self.gone: list[Incarnation] = []
        self.streams = OutputStreams(asyncio.get_running_loop(), self.gone.append)

    async def read(self, stream: RouterStream) -> AsyncIterator[Batch]:
        """What its router reads."""
        async with aclosing(self.streams.read(stream)) as messages:
            async for message in messages:
                yield batch_of(message)

    def say(self, router: Incarnation, *numbers: int) -> None:
        """What the step thread does in one turn."""
        for number in numbers:
            self.streams.add(SendOutput(router, output(number)))
        self.streams.flush()


async def delivered() -> None:
    """Everything that was handed to the event loop so far has run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_message_has_a_bounded_number_of_logprobs_of_prompts(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_streams, "MAX_ENTRIES", 10)
    of_five = PromptLogprobs(0, (-1.0,) * 5, (1,) * 5, (), ())
    reader = world.read(world.streams.open(R1))
    sizes = [5, 5, 0, 0, 5, 25, 0]
    for number, size in enumerate(sizes):
        found = joined([of_five] * (size // 5)) if size else None
        details = OutputDetails(prompt_logprobs=found)
        world.streams.add(SendOutput(R1, output(number)._replace(details=details)))
    world.streams.flush()
    await delivered()
    batches: list[list[int]] = []
    while sum(map(len, batches)) < len(sizes):
        batches.append([one.first_index for one in await read_next(reader)])
    assert batches == [[0, 1, 2, 3], [4], [5, 6]]


Reader = AsyncIterator[Batch]
HEARTBEAT = Batch([], [], [])


async def read_next(reader: Reader) -> list[RequestOutput]:
    """The outputs of the next batch that is not a heartbeat."""
    while True:
        if (batch := await anext(reader)) != HEARTBEAT:
            assert batch.replies == []
            return batch.outputs


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Streams:
    # No test waits for a heartbeat, except the one that asks for it.
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 60.0)
    return Streams()


async def opened(world: Streams, router: Incarnation = R1) -> tuple[RouterStream, Reader]:
    stream = world.streams.open(router)
    reader = world.read(stream)
    assert await anext(reader) == HEARTBEAT, "a router is answered at once"
    return stream, reader


async def subscribed(world: Streams, router: Incarnation = R1) -> Reader:
    return (await opened(world, router))[1]


async def test_a_turn_of_the_step_thread_leaves_in_one_batch(world: Streams) -> None:
    reader = await subscribed(world)
    await asyncio.to_thread(world.say, R1, 1, 2, 3)
    assert await read_next(reader) == [output(1), output(2), output(3)]


async def test_what_was_not_read_yet_is_merged_in_order(world: Streams) -> None:
    reader = await subscribed(world)
    for number in (1, 2, 3):
        world.say(R1, number)
        await delivered()
    assert await read_next(reader) == [output(1), output(2), output(3)]


async def test_a_pull_leaves_at_once_and_no_message_has_too_many(world: Streams) -> None:
    reader, _other = await subscribed(world, R1), await subscribed(world, R2)
    ticket = replace(TICKET, target_block_ids=(4,))
    for number in range(PULLS_PER_MESSAGE + 2):
        source = Incarnation("d", number)
        world.streams.ask(AskBlocks(R1, source, ticket, (bytes(16),)))
    world.streams.ask(AskBlocks(Incarnation("gone", 1), source, ticket, (bytes(16),)))
    await delivered()
    first, second = await anext(reader), await anext(reader)
    assert [pull.source_epoch for pull in first.pulls] == list(range(PULLS_PER_MESSAGE))
    assert len(second.pulls) == 2


async def test_pulls_that_nobody_reads_end_the_stream(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_streams, "MAX_PENDING", 3)
    await subscribed(world)
    for _ in range(4):
        world.streams.ask(AskBlocks(R1, R2, TICKET, (bytes(16),)))
    await delivered()
    assert world.gone == [R1]


async def test_that_a_pull_is_not_answered_goes_to_the_router_that_passed_it_on(
    world: Streams,
) -> None:
    first, second = await subscribed(world, R1), await subscribed(world, R2)
    for router in (R2, Incarnation("gone", 1)):
        world.streams.refuse(RefusePull(router, Incarnation("q", 3), 77))
    await delivered()
    assert (await anext(second)).refused == (pb.RefusedPull(node_id="q", epoch=3, lease_token=77),)
    world.say(R1, 1)
    await delivered()
    assert await anext(first) == Batch([], [output(1)], [])


async def test_what_is_offered_leaves_at_once_through_one_router(world: Streams) -> None:
    world.streams.offer(OfferBlocks((bytes(16),)))
    await delivered()  # there is no router
    first, second = await subscribed(world, R1), await subscribed(world, R2)
    world.streams.offer(OfferBlocks((b"a" * 16, b"b" * 16)))
    await delivered()
    assert await anext(first) == Batch([], [], [], b"a" * 16 + b"b" * 16)
    world.say(R1, 1)
    world.say(R2, 2)
    await delivered()
    assert await anext(first) == Batch([], [output(1)], [])
    assert await anext(second) == Batch([], [output(2)], [])


async def test_what_a_new_node_may_pull_goes_to_its_router(world: Streams) -> None:
    first, second = await subscribed(world, R1), await subscribed(world, R2)
    offers = [
        OfferBlocks((bytes([number]) * 16,), WarmNode(R2, Incarnation("new", number)))
        for number in (1, 2)
    ]
    gone = WarmNode(Incarnation("gone", 1), Incarnation("new", 1))
    for offered in (*offers, OfferBlocks((bytes(16),), gone)):
        world.streams.offer(offered)
    world.say(R1, 1)
    await delivered()
    for number in (1, 2):
        assert await anext(second) == Batch([], [], [], bytes([number]) * 16, number)
    assert await anext(first) == Batch([], [output(1)], [])


async def test_a_node_that_has_started_says_once_to_each_router_who_is_to_warm_it(
    world: Streams,
) -> None:
    world.streams.warm_from = "auto"
    for router in (R1, R2):
        reader = world.read(world.streams.open(router))
        assert (await anext(reader)).warm_from == "auto"
        world.say(router, 1)
        await delivered()
        assert await anext(reader) == Batch([], [output(1)], [])
    world.streams.start_is_over()
    late = world.read(world.streams.open(Incarnation("late", 1)))
    assert (await anext(late)).warm_from == ""


async def test_each_router_gets_its_own(world: Streams) -> None:
    first, second = await subscribed(world, R1), await subscribed(world, R2)
    world.streams.add(SendOutput(R1, output(1)))
    world.streams.add(SendOutput(R2, output(2)))
    world.streams.flush()
    assert await read_next(first) == [output(1)]
    assert await read_next(second) == [output(2)]


async def test_nothing_leaves_before_the_flush(world: Streams) -> None:
    reader = await subscribed(world)
    world.streams.add(SendOutput(R1, output(1)))
    waiting = asyncio.ensure_future(anext(reader))
    await delivered()
    assert not waiting.done()
    world.streams.flush()
    assert (await waiting).outputs == [output(1)]


async def test_a_silent_stream_has_a_heart_beat(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await subscribed(world)
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 0.0)
    assert await anext(reader) == HEARTBEAT
    assert await anext(reader) == HEARTBEAT
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 60.0)
    world.say(R1, 1)
    assert await read_next(reader) == [output(1)]


async def test_a_number_of_a_router_with_many_nodes_is_repeated_at_once(world: Streams) -> None:
    stream, reader = await opened(world)
    stream.take_echo(7, 90_000)
    assert (await anext(reader), stream.echo) == (HEARTBEAT, 7)
    waiting = asyncio.ensure_future(anext(reader))
    stream.take_echo(0, 90_000)
    stream.take_echo(8, 0)
    await delivered()
    assert not waiting.done(), "no number is repeated by itself, and not for another router"
    world.say(R1, 1)
    assert (await waiting).outputs == [output(1)]
    assert stream.echo == 8


async def test_a_router_says_how_long_a_stream_may_be_silent_within_bounds(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 0.25)
    stream = world.streams.open(R1)
    spans_s = []
    for beat_ms in (0, 900, 2**32 - 1, 1, 0):
        stream.take_echo(1, beat_ms)
        spans_s.append(stream.beat_s)
    stream.take_echo(0, 900)
    assert spans_s == [0.25, 0.9, output_streams.LONGEST_BEAT_S, 0.25, 0.25]
    assert stream.beat_s == 0.25, "a message without a number changes nothing"


async def test_a_silent_stream_beats_as_seldom_as_its_router_allows(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, reader = await opened(world)
    monkeypatch.setattr(output_streams, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(output_streams, "LONGEST_BEAT_S", 60.0)
    stream.take_echo(1, 60_000)
    assert await anext(reader) == HEARTBEAT
    waiting = asyncio.ensure_future(anext(reader))
    await delivered()
    assert not waiting.done()
    world.say(R1, 1)
    assert (await waiting).outputs == [output(1)]


async def test_output_for_a_router_that_does_not_read_is_dropped(world: Streams) -> None:
    world.say(R1, 1)
    await delivered()
    reader = await subscribed(world)
    waiting = asyncio.ensure_future(anext(reader))
    await delivered()
    assert not waiting.done()
    world.say(R1, 2)
    assert (await waiting).outputs == [output(2)]


async def test_a_reader_that_leaves_is_gone_once(world: Streams) -> None:
    stream, reader = await opened(world)
    await reader.aclose()  # type: ignore[attr-defined]
    assert world.gone == [R1]
    assert stream.is_cut
    world.say(R1, 1)
    await delivered()
    assert world.gone == [R1]


async def test_a_reader_whose_call_is_cancelled_is_gone_once(world: Streams) -> None:
    stream = world.streams.open(R1)

    async def read() -> None:
        async for _ in world.read(stream):
            pass

    task = asyncio.create_task(read())
    await delivered()
    assert not stream.is_cut
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await delivered()
    assert world.gone == [R1]


async def test_a_second_reader_replaces_the_first(world: Streams) -> None:
    first = await subscribed(world)
    stream, second = await opened(world)
    assert world.gone == [R1], "what the first asked for is aborted"
    world.say(R1, 1)
    assert await read_next(second) == [output(1)]
    assert [batch async for batch in first] in ([], [HEARTBEAT])
    assert world.gone == [R1], "the end of the first is not the end of the second"
    assert not stream.is_cut
    await second.aclose()  # type: ignore[attr-defined]
    assert world.gone == [R1, R1]


@pytest.mark.parametrize(("count", "is_cut"), [(3, False), (4, True)])
async def test_a_router_that_does_not_read_is_cut_off_at_the_bound(
    world: Streams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    is_cut: bool,
) -> None:
    monkeypatch.setattr(output_streams, "MAX_PENDING", 3)
    reader = await subscribed(world)
    other = await subscribed(world, R2)
    with caplog.at_level(logging.ERROR, "pdserve.node"):
        world.say(R1, *range(count))
        await delivered()
    assert world.gone == ([R1] if is_cut else [])
    if is_cut:
        assert [batch async for batch in reader] in ([], [HEARTBEAT])
        assert world.gone == [R1]
    else:
        assert len(await read_next(reader)) == 3
    world.say(R2, 7)
    assert await read_next(other) == [output(7)]


async def test_stopping_sends_what_is_there_and_ends_every_stream(world: Streams) -> None:
    readers = [await subscribed(world, R1), await subscribed(world, R2)]
    world.say(R1, 1)
    world.say(R2, 2)
    await delivered()
    world.streams.stop()
    batches = [[b.outputs async for b in reader if b != HEARTBEAT] for reader in readers]
    assert batches == [[[output(1)]], [[output(2)]]]
    assert sorted(world.gone) == [R2, R1]


async def test_stopping_waits_for_what_is_on_its_way_without_holding_up_the_loop(
    world: Streams,
) -> None:
    reader = await subscribed(world)
    world.say(R1, 1)
    world.streams.stop()
    batches = []
    async for batch in reader:
        batches.append(batch)
        assert len(batches) < 10, "the reader goes round without letting the outputs in"
    assert [batch.outputs for batch in batches if batch != HEARTBEAT] == [[output(1)]]


async def test_replies_leave_with_the_outputs_and_before_them(world: Streams) -> None:
    stream, reader = await opened(world)
    world.say(R1, 1)
    await delivered()
    world.streams.reply(stream, pb.Reply(call_id=5))
    assert await anext(reader) == Batch([pb.Reply(call_id=5)], [output(1)], [])
    world.say(R1, 2)
    await delivered()
    assert await anext(reader) == Batch([], [output(2)], []), "nothing is said twice"


async def test_a_reply_is_not_for_a_later_stream_of_the_same_router(world: Streams) -> None:
    first, _ = await opened(world)
    _, reader = await opened(world)
    world.streams.reply(first, pb.Reply(call_id=5))
    world.say(R1, 1)
    assert await anext(reader) == Batch([], [output(1)], [])


async def test_replies_that_nobody_reads_cut_a_router_off_too(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_streams, "MAX_PENDING", 3)
    stream, _ = await opened(world)
    for call_id in range(4):
        assert not stream.is_cut
        world.streams.reply(stream, pb.Reply(call_id=call_id))
    assert stream.is_cut
    assert world.gone == [R1]


async def test_nothing_is_sent_on_a_stream_that_was_closed(world: Streams) -> None:
    stream, reader = await opened(world)
    waiting = asyncio.ensure_future(anext(reader))
    await delivered()
    world.streams.reply(stream, pb.Reply(call_id=5))
    world.streams.close(stream)
    assert await waiting == HEARTBEAT


async def test_a_stream_that_is_closed_ends(world: Streams) -> None:
    stream, reader = await opened(world)
    world.streams.close(stream)
    assert [batch async for batch in reader] == []
    assert world.gone == [R1]
