"""A burst of requests is planned in turns, so that its first requests do not wait for its last."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from router.api.planning.body_planner import BYTES_PER_TURN, LEAST_BYTES, PlanningTurns
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import ScriptedGenerator, says

SHORT_PER_TURN = BYTES_PER_TURN // LEAST_BYTES


class Turns:
    """Counts the turns of the event loop from its first use on."""

    def __init__(self) -> None:
        self.number = 0
        self._next()

    def _next(self) -> None:
        self.number += 1
        self.handle = asyncio.get_running_loop().call_soon(self._next)


async def planned_together(sizes: list[int]) -> list[int]:
    """How many bodies of these sizes are planned in each turn in which any is."""
    planning, turns = PlanningTurns(), Turns()
    order: list[int] = []

    async def plan(index: int) -> int:
        await planning.next(sizes[index])
        order.append(index)
        return turns.number

    found = await asyncio.gather(*(plan(index) for index in range(len(sizes))))
    turns.handle.cancel()
    assert order == sorted(order), "first come, first served"
    assert found == sorted(found)
    return list(Counter(found).values())


async def test_short_bodies_share_turns() -> None:
    together = await planned_together([1] * (3 * SHORT_PER_TURN + 1))
    assert together == [SHORT_PER_TURN, SHORT_PER_TURN, SHORT_PER_TURN, 1]


@pytest.mark.covers("F142")
async def test_a_long_body_has_a_turn_of_its_own() -> None:
    whole, half = BYTES_PER_TURN, BYTES_PER_TURN // 2
    assert await planned_together([1, whole, 1, 2 * whole, half, half, 1]) == [1, 1, 1, 1, 2, 1]


async def test_a_body_alone_waits_for_nothing() -> None:
    planning = PlanningTurns()
    for _ in range(3):
        waits = planning.next(BYTES_PER_TURN)
        with pytest.raises(StopIteration):
            waits.send(None)
        await asyncio.sleep(0)


async def test_a_request_that_ended_takes_no_place() -> None:
    planning, planned = PlanningTurns(), list[int]()

    async def plan(index: int) -> None:
        await planning.next(BYTES_PER_TURN)
        planned.append(index)

    tasks = [asyncio.create_task(plan(index)) for index in range(6)]
    await asyncio.sleep(0)
    for index in (1, 2, 5):
        tasks[index].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert planned == [0, 3, 4]
    await planning.next(BYTES_PER_TURN)


class NotingGenerator(ScriptedGenerator):
    """Notes the turn in which each choice starts."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(says("Hello"))
        self._turns = turns
        self.started = Counter[int]()

    def generate(self, *args: Any, **kwargs: Any) -> Callable[[], None]:
        self.started[self._turns.number] += 1
        return super().generate(*args, **kwargs)


@pytest.mark.covers("F142")
async def test_a_burst_of_requests_begins_in_turns() -> None:
    turns = Turns()
    generator = NotingGenerator(turns)
    edge = make_edge(generator=generator)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with edge.client() as client:
        posts = (client.post("/v1/chat/completions", json=body) for _ in range(40))
        answers = await asyncio.gather(*posts)
    turns.handle.cancel()
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(generator.started.values(), reverse=True) == [16, 16, 8]
