"""What prefill nodes want of other nodes' caches goes through the router, unread, to its source."""

from __future__ import annotations

import logging

import pytest

from common.ids import Incarnation
from common.kv.blocks import hash_full_blocks
from common.nodes import Role
from common.request import GenerationRequest
from pdserve.local_cluster.free_ports import free_loopback_port
from protos import pdserve_node_pb2 as pb
from router.core.prefix_sources import WAIT_S
from router.dispatch.client.stream_calls import MOST_PULLS, PULLS_PER_MESSAGE, UnsentCalls
from tests.integration.fake_node import FakeNode
from tests.integration.scripted_cluster import PROMPT, Cluster, asked, start, wait_until
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.clocks.manual_clock import ManualClock

BLOCKS = hash_full_blocks(PROMPT, 16, "f" * 32)


async def add(
    cluster: Cluster, node_id: str, role: Role, *, sends_blocks: bool, port: int = 0
) -> FakeNode:
    node = FakeNode(node_id, role)
    node.sends_blocks = sends_blocks
    await node.start(cluster.store, port=port)
    cluster.nodes.append(node)
    return node


def report(node: FakeNode) -> None:
    """The node says that it has all whole blocks of the prompt."""
    added = b"".join(one[:8] for one in BLOCKS)
    for stream in node.streams:
        stream.put_nowait(pb.NodeMessage(blocks=pb.BlockReport(number=1, added=added)))


async def grant_nothing_cached(request: GenerationRequest, _is_local: bool) -> pb.Reply:
    ticket = pb.Ticket(decode_node_id="d0", decode_epoch=1, lease_token=7, target_block_ids=[1])
    return pb.Reply(ticket=ticket)


async def told_of(cluster: Cluster, *, sends_blocks: bool) -> pb.PrefixSource | None:
    """What `p0` is told when `p1` has reported the prompt; the decode node has none of it."""
    decode = await add(cluster, "d0", Role.DECODE, sends_blocks=True)
    decode.on_reserve = grant_nothing_cached
    first = await add(cluster, "p0", Role.PREFILL, sends_blocks=True)
    second = await add(cluster, "p1", Role.PREFILL, sends_blocks=sends_blocks)
    router = await cluster.router(policy="least_loaded")
    report(second)
    name = "pdserve_router_known_blocks"
    await wait_until(
        lambda: cluster.registry.get_sample_value(name) == len(BLOCKS), "the blocks are known"
    )
    answer = start(router)
    await asked(first)
    answer.cancel()
    (source,) = first.sources
    return source


async def test_a_prefill_node_hears_of_another_one_that_has_the_prompt(cluster: Cluster) -> None:
    source = await told_of(cluster, sends_blocks=True)
    assert source == pb.PrefixSource(node_id="p1", epoch=1, num_tokens=32)


async def test_a_node_of_an_earlier_release_is_not_named(cluster: Cluster) -> None:
    assert await told_of(cluster, sends_blocks=False) is None


async def test_an_earlier_decode_node_is_not_named_for_what_its_ticket_says(
    cluster: Cluster,
) -> None:
    await add(cluster, "d0", Role.DECODE, sends_blocks=False)  # its tickets say 16 tokens
    prefill = await add(cluster, "p0", Role.PREFILL, sends_blocks=True)
    answer = start(await cluster.router())
    await asked(prefill)
    answer.cancel()
    assert prefill.sources == [None]


async def test_a_decode_node_is_named_for_what_its_ticket_says(cluster: Cluster) -> None:
    await add(cluster, "d0", Role.DECODE, sends_blocks=True)
    prefill = await add(cluster, "p0", Role.PREFILL, sends_blocks=True)
    answer = start(await cluster.router())
    await asked(prefill)
    answer.cancel()
    assert prefill.sources == [pb.PrefixSource(node_id="d0", epoch=1, num_tokens=16)]


