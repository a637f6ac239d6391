"""A simulated node with nothing else to do takes turns while a pull waits for room."""

from __future__ import annotations

import pytest

from common.settings.config import EngineConfig
from engine.core import kept_prefixes
from engine.core.blocks import leaving_blocks
from engine.core.blocks.block_pool import BlockUse
from node.flow.messages import FetchBlocks
from simulator.cluster import SimulatedCluster
from simulator.node import SimulatedNode
from tests.unit.simulator.clusters import BLOCK, P, setup_of

NUM_BLOCKS, NUM_PULLED = 400, 40


def hold(node: SimulatedNode, number: int, first: int) -> tuple[bytes, ...]:
    """Let a node's pool have so many blocks that were used twice; return their hashes."""
    pool = node.scheduler.pool
    hashes = tuple(bytes([*divmod(first + one, 256)]) * 8 for one in range(number))
    block_ids = pool.allocate(number, BlockUse.RUNNING)
    pool.publish_all(block_ids, hashes)
    pool.prefix_cache.note_use(block_ids)
    pool.release(block_ids)
    return hashes


def test_an_idle_node_goes_on_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_blocks, "LEAST_AHEAD", 1)
    monkeypatch.setattr(kept_prefixes, "MOST_AT_ONCE", 4)
    engine = EngineConfig(prefix_host_memory=NUM_BLOCKS * BLOCK)
    cluster = SimulatedCluster(setup_of({P: 2}, num_blocks=NUM_BLOCKS, engine=engine))
    source, puller = cluster.nodes
    offered = hold(source, NUM_PULLED, 0)
    held = hold(puller, puller.scheduler.pool.num_blocks, NUM_PULLED)
    puller.put(FetchBlocks(cluster.router.me, source.me, offered))
    cluster.timeline.run()
    counters = puller.scheduler.statistics().counters
    assert counters.num_fetched_tokens == NUM_PULLED * puller.scheduler.limits.block_size
    assert all(map(puller.scheduler.prefix_transfers.has, held))
    assert puller.is_empty()
