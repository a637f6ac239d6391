"""One router gives nodes other roles: what it tells them, and what others and late ones may not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import (
    DeadlineExceeded,
    Draining,
    LastInRole,
    PdserveError,
    PlacementUnavailable,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from common.observing.lasting_failure import SECONDS_PER_WARNING
from placement.store import Leadership, RoleMove
from router.cluster.role_keeper import RoleKeeper
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_server import eventually
from tests.support.nodes.fluid_cluster import (
    PREFILL_SPEED,
    READ_S,
    TARGETS,
    FluidCluster,
)
from tests.support.stores.memory_store import MemoryStore

R1, R2 = Incarnation("r1", 1), Incarnation("r2", 1)
LEASE_S = 5.0


class Store(MemoryStore):
    """May be away, and lets a test act between two calls of a router."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.is_away = False
        self.after_begun: Callable[[], Awaitable[None]] | None = None
        self.before_end: Callable[[], Awaitable[None]] | None = None

    async def lead(self, router: Incarnation, *, lease_s: float) -> Leadership:
        self._require()
        return await super().lead(router, lease_s=lease_s)

    async def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role
    ) -> RoleMove | None:
        self._require()
        begun = await super().begin_move(router, node, role)
        if begun is not None and self.after_begun is not None:
            hook, self.after_begun = self.after_begun, None
            await hook()
        return begun

    async def end_move(self, router: Incarnation, number: int) -> bool:
        if self.before_end is not None:
            hook, self.before_end = self.before_end, None
            await hook()
        return await super().end_move(router, number)

    def _require(self) -> None:
        if self.is_away:
            raise PlacementUnavailable("it is away")


class Nodes:
    """The nodes of a fluid cluster, as routers see them; they check numbers as nodes do."""

    def __init__(self, water: FluidCluster) -> None:
        self.water = water
        self.told: list[tuple[Incarnation, Role, int]] = []
        self.error: PdserveError | None = None
        self._numbers: dict[Incarnation, int] = {}
        self.changes = ChangesUnderWay()
        self.refused: list[Incarnation] = []
        self.is_store_away = False

    def nodes(self) -> Sequence[NodeView]:
        return [node.view() for node in self.water.nodes]

    def is_member(self, node: Incarnation) -> bool:
        return any(one.record.incarnation == node for one in self.water.nodes)

    async def wait_heard(self) -> None:
        await asyncio.sleep(0)

    async def set_role(
        self,
        node: Incarnation,
        role: Role,
        *,
        number: int = 0,
        others: Sequence[str] | None = None,
    ) -> Role:
        if self.error is not None:
            raise self.error
        last, earlier = self._numbers.get(node, 0), self.role_of(node)
        if number < last:
            raise StaleEpoch("an old one")
        self._numbers[node] = number
        if number == last:
            return earlier
        named = [one.record for one in self.nodes() if one.record.node_id in (others or ())]
        if others is not None and all(one.role is role for one in named):
            self.refused.append(node)
            raise LastInRole("no other node does what it does")
        self.told.append((node, role, number))
        self.give(node, role)
        return earlier

    def role_of(self, node: Incarnation) -> Role:
        (found,) = (one.record for one in self.nodes() if one.incarnation == node)
        return found.role

    def give(self, node: Incarnation, role: Role) -> None:
        (found,) = (one for one in self.water.nodes if one.record.incarnation == node)
        found.record = replace(found.record, role=role)


class World:
    """Two routers on one store and one cluster: prompts queue, so prefill is short of nodes."""

    def __init__(self, *, auto_roles: bool = True, num_decode: int = 6) -> None:
        self.clock = ManualClock(100.0)
        self.store = Store(self.clock)
        self.nodes = Nodes(FluidCluster(2, num_decode))
        self.registries = {R1: CollectorRegistry(), R2: CollectorRegistry()}
        self.keepers = {
            router: RoleKeeper(
                self.store,
                self.nodes,
                TARGETS,
                registry=registry,
                lease_s=LEASE_S,
                clock=self.clock,
                auto_roles=auto_roles,
            )
            for router, registry in self.registries.items()
        }

    def flow(self) -> None:
        """Let the time of a reading pass."""
        self.clock.advance(READ_S)
        self.nodes.water.flow(4 * PREFILL_SPEED, 100)

    async def run(self, num_turns: int, *routers: Incarnation) -> None:
        for _ in range(num_turns):
            self.flow()
            for router in routers:
                await self.keepers[router].turn(router)

    async def run_until_begun(self) -> None:
        """Let R1 lead until it has begun a change, and stop it there, for ever."""

        async def stop() -> None:
            raise asyncio.CancelledError

        self.store.after_begun = stop
        with suppress(asyncio.CancelledError):
            await self.run(100, R1)
            raise AssertionError("nothing was begun")

    def metric(self, router: Incarnation, name: str, **labels: str) -> float:
        value = self.registries[router].get_sample_value(name, labels)
        assert value is not None
        return value


