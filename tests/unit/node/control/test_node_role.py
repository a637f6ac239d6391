"""A node is given another role: what it refuses, and what it registers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import Draining, InvalidRequest, LastInRole, PlacementUnavailable, StaleEpoch
from common.nodes import Role
from node.control.drain import NodeDrain
from node.control.role import NodeRole

WHY = "start it with room for both"


class World:
    def __init__(self, *refused: Role) -> None:
        self.leaving = asyncio.Event()
        drain = NodeDrain(self.leaving, timeout_s=1.0)
        self.role = NodeRole(Role.PREFILL, drain, dict.fromkeys(refused, WHY))
        self.role.on_change(lambda: self.told.append("flow"), self._announce, self._claim)
        self.claimed: list[tuple[Role, Sequence[str]]] = []
        self.is_one_left: bool | PlacementUnavailable = True
        self.told: list[Role | str] = []
        self.may_tell = asyncio.Event()
        self.may_tell.set()

    async def _claim(self, role: Role, others: Sequence[str]) -> bool:
        self.claimed.append((role, others))
        if isinstance(self.is_one_left, PlacementUnavailable):
            raise self.is_one_left
        return self.is_one_left

    async def _announce(self) -> None:
        await self.may_tell.wait()
        self.told.append(self.role.current)


async def test_a_change_is_announced_once() -> None:
    world = World()
    assert await world.role.change(Role.DECODE) is Role.PREFILL
    assert await world.role.change(Role.DECODE) is Role.DECODE
    assert (world.role.current, world.told) == (Role.DECODE, ["flow", Role.DECODE])


async def test_changes_at_once_are_announced_one_behind_the_other() -> None:
    world = World()
    world.may_tell.clear()
    changes = [asyncio.create_task(world.role.change(role)) for role in (Role.DECODE, Role.MIXED)]
    await asyncio.sleep(0)
    world.may_tell.set()
    assert await asyncio.gather(*changes) == [Role.PREFILL, Role.DECODE]
    assert world.told == ["flow", Role.DECODE, "flow", Role.MIXED]


async def test_a_role_that_it_cannot_have_is_refused_with_what_would_help() -> None:
    world = World(Role.DECODE)
    assert world.role.possible == (Role.PREFILL, Role.MIXED)
    with pytest.raises(InvalidRequest, match=f"prefill node cannot become decode: {WHY}"):
        await world.role.change(Role.DECODE)
    assert (world.role.current, world.told) == (Role.PREFILL, [])


async def test_a_node_that_leaves_takes_no_other_role() -> None:
    world = World()
    world.leaving.set()
    assert await world.role.change(Role.PREFILL) is Role.PREFILL
    with pytest.raises(Draining):
        await world.role.change(Role.MIXED)
    assert (world.role.current, world.told) == (Role.PREFILL, [])


async def test_a_numbered_change_is_made_once_and_none_after_a_later_one() -> None:
    world = World()
    await world.role.change(Role.DECODE, 5)
    await world.role.change(Role.PREFILL)
    await world.role.change(Role.DECODE, 5)
    assert world.role.current is Role.PREFILL, "a person has changed it since"
    with pytest.raises(StaleEpoch, match="change 4 of this node's role is older than change 5"):
        await world.role.change(Role.DECODE, 4)
    await world.role.change(Role.PREFILL, 7)
    with pytest.raises(StaleEpoch):
        await world.role.change(Role.DECODE, 6)
    assert world.told == ["flow", Role.DECODE, "flow", Role.PREFILL], "it has the role already"


async def test_a_role_that_is_claimed_is_written_before_it_is_taken_and_once() -> None:
    world = World()
    assert await world.role.change(Role.DECODE, 3, ["p1"]) is Role.PREFILL
    assert world.claimed == [(Role.DECODE, ["p1"])]
    assert (world.role.current, world.told) == (Role.DECODE, ["flow"])
    assert await world.role.change(Role.DECODE, 4, []) is Role.DECODE
    assert len(world.claimed) == 1, "it has the role"


async def test_the_last_node_in_a_role_keeps_it_and_the_change_is_over() -> None:
    world = World()
    world.is_one_left = False
    with pytest.raises(LastInRole, match="prefill node keeps its role: no other node does"):
        await world.role.change(Role.DECODE, 3, ["p1"])
    with pytest.raises(LastInRole):
        await world.role.change(Role.MIXED, others=[])
    assert (world.role.current, world.told) == (Role.PREFILL, [])
    world.is_one_left = True
    with pytest.raises(LastInRole):  # also where the first answer was lost, or a router wakes
        await world.role.change(Role.DECODE, 3, ["p1"])
    assert (world.role.current, world.told) == (Role.PREFILL, [])
    await world.role.change(Role.DECODE, 4, ["p1"])
    assert (world.role.current, world.told) == (Role.DECODE, ["flow"])


async def test_where_the_store_is_away_the_role_stays_and_the_change_is_told_again() -> None:
    world = World()
    world.is_one_left = PlacementUnavailable("no answer in 0.5 s")
    with pytest.raises(PlacementUnavailable, match=r"keeps its role: whether .* no answer in 0.5"):
        await world.role.change(Role.DECODE, 3, ["p1"])
    assert (world.role.current, world.told) == (Role.PREFILL, [])
    world.is_one_left = True
    await world.role.change(Role.DECODE, 3, ["p1"])
    assert world.role.current is Role.DECODE
