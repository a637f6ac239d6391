"""What routers are told about the prefix cache: each change once, and all of it when they ask."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import Incarnation
from common.kv.blocks import BlockHash, BlockKey, block_key
from common.kv.tiers import Tier
from node.control.block_reports import MAX_REPORTED, MIN_FORGOTTEN, BlockReports, CachedBlocks
from node.control.output_streams import OutputStreams, RouterStream
from protos import pdserve_node_pb2 as pb
from router.core.known.block_reports import ReportReader


def block(number: int) -> BlockHash:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> set[BlockKey]:
    return {block_key(block(number)) for number in numbers}


def pool(news: dict[BlockHash, bool]) -> dict[Tier, dict[BlockHash, bool]]:
    return {Tier.POOL: news}


class Router:
    """Reads the reports that it gets, as a router does."""

    def __init__(self) -> None:
        self.held: set[BlockKey] = set()
        self.held_below: set[BlockKey] = set()
        self.num_reports = 0
        self._reader = ReportReader()

    def read(self, message: pb.BlockReport | None) -> None:
        """Read one report, if there is one."""
        if message is None:
            return
        self.num_reports += 1
        assert len(message.added) + len(message.removed) <= 8 * MAX_REPORTED
        report = self._reader.take(message.number, message.tier, message.added, message.removed)
        assert report is not None
        assert not self._reader.has_lost
        if report.is_first:
            self.held.clear()
            self.held_below.clear()
        held = self.held if report.tier is Tier.POOL else self.held_below
        held |= set(report.added)
        held -= set(report.removed)

    def read_all(self, reports: BlockReports) -> None:
        """Read until there is nothing more."""
        before = -1
        while before != self.num_reports:
            before = self.num_reports
            self.read(reports.next())


def test_an_empty_cache_is_reported_once() -> None:
    router, reports = Router(), BlockReports(CachedBlocks())
    router.read_all(reports)
    assert (router.num_reports, router.held) == (1, set())


def test_a_router_that_comes_late_is_told_all_and_then_what_changes() -> None:
    cached = CachedBlocks()
    cached.take(pool({block(number): True for number in range(5)}))
    router, reports = Router(), BlockReports(cached)
    router.read_all(reports)
    assert (router.num_reports, router.held) == (1, keys(*range(5)))
    news = pool({block(7): True, block(0): False})
    cached.take(news)
    reports.add(news)
    router.read_all(reports)
    assert (router.num_reports, router.held) == (2, keys(1, 2, 3, 4, 7))
    reports.restart()
    router.held.add(99)
    router.read_all(reports)
    assert router.held == keys(1, 2, 3, 4, 7)


def test_a_large_cache_comes_in_pieces() -> None:
    cached = CachedBlocks()
    cached.take(pool({block(number): True for number in range(3 * MAX_REPORTED)}))
    router, reports = Router(), BlockReports(cached)
    assert reports.is_behind
    router.read_all(reports)
    assert (router.num_reports, len(router.held)) == (3, 3 * MAX_REPORTED)
    assert not reports.is_behind


def test_what_waits_for_a_router_that_does_not_read_is_bounded() -> None:
    cached, router = CachedBlocks(), Router()
    reports = BlockReports(cached)
    for number in range(3 * MIN_FORGOTTEN):
        news = pool({block(number + 10): True, block(number): False})
        cached.take(news)
        reports.add(news)
        assert len(reports) <= MIN_FORGOTTEN + 2 * len(cached)
    router.read_all(reports)
    assert router.held == keys(*range(3 * MIN_FORGOTTEN, 3 * MIN_FORGOTTEN + 10))


@pytest.mark.covers("F77")
@given(
    turns=st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from([Tier.POOL, Tier.HOST]),
                st.dictionaries(st.integers(0, 9), st.booleans(), max_size=4),
            ),
            st.sampled_from(["read", "restart"]),
        ),
        max_size=30,
    )
)
def test_a_router_that_reads_now_and_then_ends_with_what_the_cache_has(
    turns: list[tuple[Tier, dict[int, bool]] | str],
) -> None:
    cached, router = CachedBlocks(), Router()
    reports = BlockReports(cached)
    held: dict[Tier, set[int]] = {Tier.POOL: set(), Tier.HOST: set()}
    for turn in turns:
        if turn == "read":
            router.read(reports.next())
        elif turn == "restart":
            reports.restart()
        elif isinstance(turn, tuple):
            tier, changed = turn
            news = {tier: {block(number): entered for number, entered in changed.items()}}
            cached.take(news)
            reports.add(news)
            held[tier] |= {number for number, has_entered in changed.items() if has_entered}
            held[tier] -= {number for number, has_entered in changed.items() if not has_entered}
    router.read_all(reports)
    assert router.held == keys(*held[Tier.POOL])
    assert router.held_below == keys(*held[Tier.HOST])


def test_all_tiers_are_told_in_one_series_that_begins_with_the_pool() -> None:
    cached = CachedBlocks()
    cached.take({tier: {block(2 - tier): True} for tier in (Tier.HOST, Tier.DISK, Tier.POOL)})
    router, reports = Router(), BlockReports(cached)
    told = [(one.number, Tier(one.tier)) for one in iter(reports.next, None)]
    assert told == [(1, Tier.POOL), (2, Tier.HOST), (3, Tier.DISK)]
    reports.restart()
    router.read_all(reports)
    assert (router.held, router.held_below) == (keys(2), keys(1, 0))
    news = {Tier.POOL: {block(2): False}, Tier.HOST: {block(2): True}}
    cached.take(news)
    reports.add(news)
    router.read_all(reports)
    assert (router.held, router.held_below) == (set(), keys(0, 1, 2))


def test_the_bound_of_what_waits_is_one_for_all_tiers() -> None:
    cached, router = CachedBlocks(), Router()
    reports = BlockReports(cached)
    for number in range(3 * MIN_FORGOTTEN):
        changed = {block(number + 10): True, block(number): False}
        news = {Tier.POOL: changed, Tier.HOST: changed}
        cached.take(news)
        reports.add(news)
        assert len(reports) <= MIN_FORGOTTEN + 2 * len(cached)
    router.read_all(reports)
    assert len(router.held) == len(router.held_below) == 10


async def test_the_step_threads_news_reach_every_stream_and_later_ones() -> None:
    streams = OutputStreams(asyncio.get_running_loop(), lambda router: None)
    early: RouterStream = streams.open(Incarnation("early", 1))
    routers = Router(), Router()
    routers[0].read_all(early.reports)
    streams.add_news(pool({block(1): True, block(2): True}) | {Tier.HOST: {block(5): True}})
    streams.flush()
    streams.add_news(pool({block(1): False}))
    streams.flush()
    await asyncio.sleep(0)
    late = streams.open(Incarnation("late", 1))
    for router, stream in zip(routers, (early, late), strict=True):
        router.read_all(stream.reports)
        assert (router.held, router.held_below) == (keys(2), keys(5))


async def test_a_stream_goes_on_at_once_while_more_waits_than_one_report_holds() -> None:
    streams = OutputStreams(asyncio.get_running_loop(), lambda router: None)
    streams.add_news(pool({block(number): True for number in range(2 * MAX_REPORTED + 1)}))
    streams.flush()
    await asyncio.sleep(0)
    stream, router = streams.open(Incarnation("r", 1)), Router()
    reader = streams.read(stream)
    for _ in range(3):
        async with asyncio.timeout(30):
            router.read((await anext(reader)).blocks)
    assert len(router.held) == 2 * MAX_REPORTED + 1