async def test_a_pull_is_passed_on_to_its_source_alone(cluster: Cluster) -> None:
    nodes = [await add(cluster, name, Role.PREFILL, sends_blocks=True) for name in ("p0", "p1")]
    old = await add(cluster, "old", Role.PREFILL, sends_blocks=False)
    await cluster.router()
    wanted = [
        pull_of(token, name, epoch)
        for token, (name, epoch) in enumerate((("p1", 2), ("nobody", 1), ("old", 1), ("p1", 1)))
    ]
    say(nodes[0], pb.NodeMessage(pulls=wanted))
    await wait_until(lambda: bool(nodes[1].pulls), "it is passed on")
    assert nodes[1].pulls == [wanted[3]], "and what is for an earlier life is not"
    assert nodes[0].pulls == old.pulls == []
    await wait_until(lambda: len(nodes[0].refused_pulls) == 3, "the others are not waited for")
    assert nodes[0].refused_pulls == [0, 1, 2]
    assert nodes[1].refused_pulls == old.refused_pulls == []


async def test_a_pull_that_its_source_refuses_is_not_waited_for(cluster: Cluster) -> None:
    nodes = [await add(cluster, name, Role.PREFILL, sends_blocks=True) for name in ("p0", "p1")]
    await cluster.router()
    refused = [pb.RefusedPull(node_id=name, epoch=1, lease_token=7) for name in ("p0", "nobody")]
    say(nodes[1], pb.NodeMessage(refused_pulls=refused))
    await wait_until(lambda: bool(nodes[0].refused_pulls), "it is told")
    assert (nodes[0].refused_pulls, nodes[1].refused_pulls) == ([7], [])


async def test_a_pull_from_a_node_that_is_lost_is_not_waited_for(cluster: Cluster) -> None:
    """Also where it comes back under its name."""
    nodes = [await add(cluster, name, Role.PREFILL, sends_blocks=True) for name in ("p0", "p1")]
    await cluster.router()
    say(nodes[0], pb.NodeMessage(pulls=[pull_of(7, "p1", 1)]))
    await wait_until(lambda: bool(nodes[1].pulls), "it is passed on")
    await nodes[1].die()
    await wait_until(lambda: bool(nodes[0].refused_pulls), "it is told")
    assert nodes[0].refused_pulls == [7]
    say(nodes[0], pb.NodeMessage(pulls=[pull_of(8, "p1", 1)]))
    await wait_until(lambda: len(nodes[0].refused_pulls) == 2, "it is told")
    assert nodes[0].refused_pulls == [7, 8]


def pull_of(lease_token: int, source_id: str, epoch: int) -> pb.Pull:
    pull = pb.Pull(request_id="r", attempt=1, source_id=source_id, source_epoch=epoch)
    pull.ticket.lease_token = lease_token
    return pull


def say(node: FakeNode, message: pb.NodeMessage) -> None:
    for stream in node.streams:
        stream.put_nowait(message)


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
async def test_a_node_that_computes_the_prompt_hears_of_another_one_that_has_it(
    cluster: Cluster, role: Role
) -> None:
    nodes = [await add(cluster, name, role, sends_blocks=True) for name in ("n0", "n1")]
    router = await cluster.router()
    for number, node in enumerate(nodes):
        added = b"".join(one[:8] for one in BLOCKS[: number + 1])
        say(node, pb.NodeMessage(blocks=pb.BlockReport(number=1, added=added)))
    name = "pdserve_router_known_blocks"
    await wait_until(
        lambda: cluster.registry.get_sample_value(name) == len(BLOCKS), "the blocks are known"
    )
    answers = [start(router), start(router)]
    for node in nodes:
        await asked(node)
    for answer in answers:
        answer.cancel()
    assert nodes[0].sources == [pb.PrefixSource(node_id="n1", epoch=1, num_tokens=32)]
    assert nodes[1].sources == [None], "no node has more than it has"