async def test_the_leader_changes_roles_and_the_other_router_does_not() -> None:
    world = World()
    await world.run(60, R1, R2)
    assert {role for _, role, _ in world.nodes.told} == {Role.PREFILL}
    assert len(world.nodes.told) >= 3
    numbers = [number for _, _, number in world.nodes.told]
    assert numbers == sorted(set(numbers))
    first, second = (world.keepers[router].scaling() for router in (R1, R2))
    assert (first["leader"], second["leader"]) == ("r1", "r1")
    assert [one["role"] for one in first["changes"]] == ["prefill"] * len(world.nodes.told)
    assert second["changes"] == []
    assert world.metric(R1, "pdserve_scaling_leader") == 1
    assert world.metric(R2, "pdserve_scaling_leader") == 0
    assert world.metric(R1, "pdserve_role_changes_total", role="prefill") == len(numbers)


async def test_without_automatic_roles_nothing_changes_and_it_says_what_is_wanted() -> None:
    world = World(auto_roles=False)
    await world.run(60, R1, R2)
    assert world.nodes.told == []
    answer = world.keepers[R1].scaling()
    assert (answer["auto_roles"], answer["leader"]) == (False, None)
    assert answer["roles"]["prefill"]["desired"] >= 5
    assert (await world.store.lead(R2, lease_s=1)).leader == R2, "it took no lease"


async def test_metrics_and_the_answer_agree() -> None:
    world = World()
    for _ in range(40):
        await world.run(1, R1)
        for role, found in world.keepers[R1].scaling()["roles"].items():
            for name in ("nodes", "needed", "desired"):
                metric = f"pdserve_scaling_{name}" + ("" if name == "nodes" else "_nodes")
                assert world.metric(R1, metric, role=role) == found[name]


@pytest.mark.covers("F147")
@pytest.mark.parametrize("auto_roles", [False, True])
async def test_what_is_wanted_stays_while_the_store_is_away(auto_roles: bool) -> None:
    world = World(auto_roles=auto_roles)
    await world.run(20, R1)
    metrics = [f"pdserve_scaling_{name}_nodes" for name in ("needed", "desired")]

    def wanted() -> list[float]:
        return [
            world.metric(R1, one, role=role) for one in metrics for role in ("prefill", "decode")
        ]

    before = wanted()
    assert min(before) > 0
    world.store.is_away = world.nodes.is_store_away = True
    for node in world.nodes.water.nodes:
        node.is_listed = False
    await world.run(60, R1)
    assert wanted() == before
    assert world.keepers[R1].scaling()["next"] == "the placement store is away"


async def test_a_change_is_in_the_log_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    await world.run(20, R1)
    lines = [one.message for one in caplog.records if "becomes a prefill node" in one.message]
    assert lines
    assert "it was a decode node: prefill needs" in lines[0]
    assert "prompt tokens/s arrive" in lines[0]


async def test_without_the_store_nothing_is_decided(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.store.is_away = True
    turns_per_warning = round(SECONDS_PER_WARNING / READ_S)
    await world.run(turns_per_warning, R1)
    assert world.nodes.told == []
    assert world.keepers[R1].scaling()["leader"] is None
    assert len([r for r in caplog.records if "no role is changed until" in r.message]) == 1
    await world.run(2, R1)
    assert len([r for r in caplog.records if "no role is changed until" in r.message]) == 2
    world.store.is_away = False
    await world.run(2, R1)
    assert world.nodes.told == [], "it waits as after a change"
    await world.run(30, R1)
    assert world.nodes.told


async def test_a_router_frozen_past_its_lease_changes_nothing_when_it_wakes() -> None:
    world = World()
    await world.run(3, R1)
    world.clock.advance(LEASE_S + 1)
    await world.run(30, R2)
    told = list(world.nodes.told)
    assert told
    decided = world.keepers[R1]
    # It believes to lead: it asks for a change as if its lease had been renewed a moment ago.
    assert (
        await world.store.begin_move(
            R1, world.nodes.water.nodes[-1].record.incarnation, Role.PREFILL
        )
        is None
    )
    await decided.turn(R1)
    assert decided.scaling()["leader"] == "r2"
    assert world.nodes.told == told


async def test_the_next_leader_ends_the_change_of_one_that_was_frozen_in_it() -> None:
    world = World()
    await world.run_until_begun()
    assert world.nodes.told == []
    world.clock.advance(LEASE_S + 1)
    await world.run(1, R2)
    ((node, role, number),) = world.nodes.told
    world.clock.advance(100)
    await world.run(30, R2)
    assert len(world.nodes.told) > 1
    told = list(world.nodes.told)
    # The first one wakes and tells the node: it has the role already, or a later change.
    await world.nodes.set_role(node, role, number=number)
    assert world.nodes.told == told


async def test_a_change_that_two_routers_told_is_counted_by_the_one_that_ends_it() -> None:
    world = World()

    async def freeze() -> None:
        """Until another router leads and has ended the change."""
        world.clock.advance(LEASE_S + 1)
        await world.run(1, R2)

    world.store.before_end = freeze
    while not world.nodes.told:
        await world.run(1, R1)
    assert len(world.nodes.told) == 1
    counted = [
        world.metric(router, "pdserve_role_changes_total", role="prefill") for router in (R1, R2)
    ]
    assert counted == [0, 1]
    assert world.keepers[R1].scaling()["changes"] == []
    assert len(world.keepers[R2].scaling()["changes"]) == 1


async def test_no_change_begins_while_the_node_of_one_does_not_answer() -> None:
    world = World()
    world.nodes.error = DeadlineExceeded("no answer")
    await world.run(60, R1)
    assert world.nodes.told == []
    begun = (await world.store.lead(R1, lease_s=LEASE_S)).last_move
    assert begun is not None
    assert begun.is_open
    world.nodes.error = None
    await world.run(1, R1)
    assert world.nodes.told == [(begun.node, begun.role, begun.number)]
    (change,) = world.keepers[R1].scaling()["changes"]
    assert "prefill needs" in change["why"], "what it was begun for"


async def test_a_change_of_a_node_that_has_left_is_over() -> None:
    world = World()
    await world.run_until_begun()
    begun = (await world.store.lead(R1, lease_s=LEASE_S)).last_move
    assert begun is not None
    world.nodes.water.nodes = [
        one for one in world.nodes.water.nodes if one.record.incarnation != begun.node
    ]
    await world.run(60, R1)
    assert world.nodes.told
    assert all(node != begun.node for node, _, _ in world.nodes.told)


async def test_a_node_that_refuses_keeps_its_role_and_ends_the_change() -> None:
    world = World()
    world.nodes.error = Draining("it leaves")
    await world.run(20, R1)
    begun = (await world.store.lead(R1, lease_s=LEASE_S)).last_move
    assert begun is not None
    assert not begun.is_open
    assert world.keepers[R1].scaling()["changes"] == []


async def test_a_router_that_ends_leaves_the_lease() -> None:
    world = World()
    running = asyncio.create_task(world.keepers[R1].run(R1))
    await eventually(lambda: world.keepers[R1].scaling()["leader"] == "r1")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await world.store.lead(R2, lease_s=LEASE_S)).leader == R2


