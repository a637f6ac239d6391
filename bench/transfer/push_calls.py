"""How long `push` keeps its caller, which is the thread that runs steps on a node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from bench.remote import Remote
from bench.transfer.connector_ends import ConnectorReceiver, ConnectorSender
from bench.transfer.processes import End
from bench.transfer.ways import Span, now_s
from bench.transfer.workload import Memory, Workload
from common.kv.kv_layout import KVLayout
from common.observing.latency import percentile
from kv_transfer.contract import Ticket

BLOCKS_PER_CALL = (1, 64, 100_000)
NUM_SEQUENCES = 8
_NUM_ROUNDS = 8
_LAYER_S = 0.001
"""Pause between two calls, as while a layer is computed: the interpreter is free."""

# Small pieces, so that so many blocks fit into memory.
LAYOUT = KVLayout(
    model_digest="bench", num_layers=16, num_kv_heads=1, head_dim=2, block_size=1, dtype="bfloat16"
)
MOVED = Workload(LAYOUT, NUM_SEQUENCES * max(BLOCKS_PER_CALL) // 2)


def measure(blocks_per_call: Sequence[int] = BLOCKS_PER_CALL) -> dict[str, dict[str, float]]:
    """Return `push_us_p50` and `push_us_p99` by the number of blocks of each call."""
    found = {}
    with (
        closing(Remote(End, _Receiver, _memory)) as receiver,
        closing(ConnectorSender(_memory(MOVED, 1))) as sender,
    ):
        receiver.call("start", MOVED, 0, ())
        for num_blocks in blocks_per_call:
            rounds = []
            for _ in range(1 + _NUM_ROUNDS):
                tickets = receiver.call("prepare", str(num_blocks))
                rounds.append(_push_layers(sender, tickets))
                receiver.call("receive")
            found[str(num_blocks)] = _figures([one for calls in rounds[1:] for one in calls])
    return found


def _figures(calls_s: Sequence[float]) -> dict[str, float]:
    calls_us = [1e6 * one_s for one_s in calls_s]
    return {
        "push_us_p50": round(percentile(calls_us, 50), 1),
        "push_us_p99": round(percentile(calls_us, 99), 1),
    }


def _push_layers(sender: ConnectorSender, tickets: Sequence[Ticket]) -> list[float]:
    """Push each layer of all tickets' blocks, then abort; return the seconds of each push."""
    connector = sender.connector
    ordinals = tuple(range(len(tickets[0].target_block_ids)))
    for ticket in tickets:
        connector.open(ticket, deadline_s=60.0)
    calls_s = []
    for layer in range(LAYOUT.num_layers):
        time.sleep(_LAYER_S)
        for ticket in tickets:
            began_s = time.perf_counter()
            connector.push(
                ticket.lease_token, layer=layer, ordinals=ordinals, source_blocks=ordinals
            )
            calls_s.append(time.perf_counter() - began_s)
    for ticket in tickets:
        connector.abort(ticket.lease_token)
    for _ in tickets:
        sender.wait_event()
    return calls_s


class _Receiver:
    """Reserves as many blocks as asked for, for each sequence; all landings are aborted."""

    def __init__(self, memory: Memory) -> None:
        self._end = ConnectorReceiver(memory)

    def prepare(self, pattern: str) -> list[Ticket]:
        count = int(pattern)
        firsts = range(0, NUM_SEQUENCES * count, count)
        return [self._end.reserve(tuple(range(first, first + count))) for first in firsts]

    def receive(self) -> Span:
        for _ in range(2 * NUM_SEQUENCES):  # LandingFailed and Released
            self._end.wait_event()
        return Span(None, now_s())

    def close(self) -> None:
        self._end.close()


def _memory(moved: Workload, seed: int) -> Memory:
    return Memory(moved, np.full(LAYOUT.pool_shape(moved.num_blocks), seed, np.uint8))
