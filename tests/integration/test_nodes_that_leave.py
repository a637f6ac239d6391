"""What a router says of nodes that are gone: those that left in order, and those that were lost."""

from __future__ import annotations

import pytest

from common.errors import NodeLost, PlacementUnavailable, StaleEpoch
from common.ids import Incarnation
from common.nodes import Role
from common.observing import lasting_failure
from placement.store import LiveNode, PlacementRefused
from router.cluster.admin_calls import UnknownNode
from router.cluster.drain import DrainingNode, drain_node
from router.dispatch.client import node_clients
from router.dispatch.node_pool import NodePool
from tests.integration.scripted_cluster import LEASE_S, Cluster, asked, start, wait_until
from tests.integration.scripted_cluster import scripted_cluster as scripted_cluster
from tests.support.clocks.manual_clock import ManualClock


def counts(cluster: Cluster) -> tuple[float, float]:
    """How many nodes left, and how many were lost."""
    left, lost = (
        cluster.registry.get_sample_value(f"pdserve_router_nodes_{what}_total") or 0.0
        for what in ("left", "lost")
    )
    return left, lost


async def test_a_node_that_leaves_the_store_and_then_ends_its_stream_has_left(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.router()
    with caplog.at_level("INFO", "pdserve.router.nodes"):
        await cluster.store.leave(d.incarnation)
        d.end_streams()
        await wait_until(lambda: counts(cluster) == (1, 0), "d0 has left")
    assert "d0#1 has left: it ended the stream" in caplog.messages
    assert not any("lost" in message for message in caplog.messages)


async def test_nobody_is_warned_that_a_node_which_left_cannot_be_reached(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_clients, "UNHEARD_BEFORE_WARNING", 1)
    d = await cluster.add("d0", Role.DECODE)
    await cluster.router()
    with caplog.at_level("DEBUG", "pdserve.router.nodes"):
        await cluster.store.leave(d.incarnation)
        d.end_streams()
        await d.stop(LEASE_S)
        await wait_until(lambda: "no stream to d0#1" in caplog.text, "it was tried again")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_node_that_ends_a_stream_and_stays_is_lost(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.router()
    with caplog.at_level("INFO", "pdserve.router.nodes"):
        d.end_streams()
        await wait_until(lambda: "d0#1 is heard again" in caplog.messages, "d0 is back")
        await wait_until(lambda: counts(cluster) == (0, 1), "d0 was lost")
    assert "lost d0#1: the node ended the stream" in caplog.messages
    assert caplog.messages.count("d0#1 is heard again") == 1


async def test_a_node_that_breaks_off_is_lost_whether_or_not_its_lease_is_over(
    cluster: Cluster,
) -> None:
    d = await cluster.add("d0", Role.DECODE)
    other = await cluster.add("d1", Role.DECODE)
    await cluster.router()
    await other.stop()
    await wait_until(lambda: counts(cluster) == (0, 1), "d1 is lost")
    await cluster.store.leave(d.incarnation)
    await d.stop()
    await wait_until(lambda: counts(cluster) == (0, 2), "d0 is lost")


async def test_a_store_that_is_away_cannot_say_that_a_node_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.router()

    async def away() -> list[LiveNode]:
        raise PlacementUnavailable("away")

    monkeypatch.setattr(cluster.store, "live_nodes", away)
    d.end_streams()
    await wait_until(lambda: counts(cluster) == (0, 1), "d0 is lost")


async def test_what_keeps_the_store_away_is_told_also_where_it_is_another_cause_by_then(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis restarts, and then refuses the password: the first cause leads nobody to the second."""
    monkeypatch.setattr(lasting_failure, "SECONDS_PER_WARNING", 0.0)
    await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    cause: PlacementUnavailable | None = PlacementUnavailable("Connection refused")
    listed = cluster.store.live_nodes

    async def away() -> list[LiveNode]:
        if cause is not None:
            raise cause
        return await listed()

    monkeypatch.setattr(cluster.store, "live_nodes", away)
    assert router.pool.store_error == ""
    with caplog.at_level("INFO", "pdserve.router.nodes"):
        for trouble in (cause, PlacementRefused("invalid password")):
            cause = trouble
            await cluster.refresh()
            assert f"the placement store is away, going on without: {cause}" in caplog.messages
            assert router.pool.store_error == str(cause)
        cause = None
        await cluster.refresh()
    assert "the placement store is back" in caplog.messages
    assert router.pool.store_error == ""


async def test_a_node_that_is_not_reached_is_told_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_clients, "UNHEARD_BEFORE_WARNING", 1)
    monkeypatch.setattr(node_clients, "LAST_BACKOFF_S", 0.01)
    clock = ManualClock()
    d = await cluster.add("d0", Role.DECODE)
    await cluster.router(clock=clock)
    await d.stop()

    def told() -> list[str]:
        tries = (one for one in caplog.records if one.getMessage().startswith("no stream to d0#1"))
        return [one.levelname for one in tries]

    with caplog.at_level("DEBUG", "pdserve.router.nodes"):
        await wait_until(lambda: len(told()) >= 40, "it is tried for some time")
        assert told().count("WARNING") == 1, "however often it is tried"
        clock.advance(lasting_failure.SECONDS_PER_WARNING)
        await wait_until(lambda: told().count("WARNING") == 2, "it is told again")


async def test_a_request_whose_node_left_after_it_was_chosen_goes_to_another_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    gone: set[Incarnation] = set()
    client_of = NodePool.client

    def client(pool: NodePool, node: Incarnation) -> node_clients.NodeClient | None:
        if not gone:
            gone.add(node)
        return None if node in gone else client_of(pool, node)

    monkeypatch.setattr(NodePool, "client", client)
    answer = start(router)
    await wait_until(lambda: any(node.asked for node in cluster.nodes), "another one is asked")
    (left,) = gone
    (other,) = (node for node in cluster.nodes if node.incarnation != left)
    assert len(other.asked) == 1
    assert (await asked(other)).id.attempt == 2
    answer.cancel()


async def test_a_node_is_drained_in_the_life_that_is_known(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    router = await cluster.router()
    assert await drain_node(router.pool, "d0") == DrainingNode(d.incarnation, 30.0)
    assert d.num_drains == 1
    with pytest.raises(UnknownNode) as unknown:
        await drain_node(router.pool, "d2")
    assert unknown.value.known == ["d0", "d1"]
    d.incarnation = Incarnation("d0", 2)
    with pytest.raises(StaleEpoch, match="d0#1"):
        await drain_node(router.pool, "d0")
    assert d.num_drains == 1
    await d.die()
    with pytest.raises(NodeLost):
        await drain_node(router.pool, "d0")
