"""The sender of the stages `ipc` and `ipc_lane`: a process with a cache of its own on the card.

It says where its memory is offered, as one line of JSON, and then sends what tickets it is given,
pickled lists on its input, one line of JSON with their errors for each list.
"""

from __future__ import annotations

import json
import pickle
import queue
import sys
from typing import Any

import numpy as np

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from engine.runner.gpu.cache.pool import GpuCache
from kv_transfer.lanes.ipc.descriptors import OfferedDescriptor
from tests.gpu.measuring import Card

LAYOUT = KVLayout(
    model_digest="random", num_layers=36, num_kv_heads=8, head_dim=128, block_size=64,
    dtype="bfloat16",
)  # fmt: skip
PROMPT_BLOCKS = 16
NUM_BLOCKS = 4 * PROMPT_BLOCKS
TOKEN = 1


def cache_of(card: Any, layout: KVLayout, content: np.ndarray | None = None) -> GpuCache:
    """Return a cache, with this content `[num_bytes]` if it is given."""
    num_bytes = NUM_BLOCKS * layout.block_bytes
    cache = GpuCache(card.device, card.kernel, card.stream, layout, num_bytes)
    if content is not None:
        card.device.upload_array(cache.pool.address, content)
    card.device.synchronize(card.stream)
    return cache


def content_of(layout: KVLayout) -> np.ndarray:
    """Return what a sender's cache holds: uint8 `[num_bytes]`."""
    words = NUM_BLOCKS * layout.block_bytes // 8
    return np.random.default_rng(7).integers(0, 1 << 62, words, np.int64).view(np.uint8)


def connector_of(cache: GpuCache, name: str, *, is_offered: bool) -> tuple[Any, queue.Queue[Any]]:
    """Return a connector that knows the lane `ipc` alone, and its events."""
    from kv_transfer.lanes.ipc.ipc_lane import IpcLane
    from kv_transfer.lanes.pool_memory import ring_pool
    from kv_transfer.zmq.connector import ZmqConnector
    from tests.support.engine.moved_blocks import new_ring

    events: queue.Queue[Any] = queue.Queue()
    ring = new_ring(cache.layout, 2)  # This lane does without, a connector not.
    connector = ZmqConnector(
        ring_pool(ring, cache.layout), cache.layout, Incarnation(name, 1), events.put,
        lanes=[IpcLane(cache.layout, cache.card_pool, is_offered=is_offered)],
        card=cache.card_pool, has_inline=False,
    )  # fmt: skip
    return connector, events


def send(connector: Any, events: queue.Queue[Any], tickets: list[Any]) -> list[str]:
    """Hand over a prompt for each ticket; return the errors."""
    from kv_transfer.contract import Commit

    for ticket in tickets:
        connector.open(ticket, deadline_s=30.0)
    for layer in range(LAYOUT.num_layers):
        for place, ticket in enumerate(tickets):
            sources = range(place * PROMPT_BLOCKS, (place + 1) * PROMPT_BLOCKS)
            connector.push(
                ticket.lease_token, layer=layer, ordinals=range(PROMPT_BLOCKS),
                source_blocks=sources,
            )  # fmt: skip
    num_tokens = PROMPT_BLOCKS * LAYOUT.block_size
    for ticket in tickets:
        connector.commit(ticket.lease_token, Commit(num_tokens=num_tokens, first_token_id=TOKEN))
    ended = [events.get(timeout=30) for _ in tickets]
    return [str(event.error) for event in ended if event.error is not None]


def main(card: Any) -> None:
    cache = cache_of(card, LAYOUT, content_of(LAYOUT))
    offered = OfferedDescriptor(cache.card_pool.export())
    offered.start()
    pool = cache.card_pool
    place = {
        "nonce": offered.nonce.hex(), "bytes": pool.shared_bytes, "blocks": pool.num_blocks
    }  # fmt: skip
    print(json.dumps(place), flush=True)
    connector = None
    while True:
        try:
            tickets = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if connector is None:
            connector, events = connector_of(cache, "p", is_offered=True)
        print(json.dumps(send(connector, events, tickets)), flush=True)
    if connector is not None:
        connector.close()
    offered.close()


if __name__ == "__main__":
    main(Card())
