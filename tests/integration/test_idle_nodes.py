"""A node of many, without a request, is asked rarely, and by the request that it gets."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from router.dispatch.client.node_clients import NodeClient
from router.dispatch.liveness.pace import IDLE, IDLE_TICKS, WIDE
from tests.integration.fake_node import FakeNode, record_of
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_server import eventually
from tests.support.stores.memory_store import MemoryStore


@pytest.mark.covers("F80")
async def test_a_request_asks_an_idle_node_of_many_whether_it_lives() -> None:
    node, listener, caller = FakeNode("d0", Role.DECODE), Mock(num_running=0), Mock()
    await node.start(MemoryStore(ManualClock()))
    record = record_of(Incarnation("d0", 1), Role.DECODE, f"127.0.0.1:{node.port}")
    older, router = replace(record, protocol=2), Incarnation("router-0", 1)
    client = NodeClient(older, router, listener, Mock(), clock=ManualClock())
    client.start()
    await eventually(lambda: listener.on_heard.called)
    for _ in range(IDLE_TICKS + 2 * IDLE.echo_every):
        client.tick(is_wide=True, is_used=False)
        await eventually(lambda: node.echo in (0, client.liveness.latest) or not node.streams)
        listener.on_heard.reset_mock()
        node.push()
        await eventually(lambda: listener.on_heard.called)
    await eventually(lambda: node.beat_ms == IDLE.beat_ms)
    number = node.echo
    request = GenerationRequest(
        id=AttemptId("r", 1),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=4),
        deadline_s=30.0,
    )
    client.calls.reserve_nowait(request, caller, must_prefill_locally=False, may_wait=False)
    await eventually(lambda: caller.on_reply.called)
    assert node.beat_ms == WIDE.beat_ms
    assert node.echo > number, "it is asked in the message that has the request"
    for _ in range(WIDE.suspicion - 1):
        client.tick(is_wide=True, is_used=True)
    assert not listener.on_suspected.called
    client.tick(is_wide=True, is_used=True)
    assert listener.on_suspected.called
    await client.close()
    await node.die()
