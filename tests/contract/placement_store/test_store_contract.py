"""What every placement store does; the Redis store is tried against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import StaleEpoch
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from placement.store import PlacementStore
from tests.contract.placement_store.worlds import (
    World,
    load,
    place,
    placement,
    record,
    unplace,
)


async def test_epochs_rise_for_every_caller(world: World) -> None:
    epochs = [
        await world.first.next_epoch("a"),
        await world.second.next_epoch("a"),
        await world.first.next_epoch("a"),
    ]
    assert epochs == sorted(set(epochs))
    assert epochs[0] >= 1


async def test_epochs_asked_for_at_once_differ(world: World) -> None:
    stores = [world.first, world.second] * 10
    epochs = await asyncio.gather(*(store.next_epoch("a") for store in stores))
    assert len(set(epochs)) == len(epochs)


async def test_epochs_rise_over_an_emptied_store(world: World) -> None:
    before = await world.first.next_epoch("a")
    world.empty()
    assert await world.second.next_epoch("a") > before


async def test_a_heartbeat_registers_with_everything_it_carries(world: World) -> None:
    await world.first.heartbeat(record(), load(3, is_draining=True), lease_s=100)
    (node,) = await world.second.live_nodes()
    assert node.record == record()
    assert node.load == load(3, is_draining=True)


async def test_live_nodes_are_ordered_by_node_id(world: World) -> None:
    for node_id in ("c", "a", "b"):
        await world.first.heartbeat(record(node_id), load(), lease_s=100)
    nodes = await world.first.live_nodes()
    assert [node.record.incarnation.node_id for node in nodes] == ["a", "b", "c"]


async def test_a_listing_of_many_nodes_has_them_all(world: World) -> None:
    """More than one call reads; what is no record is skipped wherever it is."""
    names = [f"n{number:03}" for number in range(300)]
    for number, node_id in enumerate(names):
        await world.first.heartbeat(record(node_id), load(number % 5), lease_s=50)
    nodes = await world.second.live_nodes()
    assert [node.record.node_id for node in nodes] == names
    assert [node.load for node in nodes] == [load(number % 5) for number in range(300)]


async def test_what_is_left_of_a_lease_is_told(world: World) -> None:
    assert await world.first.lease_left_s("decode-0") == 0
    await world.first.heartbeat(record(epoch=4), load(), lease_s=100)
    world.advance(40)
    assert 0 < await world.second.lease_left_s("decode-0") <= 60
    await world.first.heartbeat(record(epoch=4), load(), lease_s=100)
    assert 60 < await world.second.lease_left_s("decode-0") <= 100
    world.advance(120)
    assert await world.first.lease_left_s("decode-0") == 0


async def test_a_silent_node_is_gone_after_its_lease_and_a_heard_one_stays(world: World) -> None:
    await world.first.heartbeat(record("silent"), load(), lease_s=100)
    await world.first.heartbeat(record("heard"), load(), lease_s=100)
    world.advance(80)
    await world.first.heartbeat(record("heard"), load(), lease_s=100)
    world.advance(40)
    nodes = await world.first.live_nodes()
    assert [node.record.incarnation.node_id for node in nodes] == ["heard"]


@pytest.mark.covers("F66")
async def test_the_newer_incarnation_takes_the_lease(world: World) -> None:
    await world.first.heartbeat(record(epoch=4), load(), lease_s=100)
    await world.second.heartbeat(record(epoch=5, role=Role.MIXED), load(), lease_s=100)
    (node,) = await world.first.live_nodes()
    assert node.record == record(epoch=5, role=Role.MIXED)


@pytest.mark.covers("F66", "F75")
async def test_an_older_incarnation_is_refused_and_changes_nothing(world: World) -> None:
    """A late write of a node that was replaced."""
    await world.first.heartbeat(record(epoch=5), load(1), lease_s=100)
    with pytest.raises(StaleEpoch, match=r"decode-0#5 holds the lease of decode-0"):
        await world.second.heartbeat(record(epoch=4), load(7), lease_s=10_000)
    (node,) = await world.first.live_nodes()
    assert node.record.incarnation == Incarnation("decode-0", 5)
    assert node.load == load(1)
    world.advance(120)
    assert await world.first.live_nodes() == []


async def take(
    store: PlacementStore, node_id: str, role: Role, others: Sequence[str], epoch: int = 1
) -> bool:
    mine = record(node_id, epoch, role)
    return await store.take_role(mine, load(3), lease_s=100, others=others)


async def roles(world: World) -> dict[str, Role]:
    return {one.record.node_id: one.record.role for one in await world.first.live_nodes()}


async def test_a_role_is_taken_if_another_node_stays_in_the_one_that_is_left(world: World) -> None:
    for name, role in (("d0", Role.DECODE), ("d1", Role.DECODE), ("p0", Role.PREFILL)):
        await world.first.heartbeat(record(name, role=role), load(), lease_s=100)
    assert await take(world.first, "d0", Role.PREFILL, ["p0", "d1"])
    assert await roles(world) == {"d0": Role.PREFILL, "d1": Role.DECODE, "p0": Role.PREFILL}
    assert not await take(world.second, "d1", Role.PREFILL, ["p0", "d0", "nobody"])
    assert not await take(world.second, "d1", Role.PREFILL, [])
    assert (await roles(world))["d1"] is Role.DECODE
    assert await take(world.second, "d0", Role.MIXED, ["p0"])
    assert await take(world.second, "d1", Role.PREFILL, ["d0"]), "a mixed one decodes too"
    (load_of_d1,) = (n.load for n in await world.first.live_nodes() if n.record.node_id == "d1")
    assert load_of_d1 == load(3)


async def test_a_node_that_drains_or_has_no_lease_does_not_stay(world: World) -> None:
    await world.first.heartbeat(record("d1"), load(is_draining=True), lease_s=1000)
    await world.first.heartbeat(record("d2"), load(), lease_s=10)
    assert await take(world.first, "d0", Role.PREFILL, ["d1", "d2"])
    world.advance(20)
    assert not await take(world.first, "d0", Role.PREFILL, ["d1", "d2"])


async def test_a_role_that_is_taken_renews_the_lease(world: World) -> None:
    await world.first.heartbeat(record("d1"), load(), lease_s=1000)
    await world.first.heartbeat(record("d0"), load(), lease_s=100)
    world.advance(60)
    assert await take(world.first, "d0", Role.PREFILL, ["d1"])
    world.advance(60)
    assert (await roles(world))["d0"] is Role.PREFILL
    world.advance(60)
    assert "d0" not in await roles(world)


async def test_an_older_incarnation_takes_no_role(world: World) -> None:
    await world.first.heartbeat(record("d1"), load(), lease_s=100)
    await world.first.heartbeat(record("d0", 5), load(), lease_s=100)
    with pytest.raises(StaleEpoch, match=r"d0#5 holds the lease of d0"):
        await take(world.second, "d0", Role.PREFILL, ["d1"], epoch=4)
    assert (await roles(world))["d0"] is Role.DECODE


async def test_of_the_last_ones_that_take_a_role_at_once_one_stays(world: World) -> None:
    names = [f"d{number}" for number in range(20)]
    for name in names:
        await world.first.heartbeat(record(name), load(), lease_s=100)
    stores = [world.first, world.second] * 10
    taken = await asyncio.gather(
        *(
            take(store, name, Role.PREFILL, [one for one in names if one != name])
            for store, name in zip(stores, names, strict=True)
        )
    )
    assert sorted(taken) == [False] + [True] * 19
    decoding = [name for name, role in (await roles(world)).items() if role is Role.DECODE]
    assert decoding == [names[taken.index(False)]]


async def test_of_two_owners_at_once_the_newer_one_wins(world: World) -> None:
    async def beat(epoch: int) -> None:
        store = world.first if epoch % 2 else world.second
        await store.heartbeat(record(epoch=epoch), load(), lease_s=100)

    results = await asyncio.gather(*(beat(e) for e in range(1, 21)), return_exceptions=True)
    assert all(result is None or isinstance(result, StaleEpoch) for result in results)
    (node,) = await world.first.live_nodes()
    assert node.record.incarnation.epoch == 20


@pytest.mark.covers("F75")
async def test_only_the_holder_can_leave(world: World) -> None:
    """Compare the token, then act."""
    await world.first.heartbeat(record(epoch=5), load(), lease_s=100)
    await world.second.leave(Incarnation("decode-0", 4))
    await world.second.leave(Incarnation("decode-0", 6))
    assert len(await world.first.live_nodes()) == 1
    await world.second.leave(Incarnation("decode-0", 5))
    assert await world.first.live_nodes() == []


@pytest.mark.covers("F72", "F74")
async def test_a_node_registers_again_in_an_emptied_store(world: World) -> None:
    """The heartbeat carries the whole record."""
    await world.first.heartbeat(record(epoch=5), load(), lease_s=100)
    world.empty()
    assert await world.first.live_nodes() == []
    await world.first.heartbeat(record(epoch=5), load(2), lease_s=100)
    (node,) = await world.first.live_nodes()
    assert (node.record, node.load) == (record(epoch=5), load(2))


async def test_an_epoch_asked_for_while_the_lease_lives_is_above_it(world: World) -> None:
    epoch = await world.first.next_epoch("decode-0")
    await world.first.heartbeat(record(epoch=epoch), load(), lease_s=100)
    assert await world.second.next_epoch("decode-0") > epoch


async def test_placements_are_kept_with_everything_they_carry(world: World) -> None:
    first = placement("req-1")
    second = placement("req-2", 3, "r2")
    await place(world.second, second)
    await place(world.first, first)
    assert await world.first.placements() == [first, second]


async def test_placing_an_attempt_again_replaces_it(world: World) -> None:
    await place(world.first, placement())
    await place(world.first, placement(), ttl_s=600)
    world.advance(100)
    assert await world.first.placements() == [placement()]


async def test_only_the_router_that_placed_can_unplace(world: World) -> None:
    await place(world.first, placement(router_id="r1"))
    await unplace(world.second, AttemptId("req-1", 1), router_id="r2")
    await unplace(world.second, AttemptId("req-1", 2))
    assert await world.first.placements() == [placement(router_id="r1")]
    await unplace(world.second, AttemptId("req-1", 1))
    assert await world.first.placements() == []
    await unplace(world.second, AttemptId("req-1", 1))


async def test_many_changes_are_recorded_in_one_call(world: World) -> None:
    old, foreign = placement("req-1"), placement("req-2", 1, "r2")
    await place(world.first, old, ttl_s=600)
    await place(world.second, foreign, ttl_s=600)
    new = [placement(f"req-{number}") for number in (3, 4, 5)]
    gone = [AttemptId(f"req-{number}", 1) for number in (1, 2, 9)]
    await world.first.record(new, gone, router_id="r1", ttl_s=60)
    assert await world.second.placements() == [foreign, *new], "another router's record stays"
    world.advance(100)
    assert await world.first.placements() == [foreign]
    await world.first.record([], [], router_id="r1", ttl_s=60)


async def test_a_placement_of_a_dead_router_expires(world: World) -> None:
    await place(world.first, placement("req-1"), ttl_s=100)
    await place(world.first, placement("req-2"), ttl_s=300)
    world.advance(200)
    assert [p.attempt.choice_id for p in await world.first.placements()] == ["req-2"]
    world.advance(200)
    assert await world.first.placements() == []


async def test_two_routers_place_and_unplace_at_once(world: World) -> None:
    async def live(router_id: str, index: int) -> None:
        store = world.first if router_id == "r1" else world.second
        mine = placement(f"{router_id}-{index}", 1, router_id)
        await place(store, mine)
        if index % 2:
            await unplace(store, mine.attempt, router_id=router_id)

    # One store has 16 connections.
    await asyncio.gather(*(live(r, i) for r in ("r1", "r2") for i in range(16)))
    left = await world.first.placements()
    assert len(left) == 16
    assert {p.router_id for p in left} == {"r1", "r2"}


async def test_nothing_is_left_when_everybody_has_left(world: World) -> None:
    epoch = await world.first.next_epoch("decode-0")
    await world.first.heartbeat(record(epoch=epoch), load(), lease_s=100)
    await place(world.first, placement())
    await unplace(world.first, AttemptId("req-1", 1))
    await world.first.leave(Incarnation("decode-0", epoch))
    assert world.num_keys() == 0


async def test_nothing_is_left_of_a_router_that_only_took_an_epoch(world: World) -> None:
    epoch = await world.first.next_epoch("router-0")
    await world.first.leave(Incarnation("router-0", epoch))
    assert world.num_keys() == 0
