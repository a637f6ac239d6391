"""The node's lease: renewed with its load, kept through an absent store, given up when fenced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from common.errors import ConfigError, Draining, PlacementUnavailable, StaleEpoch
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.lasting_failure import SECONDS_PER_WARNING
from node.life.lease_keeper import (
    RENEWALS_PER_LEASE,
    LeaseKeeper,
    refuse_second_life,
)
from placement.store import PlacementRefused
from tests.support.clocks.manual_clock import ManualClock
from tests.support.nodes.node_records import record
from tests.support.stores.memory_store import MemoryStore

LEASE_S = 4.0


class FlakyStore(MemoryStore):
    """A memory store that can be away, or refuse."""

    trouble: PlacementUnavailable | None = None

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        self._fail_when_away()
        await super().heartbeat(record, load, lease_s=lease_s)

    async def take_role(
        self, record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        self._fail_when_away()
        return await super().take_role(record, load, lease_s=lease_s, others=others)

    async def leave(self, incarnation: Incarnation) -> None:
        self._fail_when_away()
        await super().leave(incarnation)

    def _fail_when_away(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class World:
    """A keeper for each incarnation asked for, on one store and one clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(self.clock)
        self.num_running = 0

    def keeper(self, epoch: int = 1, lease_s: float = LEASE_S) -> LeaseKeeper:
        mine = record("decode-0", epoch=epoch, lease_ms=round(1000 * lease_s))
        return LeaseKeeper(self.store, lambda: mine, self.load, lease_s=lease_s, clock=self.clock)

    def load(self) -> NodeLoad:
        return NodeLoad(
            free_blocks=9,
            free_seats=3,
            num_running=self.num_running,
            num_waiting=0,
            queued_tokens=0,
        )

    async def live(self) -> list[tuple[int, int]]:
        """Epoch and running sequences of every live node."""
        nodes = await self.store.live_nodes()
        return [(n.record.incarnation.epoch, n.load.num_running) for n in nodes]


@pytest.fixture
def world() -> World:
    return World()


async def test_every_heartbeat_carries_the_load_of_its_moment(world: World) -> None:
    keeper = world.keeper()
    await keeper.renew()
    assert await world.live() == [(1, 0)]
    world.num_running = 5
    await keeper.renew()
    assert await world.live() == [(1, 5)]


async def test_a_lease_that_is_not_renewed_expires_and_one_that_is_does_not(world: World) -> None:
    keeper = world.keeper()
    await keeper.renew()
    world.clock.advance(LEASE_S - 0.5)
    await keeper.renew()
    world.clock.advance(LEASE_S - 0.5)
    assert await world.live() == [(1, 0)]
    world.clock.advance(0.5)
    assert await world.live() == []


@pytest.mark.covers("F74")
async def test_an_emptied_store_fills_again_by_itself(world: World) -> None:
    keeper = world.keeper()
    await keeper.renew()
    world.store.clear()
    assert await world.live() == []
    await keeper.renew()
    assert await world.live() == [(1, 0)]


async def test_a_failure_that_lasts_is_logged_now_and_then_and_each_is_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = world.keeper()
    world.store.trouble = PlacementUnavailable("no answer in 1 s")
    with caplog.at_level(logging.INFO, "pdserve.node"):
        for _ in range(3):
            await keeper.renew()
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "(failure 1), serving on: no answer in 1 s" in caplog.text
        world.store.trouble = PlacementRefused("OOM command not allowed")
        world.clock.advance(SECONDS_PER_WARNING)
        for _ in range(2):
            await keeper.renew()
        assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
        assert "(failure 4), serving on: OOM command not allowed" in caplog.text
        world.store.trouble = None
        await keeper.renew()
        await keeper.renew()
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2 + ["INFO"]
    assert "renewed again, after 5 failures" in caplog.text
    assert await world.live() == [(1, 0)]
    counted = {"placement_unavailable": 3, "placement_slow": 0, "placement_refused": 2}
    assert keeper.failures == counted
    world.store.trouble = PlacementRefused("OOM command not allowed")
    with caplog.at_level(logging.INFO, "pdserve.node"):
        await keeper.renew()
    assert caplog.records[-1].levelname == "WARNING", "another failure is news"


