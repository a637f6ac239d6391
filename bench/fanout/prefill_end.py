"""The prefill node's connector in a process of its own, whose CPU time is measured."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

import numpy as np

from bench.fanout.workload import BLOCKS, COMMIT, DEADLINE_S, LAYOUT
from bench.handoff.cpu_time import process_cpu_s
from common.ids import Incarnation
from kv_transfer.contract import ConnectorEvent, Ticket, TransferEnded
from kv_transfer.zmq.connector import ZmqConnector

NUM_OPEN = 8
"""Handoffs at once, to that many nodes where there are enough."""


class PrefillEnd:
    """Hands off the same blocks, which hold random bytes, again and again."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        shape = LAYOUT.pool_shape(len(BLOCKS))
        pool = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self._connector = ZmqConnector(pool, LAYOUT, Incarnation("prefill", 1), self._events.put)

    def hand_off(self, tickets: Sequence[Ticket]) -> float:
        """Return the CPU seconds of this process until every handoff was acknowledged.

        Raises `RuntimeError` when one failed.
        """
        began_s = process_cpu_s()
        for number, ticket in enumerate(tickets):
            if number >= NUM_OPEN:
                self._wait_ended()
            self._begin(ticket)
        for _ in tickets[-NUM_OPEN:]:
            self._wait_ended()
        return process_cpu_s() - began_s

    def idle(self, seconds: float) -> float:
        """Return the share of a core that this process takes while nothing is handed off."""
        began_s, began_at_s = process_cpu_s(), time.monotonic()
        time.sleep(seconds)
        return (process_cpu_s() - began_s) / (time.monotonic() - began_at_s)

    def close(self) -> None:
        self._connector.close()

    def _begin(self, ticket: Ticket) -> None:
        token = ticket.lease_token
        self._connector.open(ticket, deadline_s=DEADLINE_S)
        for layer in range(LAYOUT.num_layers):
            self._connector.push(token, layer=layer, ordinals=BLOCKS, source_blocks=BLOCKS)
        self._connector.commit(token, COMMIT)

    def _wait_ended(self) -> None:
        event = self._events.get(timeout=DEADLINE_S)
        if not isinstance(event, TransferEnded) or event.error is not None:
            raise RuntimeError(f"a handoff failed: {event}")
