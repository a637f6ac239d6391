"""Outputs of a node in their order, whatever messages they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from common.ids import AttemptId, Incarnation
from common.request import RequestOutput
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_to_proto
from router.dispatch.client.fairness import FEW_OUTPUTS, OUTPUTS_AT_ONCE
from router.dispatch.client.node_messages import NodeMessages

NODE = Incarnation("d0", 1)


class Stream:
    """A stream that has ended behind some messages of so many outputs."""

    def __init__(self, *sizes: int) -> None:
        firsts = [sum(sizes[:at]) for at in range(len(sizes))]
        self._messages: list[Any] = [
            pb.NodeMessage(outputs=outputs_to_proto(outputs(first, size)))
            for first, size in zip(firsts, sizes, strict=True)
        ]

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF  # type: ignore[attr-defined]


class Owner:
    """Takes what is heard, and stands for all that a stream's messages are told to."""

    num_running = 1
    is_heard = False
    is_reached = True

    def __init__(self) -> None:
        self.told: list[int] = []
        self.num_heard = 0

    def heard(self) -> None:
        self.num_heard += 1

    def repeated(self, number: int) -> None:
        pass

    def on_heard(self, node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        pass

    def on_for_others(self, node: Incarnation, message: pb.NodeMessage) -> None:
        pass

    def on_outputs(self, node: Incarnation, outputs: Sequence[RequestOutput]) -> None:
        self.told += [output.first_index for output in outputs]


def outputs(first: int, count: int) -> list[RequestOutput]:
    return [RequestOutput(id=AttemptId("r", 1), first_index=first + at) for at in range(count)]


def messages_of(owner: Owner) -> NodeMessages:
    anything: Any = owner
    return NodeMessages(NODE, anything, anything, anything, owner.on_outputs)


async def test_few_outputs_are_behind_many_that_came_before_them() -> None:
    owner = Owner()
    heard = messages_of(owner)
    sizes = (FEW_OUTPUTS, FEW_OUTPUTS + 1, 1, FEW_OUTPUTS)
    await heard.read(Stream(*sizes))
    assert owner.told == list(range(FEW_OUTPUTS)), "few that wait for none are told at once"
    await heard.pass_on()
    assert owner.told == list(range(sum(sizes)))
    assert not heard.has_outputs


async def test_a_node_counts_as_heard_while_its_burst_is_passed_on() -> None:
    """Nothing is read from it meanwhile."""
    owner = Owner()
    heard = messages_of(owner)
    await heard.read(Stream(3 * OUTPUTS_AT_ONCE))
    num_read = owner.num_heard
    await heard.pass_on()
    assert owner.num_heard == num_read + 3


async def test_the_end_of_a_wait_is_not_lost() -> None:
    heard = messages_of(Owner())
    waiting = asyncio.create_task(heard.pass_on())
    await asyncio.sleep(0)
    assert not waiting.done()
    heard.wake()
    await waiting