async def test_what_a_node_offers_is_passed_on_to_one_that_stays(cluster: Cluster) -> None:
    leaving = await add(cluster, "d0", Role.DECODE, sends_blocks=True)
    old = await add(cluster, "p0", Role.PREFILL, sends_blocks=False)
    staying = await add(cluster, "p1", Role.PREFILL, sends_blocks=True)
    await cluster.router()
    for stream in leaving.streams:
        stream.put_nowait(pb.NodeMessage(offered_hashes=b"".join(BLOCKS)))
    await wait_until(lambda: bool(staying.fetches), "it is passed on")
    (fetch,) = staying.fetches
    assert (fetch.source_id, fetch.source_epoch) == ("d0", 1)
    assert fetch.block_hashes == b"".join(BLOCKS)
    assert leaving.fetches == old.fetches == []


async def test_a_new_node_is_offered_what_the_one_that_it_names_has(cluster: Cluster) -> None:
    names = ("d0", "d1", "d2")
    nodes = [await add(cluster, name, Role.DECODE, sends_blocks=True) for name in names]
    await cluster.router()
    say(nodes[2], pb.NodeMessage(warm_from="nobody"))
    say(nodes[2], pb.NodeMessage(warm_from="d1"))
    await wait_until(lambda: bool(nodes[1].new_nodes), "it is asked for")
    assert nodes[1].new_nodes == [pb.NewNode(node_id="d2", epoch=1)]
    offer = pb.NodeMessage(offered_hashes=b"".join(BLOCKS), offered_to=nodes[1].new_nodes[0])
    say(nodes[1], offer)
    await wait_until(lambda: bool(nodes[2].fetches), "it is passed on")
    [fetch] = nodes[2].fetches
    assert (fetch.source_id, fetch.source_epoch) == ("d1", 1)
    assert fetch.block_hashes == b"".join(BLOCKS)
    assert nodes[0].new_nodes == nodes[2].new_nodes == []
    assert nodes[0].fetches == nodes[1].fetches == []


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_new_node_is_warmed_when_the_one_that_it_names_is_heard(
    cluster: Cluster, is_listed: bool
) -> None:
    new = await add(cluster, "d2", Role.DECODE, sends_blocks=True)
    port = free_loopback_port()
    if is_listed:
        before = await add(cluster, "d1", Role.DECODE, sends_blocks=True, port=port)
        await before.stop()
        cluster.nodes.remove(before)
    await cluster.router()
    say(new, pb.NodeMessage(warm_from="d1"))
    report(new)
    await wait_until(
        lambda: cluster.registry.get_sample_value("pdserve_router_known_blocks") == len(BLOCKS),
        "what came behind its wish is known",
    )
    named = await add(cluster, "d1", Role.DECODE, sends_blocks=True, port=port)
    await cluster.refresh()
    await wait_until(lambda: bool(named.new_nodes), "it is asked for")
    assert named.new_nodes == [pb.NewNode(node_id="d2", epoch=1)]


async def test_a_new_node_waits_for_the_one_that_it_names_for_some_time(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.nodes")
    clock = ManualClock()
    new = await add(cluster, "d2", Role.DECODE, sends_blocks=True)
    await cluster.router(clock=clock)
    say(new, pb.NodeMessage(warm_from="d1"))
    report(new)
    await wait_until(
        lambda: cluster.registry.get_sample_value("pdserve_router_known_blocks") == len(BLOCKS),
        "what came behind its wish is known",
    )
    await cluster.refresh()
    assert "starts cold" not in caplog.text
    clock.advance(WAIT_S)
    await cluster.refresh()
    assert caplog.text.count("starts cold") == 1
    await cluster.refresh()
    assert caplog.text.count("starts cold") == 1


async def test_a_message_has_no_more_pulls_than_a_node_reads() -> None:
    unsent = UnsentCalls(Incarnation("p1", 1))
    taken = [unsent.add_pull(pb.Pull(attempt=number + 1)) for number in range(MOST_PULLS + 1)]
    assert taken == [*[True] * MOST_PULLS, False], "its node is told that it is refused"
    sizes = []
    while unsent:
        sizes.append(len(unsent.next_message().pulls))
    assert sizes == [PULLS_PER_MESSAGE] * (MOST_PULLS // PULLS_PER_MESSAGE)
