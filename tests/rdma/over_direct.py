"""What the rdma connector reaches of the same writes made with Mooncake directly.

    python -m tests.rdma.vm -- python3 -m tests.rdma.over_direct

32 MiB in blocks of 64 KiB between two processes, adjacent blocks and scattered ones: a whole
handoff, from `open` to `TransferEnded`, and the same ranges as one batch, submitted and waited for
by Mooncake's own calls. They take turns, on one engine. The ratios are of medians; the last line is
JSON, and `rdma_over_direct` is the smaller one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Landed, Released, Ticket, TransferEnded
from kv_transfer.lanes.rdma.slabs import PlacedPool, Ranges, ranges_of, slabbed
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.pool_shape import PoolShape
from tests.rdma.devices import WAIT_S, engine_of
from tests.rdma.rdma_kind import MAX_SLABS, RdmaKind
from tests.support.kv.kv_cluster import Cluster, Node, commit_for

LAYOUT = KVLayout(
    model_digest="m", num_layers=8, num_kv_heads=8, head_dim=64, block_size=32, dtype="float32"
)
NUM_BLOCKS = 32
WINDOW_BYTES = 32 << 20
NUM_ROUNDS = 10
BLOCKS = {"adjacent": range(NUM_BLOCKS), "scattered": range(NUM_BLOCKS - 1, -1, -1)}
"""The target block of each source block."""


def receive(pipe: Connection) -> None:
    """The decode node: clears its pool and gives a ticket for each pattern that it is asked for,
    then says, when asked again, whether the sender's pool, which is filled alike, is in it.
    """
    cluster = Cluster(RdmaKind(1))
    node = _node(cluster, "d")
    source = node.pool.copy()
    pipe.send((engine_of(1).name, node.pool.ctypes.data))
    while pattern := pipe.recv():
        node.pool[:] = 0
        ticket = cluster.ticket(node, BLOCKS[pattern])
        node.connector.expect(ticket, sender_deadline_s=WAIT_S)
        pipe.send(ticket)
        pipe.recv()
        arrived = node.pool[:, :, list(BLOCKS[pattern])]
        node.connector.revoke(ticket.lease_token)  # Unless it landed.
        assert isinstance(node.wait_event(), Landed | Released)
        pipe.send(bool(np.array_equal(arrived, source)))
    cluster.close()


def main() -> None:
    os.environ["MC_TRANSFER_TIMEOUT"] = "60"
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    receiver = spawn.Process(target=receive, args=(theirs,), daemon=True)
    receiver.start()
    cluster = Cluster(RdmaKind(0))
    node = _node(cluster, "p")
    peer_name, peer_start = pipe.recv()
    result: dict[str, float] = {}
    for pattern, targets in BLOCKS.items():
        ranges = _ranges(node, peer_start, targets)
        took_s: dict[str, list[float]] = {"directly": [], "by the connector": []}
        # The first round makes connections.
        for number in range(NUM_ROUNDS + 1):
            # In turn the other way round, since what is done first finds other caches.
            for way in list(took_s)[:: -1 if number % 2 else 1]:
                pipe.send(pattern)
                ticket = pipe.recv()
                is_direct = way == "directly"
                took = _write(peer_name, ranges) if is_direct else _hand_off(node, ticket)
                pipe.send("did it arrive?")
                assert pipe.recv(), f"written {way}, the blocks did not arrive"
                if number:
                    took_s[way].append(took)
        result[pattern] = _report(pattern, took_s["directly"], took_s["by the connector"])
    pipe.send("")
    receiver.join(WAIT_S)
    cluster.close()
    print(json.dumps({"rdma_over_direct": min(result.values()), **result}))


def _report(pattern: str, direct_s: list[float], connector_s: list[float]) -> float:
    mib = NUM_BLOCKS * LAYOUT.block_bytes / (1 << 20)
    direct, connector = (mib / statistics.median(spans) for spans in (direct_s, connector_s))
    print(f"{pattern}: {direct:.1f} MiB/s directly, {connector:.1f} MiB/s by the connector")
    return round(connector / direct, 3)


def _node(cluster: Cluster, name: str) -> Node:
    return cluster.node(
        name,
        layout=LAYOUT,
        window_bytes=WINDOW_BYTES,
        num_blocks=NUM_BLOCKS,
        peer_timeout_s=WAIT_S,  # The emulated processors are kept busy by the devices.
    )


def _ranges(node: Node, peer_start: int, targets: Sequence[int]) -> Ranges:
    """What the lane would write."""
    pool = slabbed(PoolShape.of(LAYOUT, NUM_BLOCKS), max_slabs=MAX_SLABS)
    here, there = (
        PlacedPool(pool, (start,) * pool.num_slabs) for start in (node.pool.ctypes.data, peer_start)
    )
    sources = as_blocks(range(NUM_BLOCKS))
    return np.concatenate(
        [
            ranges_of(LayerChunk(layer, sources, sources), as_blocks(targets), here, there)
            for layer in range(LAYOUT.num_layers)
        ]
    )


def _write(peer_name: str, ranges: Ranges) -> float:
    engine = engine_of(0)
    began_at_s = time.perf_counter()
    assert engine.wait(engine.submit(peer_name, ranges)), "a direct write failed"
    return time.perf_counter() - began_at_s


def _hand_off(node: Node, ticket: Ticket) -> float:
    began_at_s = time.perf_counter()
    node.connector.open(ticket, deadline_s=WAIT_S)
    node.push_all(ticket, range(NUM_BLOCKS))
    node.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))
    event = node.wait_event()
    assert event == TransferEnded(ticket.lease_token, None), event
    return time.perf_counter() - began_at_s


if __name__ == "__main__":
    main()
