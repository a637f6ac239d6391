"""Calls without a reply: each has one outcome."""

from __future__ import annotations

import asyncio
from typing import Any

from common.errors import DeadlineExceeded, NodeLost, PdserveError
from common.ids import Incarnation
from protos import pdserve_node_pb2 as pb
from router.dispatch.client.stream_calls import Caller, WaitingCalls, read_acceptance


class Outcomes:
    """What became of calls."""

    def __init__(self) -> None:
        self.seen: list[type] = []
        self.caller: Caller[Any] = Caller(self._on_reply, self._on_failed)

    def _on_reply(self, outcome: object) -> None:
        self.seen.append(type(outcome))

    def _on_failed(self, error: PdserveError) -> None:
        self.seen.append(type(error))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_calls_of_a_lost_node_fail_once_and_their_deadlines_are_over() -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    waiting, outcomes = WaitingCalls(Incarnation("d0", 1)), Outcomes()
    waiting.add(outcomes.caller, read_acceptance, 0.0)
    waiting.fail_all(NodeLost, "lost")
    assert outcomes.seen == [], "not before the call returned"
    await turns()
    assert (outcomes.seen, faults, len(waiting)) == ([NodeLost], [], 0)


async def test_a_call_that_was_answered_has_no_deadline_any_more() -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    waiting, outcomes = WaitingCalls(Incarnation("d0", 1)), Outcomes()
    call_id = waiting.add(outcomes.caller, read_acceptance, 0.0)
    waiting.on_reply(pb.Reply(call_id=call_id, accepted=pb.Accepted()))
    await turns()
    assert (len(outcomes.seen), faults) == (1, [])


async def test_a_call_ends_at_its_deadline() -> None:
    waiting, outcomes = WaitingCalls(Incarnation("d0", 1)), Outcomes()
    call_id = waiting.add(outcomes.caller, read_acceptance, 0.0)
    await turns()
    waiting.on_reply(pb.Reply(call_id=call_id))
    waiting.fail_all(NodeLost, "lost")
    await turns()
    assert outcomes.seen == [DeadlineExceeded]
