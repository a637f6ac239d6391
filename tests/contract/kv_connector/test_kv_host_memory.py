"""Blocks of a node's host memory are sent beside those of its pool, in one transfer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.contract import GivenUp, Landed, LandingFailed, Released, TransferEnded
from kv_transfer.sending.transfer_errors import TransferAborted
from kv_transfer.shared.lanes import POOL_ONLY_LANES
from tests.support.kv.kinds import KINDS
from tests.support.kv.kv_cluster import (
    Cluster,
    Node,
    assert_ended_once,
    cluster_of,
    commit_for,
    error_of,
    send,
)

POOL_ALONE = [one for one in ("ipc", "fake-rdma", "rdma") if one in KINDS]
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 5
SOURCES = (3, NUM_BLOCKS + 4, 11, NUM_BLOCKS, NUM_BLOCKS + 1)
"""Blocks of the pool and of host memory in turn; the last one and the first one are adjacent."""
TARGETS = (7, 2, 9, 0, 5)


def source(cluster: Cluster, name: str = "p") -> Node:
    return cluster.node(name, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS)


@pytest.fixture(params=[one for one in KINDS if one not in [*POOL_ALONE, "fake-late"]])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each kind whose lane sends host memory too; `fake-late` only plays one."""
    with contextlib.closing(cluster_of(request.param)) as cluster:
        yield cluster


def content(node: Node, block: int) -> np.ndarray:
    """What a number of a push stands for: `[num_layers, 2, piece_bytes]`."""
    assert node.host is not None
    if block < NUM_BLOCKS:
        return node.pool[:, :, block]
    return node.host[:, :, block - NUM_BLOCKS]


@pytest.mark.parametrize("verify", ["off", "commit", "block"])
def test_blocks_of_both_memories_arrive_as_they_are(cluster: Cluster, verify: str) -> None:
    prefill, decode = (
        cluster.node(name, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS, verify=verify)
        for name in "pd"
    )
    ticket = cluster.ticket(decode, TARGETS)
    wanted = decode.pool.copy()
    for target, block in zip(TARGETS, SOURCES, strict=True):
        wanted[:, :, target] = content(prefill, block)
    send(prefill, decode, ticket, SOURCES)
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)
    assert_ended_once(prefill, decode)


def test_a_transfer_out_of_host_memory_alone(cluster: Cluster) -> None:
    prefill, decode = source(cluster), cluster.node("d")
    ticket = cluster.ticket(decode, [4, 6])
    send(prefill, decode, ticket, [NUM_BLOCKS + 2, NUM_BLOCKS + 3])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert prefill.host is not None
    assert np.array_equal(decode.pool[:, :, [4, 6]], prefill.host[:, :, [2, 3]])


@pytest.mark.parametrize("kind", POOL_ALONE)
def test_a_lane_of_the_pool_alone_gives_up_at_once_and_goes_on_with_others(kind: str) -> None:
    with contextlib.closing(cluster_of(kind)) as cluster:
        assert cluster.lane in POOL_ONLY_LANES
        prefill, decode = source(cluster), cluster.node("d")
        ticket = cluster.ticket(decode, TARGETS)
        send(prefill, decode, ticket, SOURCES)
        failed = decode.wait_event()
        assert isinstance(failed, LandingFailed)
        assert isinstance(failed.error, GivenUp)
        assert decode.wait_event() == Released(ticket.lease_token)
        assert isinstance(error_of(prefill.wait_event()), TransferAborted)
        again = cluster.ticket(decode, TARGETS)
        send(prefill, decode, again, [1, 2, 3, 4, 5])
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(again.lease_token, None)
        assert_ended_once(prefill, decode)


def test_a_number_behind_both_memories_ends_the_transfer(cluster: Cluster) -> None:
    prefill, decode = source(cluster), cluster.node("d")
    ticket = cluster.ticket(decode, [1])
    send(prefill, decode, ticket, [NUM_BLOCKS + NUM_HOST_BLOCKS])
    assert "source block 17: wanted 0 to 16" in str(error_of(prefill.wait_event()))
