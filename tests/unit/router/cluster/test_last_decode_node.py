"""Persons ask several routers for roles: one node decodes on, whatever each router knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.errors import NodeLost, PlacementUnavailable
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from node.control.drain import NodeDrain
from node.control.role import NodeRole
from node.life.lease_keeper import LeaseKeeper
from router.cluster.role import MovedNode, give_role
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from router.http.errors import ApiError
from tests.support.clocks.manual_clock import ManualClock
from tests.support.nodes.node_records import record
from tests.support.nodes.node_views import node
from tests.support.stores.memory_store import MemoryStore

NAMES = ("d0", "d1", "d2")


class Store(MemoryStore):
    """Answers a moment later; it may be away."""

    is_away = False

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        self._require()
        await super().heartbeat(record, load, lease_s=lease_s)

    async def take_role(
        self, record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        await asyncio.sleep(0)
        self._require()
        found = await super().take_role(record, load, lease_s=lease_s, others=others)
        await asyncio.sleep(0)
        return found

    def roles(self) -> dict[str, Role]:
        return {name: held[0].record.role for name, held in self.nodes.items()}

    def _require(self) -> None:
        if self.is_away:
            raise PlacementUnavailable("no answer in 0.5 s")


class Node:
    """A decode node with its lease."""

    def __init__(self, store: Store, name: str) -> None:
        leaving = asyncio.Event()
        self.role = NodeRole(Role.DECODE, NodeDrain(leaving, timeout_s=1.0), {})
        self.load = node(name).load
        self.keeper = LeaseKeeper(
            *(store, lambda: record(name, self.role.current), lambda: self.load),
            lease_s=100.0,
            clock=ManualClock(),
        )
        self.role.on_change(
            lambda: None,
            self.keeper.renew,
            lambda role, others: self.keeper.claim(record(name, role), others),
        )


class World:
    """Decode nodes, and routers that know them all as such for ever."""

    def __init__(self, num_nodes: int) -> None:
        self.store = Store(ManualClock())
        self.nodes = {name: Node(self.store, name) for name in NAMES[:num_nodes]}

    async def start(self, num_routers: int) -> list[Any]:
        for one in self.nodes.values():
            await one.keeper.renew()
        return [Pool(self) for _ in range(num_routers)]

    def roles(self) -> dict[str, Role]:
        """The roles of the nodes, which are those that the store has."""
        roles = {name: one.role.current for name, one in self.nodes.items()}
        assert roles == self.store.roles()
        return roles

    def decoding(self) -> set[str]:
        return {name for name, role in self.roles().items() if role is not Role.PREFILL}


class Pool:
    """What one router knows."""

    def __init__(self, world: World) -> None:
        self.membership = self
        self.changes = ChangesUnderWay()
        self.is_lost = False
        self.others: list[Sequence[str] | None] = []
        self._world = world

    def records(self) -> list[NodeRecord]:
        return [view.record for view in self.nodes()]

    def nodes(self) -> list[NodeView]:
        return [node(name) for name in self._world.nodes]

    async def set_role(
        self, one: Incarnation, role: Role, *, others: Sequence[str] | None = None
    ) -> Role:
        self.others.append(others)
        await asyncio.sleep(0)
        if self.is_lost:
            raise NodeLost("it does not answer")
        return await self._world.nodes[one.node_id].role.change(role, 0, others)


async def test_a_role_that_another_router_has_just_given_counts() -> None:
    world = World(2)
    first, second = await world.start(2)
    await give_role(first, "d0", Role.PREFILL)
    with pytest.raises(ApiError, match="without d1 no node would decode") as refused:
        await give_role(second, "d1", Role.PREFILL)
    assert (refused.value.status, refused.value.code) == (409, "last_decode_node")
    assert world.decoding() == {"d1"}
    await give_role(first, "d0", Role.MIXED)
    assert (await give_role(second, "d1", Role.PREFILL)).role is Role.PREFILL
    assert world.decoding() == {"d0"}


async def test_the_role_until_now_is_that_which_another_router_has_given() -> None:
    first, second = await World(3).start(2)
    await give_role(first, "d0", Role.MIXED)
    moved = await give_role(second, "d0", Role.PREFILL)
    assert (moved.earlier, moved.role) == (Role.MIXED, Role.PREFILL)


@pytest.mark.parametrize("num_nodes", [2, 3])
async def test_of_the_last_ones_that_are_changed_at_the_same_moment_one_decodes(
    num_nodes: int,
) -> None:
    world = World(num_nodes)
    pools = await world.start(num_nodes)
    names = NAMES[:num_nodes]
    changes = [give_role(pool, name, Role.PREFILL) for pool, name in zip(pools, names, strict=True)]
    found = await asyncio.gather(*changes, return_exceptions=True)
    refused = [name for name, one in zip(names, found, strict=True) if isinstance(one, ApiError)]
    assert len(refused) == 1, "no more are refused than have to be"
    assert set(refused) == world.decoding()
    assert all(isinstance(one, MovedNode | ApiError) for one in found)


async def test_a_change_that_is_refused_undoes_none_that_a_third_router_makes() -> None:
    world = World(2)
    first, second, third = await world.start(3)
    await give_role(first, "d0", Role.PREFILL)
    changes = (give_role(second, "d1", Role.PREFILL), give_role(third, "d1", Role.MIXED))
    found = await asyncio.gather(*changes, return_exceptions=True)
    assert isinstance(found[0], ApiError)
    assert world.roles() == {"d0": Role.PREFILL, "d1": Role.MIXED}


async def test_without_the_store_no_node_is_taken_from_those_that_decode() -> None:
    world = World(3)
    (pool,) = await world.start(1)
    world.store.is_away = True
    with pytest.raises(PlacementUnavailable, match=r"decode node keeps its role.*0\.5 s"):
        await give_role(pool, "d0", Role.PREFILL)
    assert world.decoding() == set(NAMES)
    assert (await give_role(pool, "d0", Role.MIXED)).role is Role.MIXED
    world.store.is_away = False
    await give_role(pool, "d0", Role.PREFILL)
    assert world.nodes["d0"].role.current is Role.PREFILL


async def test_a_node_that_leaves_is_not_counted_on() -> None:
    world = World(3)
    first, second = await world.start(2)
    with first.changes.of_leaving([], Incarnation("d1", 1)):
        pass
    world.nodes["d2"].load = replace(world.nodes["d2"].load, is_draining=True)
    await world.nodes["d2"].keeper.renew()
    with pytest.raises(ApiError):
        await give_role(first, "d0", Role.PREFILL)
    await give_role(second, "d0", Role.PREFILL)
    with pytest.raises(ApiError):
        await give_role(second, "d1", Role.PREFILL)


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
async def test_no_other_role_takes_a_node_away(role: Role) -> None:
    (pool,) = await World(1).start(1)
    assert (await give_role(pool, "d0", role)).role is role
    assert pool.others == [None]


async def test_a_node_that_does_not_answer_is_not_told_again() -> None:
    (pool,) = await World(2).start(1)
    pool.is_lost = True
    with pytest.raises(NodeLost):
        await give_role(pool, "d0", Role.PREFILL)
    assert pool.others == [["d1"]]