@pytest.mark.covers("F75")
async def test_a_node_whose_successor_holds_the_lease_is_fenced(world: World) -> None:
    old, new = world.keeper(1), world.keeper(2)
    await old.renew()
    await new.renew()
    with pytest.raises(StaleEpoch, match="decode-0#2 holds the lease"):
        await old.run()
    assert await world.live() == [(2, 0)]


async def test_a_role_is_claimed_behind_the_heartbeat_that_is_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, written = world.keeper(), list[Role]()
    may_end = asyncio.Event()

    async def heartbeat(record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        await may_end.wait()
        written.append(record.role)

    async def take_role(record: NodeRecord, load: NodeLoad, **_: object) -> bool:
        written.append(record.role)
        return True

    monkeypatch.setattr(world.store, "heartbeat", heartbeat)
    monkeypatch.setattr(world.store, "take_role", take_role)
    renewal = asyncio.create_task(keeper.renew())
    await asyncio.sleep(0)
    claim = asyncio.create_task(keeper.claim(record("decode-0", Role.PREFILL), ["d1"]))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(renewal, claim)
    assert written == [Role.DECODE, Role.PREFILL]


async def has_beaten(world: World, num_running: int) -> None:
    """Return when a heartbeat has this load; a test that waits for it in vain fails."""
    async with asyncio.timeout(20):
        while await world.live() != [(1, num_running)]:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_role_that_may_have_been_written_is_followed_by_a_heartbeat(world: World) -> None:
    keeper = world.keeper(lease_s=600.0)
    renewing = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    world.store.trouble = PlacementUnavailable("no answer in 1 s")
    with pytest.raises(PlacementUnavailable):
        await keeper.claim(record("decode-0", Role.PREFILL), ["d1"])
    world.store.trouble, world.num_running = None, 3
    await has_beaten(world, 3)
    renewing.cancel()


async def test_a_role_whose_claim_is_cancelled_is_followed_by_a_heartbeat(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router that asked has ended its call, and the store has written the role nevertheless."""
    keeper = world.keeper(lease_s=600.0)
    renewing = asyncio.create_task(keeper.run())
    await has_beaten(world, 0)
    take_role, is_written = world.store.take_role, asyncio.Event()

    async def slow(
        record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        found = await take_role(record, load, lease_s=lease_s, others=others)
        is_written.set()
        await asyncio.Event().wait()
        return found

    monkeypatch.setattr(world.store, "take_role", slow)
    await world.store.heartbeat(record("d1"), world.load(), lease_s=600.0)
    claim = asyncio.create_task(keeper.claim(record("decode-0", Role.PREFILL), ["d1"]))
    await is_written.wait()
    await world.store.leave(Incarnation("d1", 1))
    (mine,) = await world.store.live_nodes()
    assert mine.record.role is Role.PREFILL
    claim.cancel()
    world.num_running = 3
    await has_beaten(world, 3)
    (mine,) = await world.store.live_nodes()
    assert mine.record.role is Role.DECODE
    renewing.cancel()


async def test_a_claim_that_ends_behind_its_write_is_followed_by_a_heartbeat(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose router ends: the node keeps its role, and the store has the other one."""
    keeper, has_written = world.keeper(lease_s=600.0), asyncio.Event()
    take = world.store.take_role

    async def take_role(
        record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        assert await take(record, load, lease_s=lease_s, others=others)
        has_written.set()
        await asyncio.Event().wait()
        return True

    async def role() -> Role:
        nodes = {node.record.node_id: node.record.role for node in await world.store.live_nodes()}
        return nodes["decode-0"]

    await world.store.heartbeat(record("decode-1"), world.load(), lease_s=600.0)
    monkeypatch.setattr(world.store, "take_role", take_role)
    renewing = asyncio.create_task(keeper.run())
    claim = asyncio.create_task(
        keeper.claim(record("decode-0", Role.PREFILL, epoch=1), ["decode-1"])
    )
    await has_written.wait()
    assert await role() is Role.PREFILL
    claim.cancel()
    async with asyncio.timeout(20):
        while await role() is Role.PREFILL:  # noqa: ASYNC110
            await asyncio.sleep(0)
    renewing.cancel()


async def test_leaving_takes_the_node_out_and_never_its_successor(world: World) -> None:
    old, new = world.keeper(1), world.keeper(2)
    await old.renew()
    await new.renew()
    await old.leave()
    assert await world.live() == [(2, 0)]
    await new.leave()
    assert await world.live() == []


async def test_a_role_that_is_given_while_the_node_leaves_restores_no_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers reach it until its streams have ended."""
    keeper = world.keeper()
    await keeper.renew()
    await world.store.heartbeat(record("d1"), world.load(), lease_s=600.0)
    take_role, may_take = world.store.take_role, asyncio.Event()

    async def slow(
        record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        await may_take.wait()
        return await take_role(record, load, lease_s=lease_s, others=others)

    monkeypatch.setattr(world.store, "take_role", slow)
    mine = record("decode-0", Role.PREFILL)
    claim = asyncio.create_task(keeper.claim(mine, ["d1"]))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(keeper.leave())
    await asyncio.sleep(0)
    may_take.set()
    assert await claim
    await leaving
    with pytest.raises(Draining, match="leaves"):
        await keeper.claim(mine, ["d1"])
    await keeper.renew()
    assert [one.record.node_id for one in await world.store.live_nodes()] == ["d1"]


async def test_leaving_an_absent_store_is_no_error(world: World) -> None:
    keeper = world.keeper()
    await keeper.renew()
    world.store.trouble = PlacementUnavailable("no answer in 1 s")
    await keeper.leave()
    world.store.trouble = None
    world.clock.advance(LEASE_S)
    assert await world.live() == []


async def test_the_lease_is_renewed_several_times_in_its_length(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    class OverAtOnce:
        """Stands for `asyncio.timeout`."""

        def __init__(self, span_s: float) -> None:
            slept.append(span_s)

        async def __aenter__(self) -> None:
            world.clock.advance(slept[-1])
            assert await world.live() == [(1, 0)]
            is_enough = len(slept) == 3 * RENEWALS_PER_LEASE
            raise asyncio.CancelledError if is_enough else TimeoutError

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr("node.life.lease_keeper.asyncio.timeout", OverAtOnce)
    with pytest.raises(asyncio.CancelledError):
        await world.keeper().run()
    assert set(slept) == {LEASE_S / RENEWALS_PER_LEASE}


async def test_news_does_not_wait_for_its_turn(world: World) -> None:
    """A lease so long that no heartbeat comes by itself."""
    keeper = world.keeper(lease_s=600.0)
    renewing = asyncio.create_task(keeper.run())
    for num_running in (3, 4):
        world.num_running = num_running
        keeper.renew_soon()
        async with asyncio.timeout(20):
            while await world.live() != [(1, num_running)]:  # noqa: ASYNC110
                await asyncio.sleep(0)
    renewing.cancel()


# --- two processes with one id --------------------------------------------------------------------


def passing(world: World, monkeypatch: pytest.MonkeyPatch, living: LeaseKeeper | None) -> None:
    """Let time pass wherever a process sleeps; `living` renews its lease meanwhile."""
    renewed_at_s = world.clock.now_s()

    async def sleep(seconds: float) -> None:
        nonlocal renewed_at_s
        world.clock.advance(seconds)
        if living and world.clock.now_s() - renewed_at_s >= LEASE_S / RENEWALS_PER_LEASE:
            renewed_at_s = world.clock.now_s()
            await living.renew()

    monkeypatch.setattr(asyncio, "sleep", sleep)


async def second_life(
    world: World,
    address: str = "elsewhere:7000",
    *,
    was_away: bool = False,
    lease_s: float = LEASE_S,
) -> None:
    await refuse_second_life(
        world.store,
        "decode-0",
        address,
        lease_s=lease_s,
        clock=world.clock,
        was_away=was_away,
    )


@pytest.mark.covers("F75")
async def test_a_process_that_lives_keeps_its_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = world.keeper(1)
    await living.renew()
    passing(world, monkeypatch, living)
    address = record("decode-0").control_address
    with pytest.raises(ConfigError, match=f"serves as decode-0, at {address}: wanted a --node-id"):
        await second_life(world)
    assert await world.live() == [(1, 0)]


@pytest.mark.covers("F75")
@pytest.mark.parametrize("times", [1 / 8, 1 / 3, 2, 3, 20])
async def test_a_process_that_lives_keeps_its_id_from_one_with_another_length_of_leases(
    world: World, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    living = world.keeper(1)
    await living.renew()
    passing(world, monkeypatch, living)
    with pytest.raises(ConfigError, match="another process serves as decode-0"):
        await second_life(world, lease_s=times * LEASE_S)
    assert world.clock.now_s() <= LEASE_S, "its own leases do not matter"


@pytest.mark.parametrize("lease_s", [LEASE_S / 4, LEASE_S, 4 * LEASE_S])
async def test_one_that_does_not_tell_its_length_of_leases_has_the_usual_one(
    world: World, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    """As a process of an earlier release."""
    await world.store.heartbeat(record("decode-0"), world.load(), lease_s=lease_s)
    passing(world, monkeypatch, None)
    await second_life(world, lease_s=lease_s)
    assert world.clock.now_s() <= lease_s * 9 / 16


@pytest.mark.covers("F75")
async def test_the_id_of_a_dead_process_is_free_before_its_lease_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.keeper(1).renew()
    passing(world, monkeypatch, None)
    await second_life(world)
    assert world.clock.now_s() <= LEASE_S / 2
    await world.keeper(2).renew()
    assert await world.live() == [(2, 0)]


@pytest.mark.parametrize("silent_s", [0.0, 0.3 * LEASE_S, 0.5 * LEASE_S, 0.9 * LEASE_S])
async def test_the_time_in_which_a_process_starts_counts(
    world: World, monkeypatch: pytest.MonkeyPatch, silent_s: float
) -> None:
    await world.keeper(1).renew()
    world.clock.advance(silent_s)
    passing(world, monkeypatch, None)
    await second_life(world)
    assert world.clock.now_s() <= max(silent_s, LEASE_S * 9 / 16)


async def test_the_time_in_which_the_store_was_away_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = world.keeper(1)
    await living.renew()
    world.clock.advance(0.8 * LEASE_S)
    passing(world, monkeypatch, living)
    with pytest.raises(ConfigError, match="another process serves as decode-0"):
        await second_life(world, was_away=True)


async def test_a_clock_that_is_set_is_no_renewal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store counts by the clock of its machine, or of another one after a failover."""
    await world.keeper(1).renew()
    passing(world, monkeypatch, None)
    left_s, steps = world.store.lease_left_s, iter([0.0, 0.0, LEASE_S / 20])

    async def stepped(node_id: str) -> float:
        return await left_s(node_id) + next(steps, LEASE_S / 20)

    monkeypatch.setattr(world.store, "lease_left_s", stepped)
    await second_life(world)


async def test_a_slow_store_is_no_sign_of_a_living_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.keeper(1).renew()
    passing(world, monkeypatch, None)
    left_s = world.store.lease_left_s

    async def slowly(node_id: str) -> float:
        world.clock.advance(LEASE_S / 40)
        left = await left_s(node_id)
        world.clock.advance(LEASE_S / 40)
        return left

    monkeypatch.setattr(world.store, "lease_left_s", slowly)
    await second_life(world)


async def test_nobody_waits_for_a_dead_process_whose_port_is_taken_or_that_has_no_lease(
    world: World,
) -> None:
    await second_life(world)
    await world.keeper(1).renew()
    await second_life(world, record("decode-0").control_address)


async def test_a_store_that_is_away_keeps_no_node_from_its_start(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise PlacementUnavailable("Redis is away")

    monkeypatch.setattr(world.store, "live_nodes", away)
    await second_life(world)
    assert "whether another process serves as decode-0 is not known: Redis is away" in caplog.text
