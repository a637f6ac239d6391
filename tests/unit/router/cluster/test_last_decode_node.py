"""Persons ask several routers for roles: one node decodes on, whatever each router knows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from common.errors import NodeLost
from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from router.cluster.role import MovedNode, give_role
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from router.http.errors import ApiError
from tests.support.nodes.node_views import node

NAMES = ("d0", "d1", "d2")


class Store:
    """What nodes say of themselves; each writes its new role before it answers."""

    def __init__(self, num_nodes: int) -> None:
        self.roles = dict.fromkeys(NAMES[:num_nodes], Role.DECODE)
        self.told: list[tuple[str, Role]] = []

    def decoding(self) -> set[str]:
        return {name for name, role in self.roles.items() if role is not Role.PREFILL}


class Pool:
    """What one router knows: what the store listed when it was asked last."""

    def __init__(self, store: Store) -> None:
        self.membership = self
        self.changes = ChangesUnderWay()
        self.is_lost = False
        self._store, self._known = store, dict(store.roles)

    def records(self) -> list[NodeRecord]:
        return [view.record for view in self.nodes()]

    def nodes(self) -> list[NodeView]:
        views = [node(name) for name in self._known]
        roles = self._known
        return [
            replace(one, record=replace(one.record, role=roles[one.record.node_id]))
            for one in views
        ]

    async def wait_refreshed(self) -> None:
        asked = dict(self._store.roles)
        await asyncio.sleep(0)
        self._known = asked

    async def set_role(self, one: Incarnation, role: Role) -> None:
        with self.changes.of_role(one, role):
            await asyncio.sleep(0)
            if self.is_lost:
                raise NodeLost("it does not answer")
            self._store.roles[one.node_id] = role
            self._store.told.append((one.node_id, role))
            await asyncio.sleep(0)
        self._known[one.node_id] = role


def routers(store: Store, number: int = 2) -> list[Any]:
    return [Pool(store) for _ in range(number)]


async def test_a_role_that_another_router_has_just_given_counts() -> None:
    store = Store(2)
    first, second = routers(store)
    await give_role(first, "d0", Role.PREFILL)
    assert {one.node_id: one.role for one in second.records()}["d0"] is Role.DECODE
    with pytest.raises(ApiError, match="without d1 no node would decode"):
        await give_role(second, "d1", Role.PREFILL)
    assert store.told == [("d0", Role.PREFILL)], "the last one was not even asked"


async def test_the_role_until_now_is_that_which_another_router_has_given() -> None:
    first, second = routers(Store(3))
    await give_role(first, "d0", Role.MIXED)
    moved = await give_role(second, "d0", Role.PREFILL)
    assert (moved.earlier, moved.role) == (Role.MIXED, Role.PREFILL)


@pytest.mark.parametrize("num_nodes", [2, 3])
async def test_of_the_last_ones_that_are_changed_at_the_same_moment_one_decodes(
    num_nodes: int,
) -> None:
    store = Store(num_nodes)
    changes = [
        give_role(pool, name, Role.PREFILL)
        for pool, name in zip(routers(store, num_nodes), NAMES, strict=False)
    ]
    found = await asyncio.gather(*changes, return_exceptions=True)
    assert store.decoding()
    refused = {name for name, one in zip(NAMES, found, strict=False) if isinstance(one, ApiError)}
    assert refused == store.decoding(), "who is refused finds the node as it was"
    assert all(isinstance(one, MovedNode | ApiError) for one in found)


async def test_a_change_that_is_taken_back_gives_the_role_that_was_there() -> None:
    store = Store(2)
    first, second = routers(store)
    await give_role(first, "d1", Role.MIXED)
    changes = (give_role(first, "d0", Role.PREFILL), give_role(second, "d1", Role.PREFILL))
    found = await asyncio.gather(*changes, return_exceptions=True)
    assert isinstance(found[1], ApiError)
    assert (found[1].status, found[1].code) == (409, "last_decode_node")
    assert store.roles["d1"] is Role.MIXED


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
async def test_no_other_role_takes_a_node_away_and_the_store_is_not_asked(role: Role) -> None:
    store = Store(1)
    (pool,) = routers(store, 1)
    pool.wait_refreshed = None
    assert (await give_role(pool, "d0", role)).role is role


async def test_a_node_that_does_not_answer_is_not_told_again() -> None:
    (pool,) = routers(Store(2), 1)
    pool.is_lost = True
    with pytest.raises(NodeLost):
        await give_role(pool, "d0", Role.PREFILL)
