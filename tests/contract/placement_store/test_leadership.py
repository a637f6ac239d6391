"""One router leads, and one move of a role is allowed at a time, by every placement store."""

from __future__ import annotations

import asyncio

import pytest

from common.ids import Incarnation
from common.nodes import Role
from placement.store import PlacementRefused
from tests.contract.placement_store.worlds import RedisWorld, World, load, record

R1, R2, R1_AGAIN = Incarnation("r1", 1), Incarnation("r2", 1), Incarnation("r1", 2)
P0, D0 = Incarnation("p0", (1 << 53) - 1), Incarnation('d "0"', 2)


async def leader(world: World, router: Incarnation) -> Incarnation:
    return (await world.first.lead(router, lease_s=100)).leader


async def test_one_router_leads_until_its_lease_ends(world: World) -> None:
    assert await leader(world, R1) == R1
    assert (await world.second.lead(R2, lease_s=100)).leader == R1
    world.advance(60)
    assert await leader(world, R1) == R1
    world.advance(60)
    assert await leader(world, R2) == R1, "it was renewed"
    world.advance(120)
    assert await leader(world, R2) == R2
    assert await leader(world, R1) == R2


async def test_of_many_that_ask_at_once_one_leads(world: World) -> None:
    routers = [Incarnation(f"r{number}", 1) for number in range(20)]
    stores = [world.first, world.second] * 10
    asked = (store.lead(r, lease_s=100) for store, r in zip(stores, routers, strict=True))
    assert len({found.leader for found in await asyncio.gather(*asked)}) == 1


async def test_an_earlier_life_does_not_lead(world: World) -> None:
    await leader(world, R1)
    assert await leader(world, R1_AGAIN) == R1
    assert await world.first.begin_move(R1_AGAIN, P0, Role.DECODE) is None


async def test_a_router_that_stops_leaves_the_lease_to_the_next(world: World) -> None:
    await leader(world, R1)
    await world.first.stop_leading(R2)
    assert await leader(world, R2) == R1
    await world.first.stop_leading(R1)
    assert await leader(world, R2) == R2


async def test_moves_have_rising_numbers_and_one_is_open_at_a_time(world: World) -> None:
    await leader(world, R1)
    first = await world.first.begin_move(R1, P0, Role.DECODE)
    assert first is not None
    assert (first.node, first.role, first.is_open) == (P0, Role.DECODE, True)
    assert await world.first.begin_move(R1, D0, Role.PREFILL) is None
    assert await world.first.end_move(R1, first.number)
    assert (await world.first.lead(R1, lease_s=100)).last_move is not None
    second = await world.second.begin_move(R1, D0, Role.PREFILL)
    assert second is not None
    assert (second.node, second.role) == (D0, Role.PREFILL)
    assert second.number > first.number
    assert not await world.first.end_move(R1, first.number), "it is not the last one"


async def test_a_router_whose_lease_has_ended_may_begin_and_end_nothing(world: World) -> None:
    await leader(world, R1)
    move = await world.first.begin_move(R1, P0, Role.DECODE)
    assert move is not None
    world.advance(120)
    assert not await world.first.end_move(R1, move.number), "nobody leads"
    assert await world.first.begin_move(R1, D0, Role.PREFILL) is None
    await leader(world, R2)
    assert not await world.first.end_move(R1, move.number)
    assert await world.first.begin_move(R1, D0, Role.PREFILL) is None


async def test_the_next_leader_finds_the_open_move(world: World) -> None:
    await leader(world, R1)
    move = await world.first.begin_move(R1, P0, Role.DECODE)
    world.advance(120)
    found = await world.second.lead(R2, lease_s=100)
    assert (found.leader, found.last_move) == (R2, move)
    assert move is not None
    assert await world.second.begin_move(R2, D0, Role.PREFILL) is None
    assert await world.second.end_move(R2, move.number)
    assert await world.second.begin_move(R2, D0, Role.PREFILL) is not None


async def test_an_emptied_store_forgets_the_leader_and_no_number(world: World) -> None:
    await leader(world, R1)
    before = await world.first.begin_move(R1, P0, Role.DECODE)
    world.empty()
    assert await world.first.begin_move(R1, D0, Role.PREFILL) is None, "it does not lead"
    await leader(world, R2)
    after = await world.first.begin_move(R2, D0, Role.PREFILL)
    assert before is not None
    assert after is not None
    assert after.number > before.number


async def test_a_lease_that_is_none_of_ours_stays_in_no_role(redis_url: str) -> None:
    world = RedisWorld(redis_url)
    prefix = "pdserve:contract:node:"
    for name, value in (("a", "somebody"), ("b", "[1]"), ("c", '{"role": 7}')):
        world.client.set(prefix + name, value, px=60_000)
    world.client.lpush(prefix + "d", "x")
    mine = record(role=Role.PREFILL)
    names = ["a", "b", "c", "d"]
    assert not await world.first.take_role(mine, load(), lease_s=60, others=names)
    world.client.set(prefix + "e", '{"role": "decode", "load": 7}', px=60_000)
    assert await world.first.take_role(mine, load(), lease_s=60, others=[*names, "e"])
    await world.first.close()
    await world.second.close()
    world.client.close()


async def test_foreign_values_do_no_harm(redis_url: str) -> None:
    world = RedisWorld(redis_url)
    prefix = "pdserve:contract:"
    world.client.set(prefix + "leader", "somebody")
    world.client.lpush(prefix + "move", "a", "b")
    assert await leader(world, R1) == R1, "what has no expiry is no lease"
    assert await world.first.begin_move(R1, P0, Role.DECODE) is not None
    world.client.set(prefix + "move", "7 1 not json")
    world.client.set(prefix + "leader", "somebody", px=60_000)
    with pytest.raises(PlacementRefused):
        await world.first.lead(R1, lease_s=100)
    await world.first.close()
    await world.second.close()
    world.client.close()
