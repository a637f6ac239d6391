"""Decode nodes that take KV very slowly, in one process: neighbours of the one that is measured."""

from __future__ import annotations

import threading

import numpy as np

from bench.handoff.prefill_end import Case, ticket_for
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Ticket
from kv_transfer.lanes.inline_lane import InlineLane
from kv_transfer.lanes.pieces import Sums
from kv_transfer.lanes.pool_memory import Pool, host_pool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import Parts
from kv_transfer.zmq.connector import ZmqConnector

FRAME_S = 1.0
NUM_BLOCKS = 8
"""Blocks of each transfer: in all layers more than a slow node takes during the measurement."""
_FIRST_NUMBER = 1_000_000


class _SlowLane(InlineLane):
    """Takes `FRAME_S` for each frame, until `is_over`."""

    is_over = threading.Event()

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        self.is_over.wait(FRAME_S)
        return super().copy(write, parts, pool)


class SlowNodes:
    """`count` connectors over ZMQ, each with a landing that never ends."""

    def __init__(self, case: Case, layout: KVLayout, count: int) -> None:
        self._layout = layout
        self._nodes = [Incarnation(f"slow-{number}", 1) for number in range(count)]
        self._connectors = [self._connector(case, node) for node in self._nodes]

    def _connector(self, case: Case, node: Incarnation) -> ZmqConnector:
        memory = np.zeros(NUM_BLOCKS * self._layout.block_bytes, np.uint8)
        pool = host_pool(memory, self._layout)
        return ZmqConnector(
            pool,
            self._layout,
            node,
            lambda _: None,
            lanes=[_SlowLane("zmq", pool, Limits())],
            has_inline=False,
            kv_lanes=2,  # So that not the connector's thread waits, and pings are answered.
            verify=case.kv_verify,
        )

    def reserve(self) -> list[Ticket]:
        """Open a landing on each and return the tickets."""
        tickets = []
        for number, (node, connector) in enumerate(
            zip(self._nodes, self._connectors, strict=True), _FIRST_NUMBER
        ):
            ticket = ticket_for(number, self._layout, NUM_BLOCKS, node, connector.endpoint)
            connector.expect(ticket, sender_deadline_s=3600.0)
            tickets.append(ticket)
        return tickets

    def close(self) -> None:
        _SlowLane.is_over.set()
        for connector in self._connectors:
            connector.close()