async def test_no_change_begins_while_one_that_a_person_asked_for_is_under_way() -> None:
    world = World()
    changes, first = world.nodes.changes, world.nodes.water.nodes[-1]
    with changes.of_role():
        await world.run(30, R1)
        assert world.nodes.told == []
    with changes.of_leaving([], first.record.incarnation):
        pass  # it was told to leave, and says so later
    await world.run(30, R1)
    assert world.nodes.told == []
    first.is_draining = True
    await world.run(2, R1)
    assert world.nodes.told


async def test_a_change_whose_node_has_become_the_last_in_its_role_is_over() -> None:
    world = World(num_decode=2)
    await world.run_until_begun()
    begun = (await world.store.lead(R1, lease_s=LEASE_S)).last_move
    assert begun is not None
    for node in world.nodes.nodes():
        if node.record.role is Role.DECODE and node.incarnation != begun.node:
            world.nodes.give(node.incarnation, Role.PREFILL)
    world.clock.advance(LEASE_S + 1)
    await world.run(1, R2)
    assert (world.nodes.refused, world.nodes.told) == ([begun.node], [])
    last = (await world.store.lead(R2, lease_s=LEASE_S)).last_move
    assert last is not None
    assert (last.number, last.is_open) == (begun.number, False)
    # The first one wakes, and tells the node, while others decode again.
    await world.nodes.set_role(begun.node, begun.role, number=begun.number, others=["n0"])
    assert world.nodes.told == []


async def test_the_only_node_left_is_given_the_role_in_which_it_answers() -> None:
    world = World()
    world.nodes.water.nodes = world.nodes.water.of(Role.PREFILL)[:1]
    await world.run(60, R1)
    ((told, role, _),) = world.nodes.told
    assert (told, role) == (world.nodes.nodes()[0].incarnation, Role.DECODE)
    assert [one["role"] for one in world.keepers[R1].scaling()["changes"]] == ["decode"]


async def test_what_another_router_was_asked_for_since_a_change_has_begun_counts() -> None:
    world = World(num_decode=2)

    async def ask() -> None:
        """Ask another router for the other decode node to become a prefill node."""
        begun = (await world.store.lead(R1, lease_s=LEASE_S)).last_move
        assert begun is not None
        decoding = [one for one in world.nodes.nodes() if one.record.role is Role.DECODE]
        (other,) = (one.incarnation for one in decoding if one.incarnation != begun.node)
        world.nodes.give(other, Role.PREFILL)

    world.store.after_begun = ask
    await world.run(8, R1)
    assert len(world.nodes.refused) == 1
    assert world.nodes.role_of(world.nodes.refused[0]) is Role.DECODE


async def test_a_change_takes_two_questions_of_the_store() -> None:
    world, asked = World(), list[str]()
    for name in ("begin_move", "end_move"):
        asks = getattr(world.store, name)

        async def ask(*args: Any, name: str = name, asks: Any = asks) -> Any:
            asked.append(name)
            return await asks(*args)

        setattr(world.store, name, ask)
    while not world.nodes.told:
        await world.run(1, R1)
    assert asked == ["begin_move", "end_move"]
