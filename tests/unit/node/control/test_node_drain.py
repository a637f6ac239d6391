"""How a node leaves: what it says, what it refuses, what it finishes, and when it is gone."""

from __future__ import annotations

import asyncio
import threading

import grpc
import grpc.aio
import pytest

from common.request import FinishReason
from node.control import drain as drain_module
from node.flow.inbox import Inbox
from node.flow.messages import Drain, Message, Submit
from node.life import engine_node
from protos import pdserve_node_pb2 as pb
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import expected_tokens
from tests.support.nodes.drained_node import (
    WAIT_S,
    World,
    ends,
    reservation,
    rest_of,
)


@pytest.fixture(autouse=True)
def graces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run out where a test says so, and not because the machine stood still."""
    monkeypatch.setattr(drain_module, "LAST_GRACE_S", 600.0)
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 600.0)
    monkeypatch.setattr(engine_node, "STREAMS_GRACE_S", 600.0)


class NotedInbox(Inbox):
    """Tells when the request `late` waits in it, and when the node is to drain."""

    has_late = threading.Event()
    has_drain = threading.Event()

    def put(self, message: Message) -> None:
        super().put(message)
        if isinstance(message, Submit) and message.request.id.choice_id == "late":
            self.has_late.set()
        if isinstance(message, Drain):
            self.has_drain.set()


async def test_what_runs_is_finished_and_what_is_new_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "Inbox", NotedInbox)
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        caller = await world.start_answer()
        reply = await world.stub.Drain(pb.DrainRequest(envelope=world.envelope))
        assert reply.timeout_ms == 60_000
        async with asyncio.timeout(WAIT_S):
            await world.store.is_announced.wait()
        asking = asyncio.create_task(caller.ask(reservation("late")))
        # The step under way waits meanwhile: the answer is still running.
        assert await asyncio.to_thread(NotedInbox.has_late.wait, WAIT_S)
        world.runner.let_go_on()
        refused = (await asking).refusal
        assert refused.code == "draining"
        outputs = await rest_of(caller)
        assert [t for o in outputs for t in o.token_ids] == right_answer()[1:]
        assert outputs[-1].details.finish_reason is FinishReason.LENGTH
        assert await ends(serving) == 0
        assert await world.store.live_nodes() == []


@pytest.mark.covers("F116")
async def test_what_is_left_at_the_time_out_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "Inbox", NotedInbox)
    world = World(timeout_s=0.0)
    async with world.running() as serving:
        caller = await world.start_answer()
        NotedInbox.has_drain.clear()
        world.drain.set()
        assert await asyncio.to_thread(NotedInbox.has_drain.wait, WAIT_S)
        world.runner.let_go_on()
        outputs = await rest_of(caller)
        assert (outputs[-1].details.finish_reason, outputs[-1].details.error_code) == (
            FinishReason.ERROR,
            "draining",
        )
        said = [t for o in outputs for t in o.token_ids]
        assert said == right_answer()[1 : 1 + len(said)]
        assert await ends(serving) == 0


async def test_the_last_grace_follows_the_time_to_finish() -> None:
    time, requested = StoppedTime(), asyncio.Event()
    requested.set()
    drain = drain_module.NodeDrain(requested, timeout_s=10.0)
    running = asyncio.create_task(drain.run(Inbox(max_requests=1), lambda: None))
    for by_s, is_over in ((0.0, False), (609.0, False), (1.0, True)):
        time.advance(by_s)
        for _ in range(5):
            await asyncio.sleep(0)
        assert running.done() is is_over
    time.go_on()


async def test_an_idle_node_is_gone_at_once() -> None:
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        world.drain.set()
        assert await ends(serving) == 0
    assert await world.store.live_nodes() == []


async def test_a_call_for_another_life_drains_nothing() -> None:
    world = World(timeout_s=60.0)
    async with world.running() as serving:
        stale = pb.Envelope()
        stale.CopyFrom(world.envelope)
        stale.receiver_epoch += 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.stub.Drain(pb.DrainRequest(envelope=stale))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert not world.drain.is_set()
        assert not serving.done()


async def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.05)
    world = World(timeout_s=1000.0)
    async with world.running() as serving:
        await world.start_answer()
        world.drain.set()
        async with asyncio.timeout(WAIT_S):
            await world.store.is_announced.wait()
        assert not serving.done()
        world.stop.set()
        assert await ends(serving) == 0


@pytest.mark.covers("F116")
async def test_a_step_that_hangs_does_not_keep_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "LAST_GRACE_S", 0.05)
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.05)
    world = World(timeout_s=0.0)
    async with world.running() as serving:
        await world.start_answer()
        world.drain.set()
        assert await ends(serving) == 0


async def test_a_node_that_still_loads_has_nothing_to_drain() -> None:
    world = World(timeout_s=1000.0)
    world.may_load.clear()
    serving = world.start()
    assert await asyncio.to_thread(world.loading.wait, WAIT_S)
    world.drain.set()
    assert await ends(serving) == 0
    world.may_load.set()


def right_answer() -> list[int]:
    request = make_request(5, max_tokens=8, ignore_eos=True)
    return expected_tokens(request.prompt_token_ids, request.sampling)
