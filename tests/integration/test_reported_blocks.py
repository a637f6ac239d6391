"""Reports of scripted nodes: a router places by what they hold, whoever sent it there."""

from __future__ import annotations

import struct

import pytest

from common.kv.blocks import block_key, hash_full_blocks
from common.kv.tiers import Tier
from common.nodes import Role
from protos import pdserve_node_pb2 as pb
from router.core.placement import Chooser
from router.dispatch.dispatcher import Dispatcher
from tests.integration.fake_node import FakeNode, record_of
from tests.integration.scripted_cluster import PROMPT, Cluster, asked, start, wait_until
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)

KNOWN = "pdserve_router_known_blocks"
DROPPED = "pdserve_router_reported_blocks_dropped_total"


def prompt_keys(node: FakeNode) -> list[int]:
    record = record_of(node.incarnation, node.role, "")
    hashes = hash_full_blocks(PROMPT, record.block_size, record.fingerprint)
    return [block_key(one) for one in hashes]


def say(
    node: FakeNode,
    number: int,
    added: list[int],
    removed: list[int] | None = None,
    tier: int = Tier.POOL,
) -> None:
    """Report blocks to every router."""

    def packed(keys: list[int]) -> bytes:
        return struct.pack(f">{len(keys)}Q", *keys)

    report = pb.BlockReport(
        number=number, added=packed(added), removed=packed(removed or []), tier=tier
    )
    for stream in node.streams:
        stream.put_nowait(pb.NodeMessage(blocks=report))


async def known(cluster: Cluster, number: int) -> None:
    await wait_until(
        lambda: cluster.registry.get_sample_value(KNOWN) == number, f"{number} blocks are known"
    )


async def two_decoders(cluster: Cluster) -> tuple[FakeNode, FakeNode, Dispatcher]:
    d0 = await cluster.add("d0", Role.DECODE)
    d1 = await cluster.add("d1", Role.DECODE)
    return d0, d1, await cluster.router(policy="prefix_affinity")


async def test_a_prompt_goes_where_it_is_held_though_another_router_sent_it_there(
    cluster: Cluster,
) -> None:
    _, d1, router = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys)
    await known(cluster, len(keys))
    answer = start(router)
    await asked(d1)
    answer.cancel()


async def test_a_prompt_does_not_go_where_it_was_evicted(cluster: Cluster) -> None:
    d0, d1, router = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys)
    say(d1, 2, [], keys[1:])
    say(d1, 3, [], keys[:1])
    await known(cluster, 0)
    answer = start(router)
    await asked(d0)
    answer.cancel()


async def test_a_prompt_goes_where_host_memory_has_what_the_pool_evicted(cluster: Cluster) -> None:
    d0, d1, router = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d0, 1, keys[:1])
    say(d1, 1, keys)
    say(d1, 2, keys, tier=Tier.HOST)
    say(d1, 3, [], keys)
    say(d1, 4, [1, 2, 3], tier=9)  # a tier of a later release
    say(d1, 5, [4])  # it comes last
    await known(cluster, len(keys) + 1)
    answer = start(router)
    await asked(d1)
    answer.cancel()


async def test_a_node_that_is_lost_holds_nothing_until_it_says_so_again(cluster: Cluster) -> None:
    _, d1, router = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys)
    await known(cluster, len(keys))
    d1.end_streams()
    await known(cluster, 0)
    await wait_until(lambda: bool(d1.streams), "the stream is open again")
    say(d1, 1, keys)
    await known(cluster, len(keys))
    answer = start(router)
    await asked(d1)
    answer.cancel()


@pytest.mark.covers("F77")
async def test_after_a_missing_report_the_node_is_asked_to_say_all_again(cluster: Cluster) -> None:
    _, d1, _ = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys[:1])
    await known(cluster, 1)
    assert d1.num_resends == 0
    say(d1, 3, keys[1:])
    await known(cluster, 0)
    await wait_until(lambda: d1.num_resends == 1, "all is asked for")
    say(d1, 4, keys[1:])
    say(d1, 1, keys)
    await known(cluster, len(keys))
    assert d1.num_resends == 1


@pytest.mark.covers("F77")
async def test_a_stream_that_begins_without_its_first_report_says_nothing(cluster: Cluster) -> None:
    """Its number would be the next one of the stream before."""
    _, d1, _ = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys[:1])
    await known(cluster, 1)
    d1.end_streams()
    await known(cluster, 0)
    await wait_until(lambda: bool(d1.streams), "the stream is open again")
    say(d1, 2, keys[1:])
    await wait_until(lambda: d1.num_resends == 1, "all is asked for")
    await known(cluster, 0)
    say(d1, 1, keys)
    await known(cluster, len(keys))


@pytest.mark.covers("F110")
async def test_a_life_that_another_one_replaces_while_it_is_heard_holds_nothing_any_more(
    cluster: Cluster,
) -> None:
    """A frozen process, or one behind a cut, is replaced before its stream breaks."""
    _, d1, router = await two_decoders(cluster)
    keys = prompt_keys(d1)
    say(d1, 1, keys)
    await known(cluster, len(keys))
    second = await cluster.add("d1", Role.DECODE, epoch=2)
    await cluster.refresh()
    say(d1, 2, [1 << 40])  # on its way while the router closes the stream
    await known(cluster, 0)
    await wait_until(lambda: bool(second.streams), "the second life is connected to")
    say(second, 1, keys[:1])
    await known(cluster, 1)
    assert router.pool.client(d1.incarnation) is None


async def test_reported_blocks_for_which_there_is_no_room_are_counted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chooser, "on_blocks", lambda *_: 3)
    d0, _, _ = await two_decoders(cluster)
    say(d0, 1, [1, 2, 3, 4])
    await wait_until(lambda: cluster.registry.get_sample_value(DROPPED) == 3, "3 are counted")
