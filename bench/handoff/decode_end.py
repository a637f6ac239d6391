"""The decode node's process: its connector and a pool, where prompts land."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import cast

import numpy as np

from bench.handoff.cpu_time import process_cpu_s
from bench.handoff.prefill_end import DEADLINE_S, Case, ticket_for
from common.ids import Incarnation
from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from common.nodes import Role
from kv_transfer.contract import ConnectorEvent, Landed, Ticket
from node.life.node_parts import LoadedModel
from pdserve.roles.kv_plane import KVPlane


class DecodeEnd:
    """Issues tickets and waits for their landings."""

    def __init__(self, case: Case, layout: KVLayout) -> None:
        self._layout = layout
        self._num_blocks = blocks_for(case.prompt_tokens, layout.block_size)
        shape = layout.pool_shape(self._num_blocks)
        self._pool = np.zeros(shape, np.uint8)
        self._pool[:] = 1  # so that no page is allocated during the measurement
        self._me = Incarnation("decode", 1)
        self._events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        model = cast(
            LoadedModel, SimpleNamespace(kv_bytes=self._pool, layout=layout, card_pool=None)
        )
        self._connector = KVPlane(case.config(Role.DECODE)).connect(
            model, self._me, self._events.put
        )
        self._cpu_before_s = 0.0

    def reserve(self, number: int) -> Ticket:
        """Open the landing of prompt `number` and return its ticket."""
        self._cpu_before_s = process_cpu_s()
        ticket = ticket_for(
            number, self._layout, self._num_blocks, self._me, self._connector.endpoint
        )
        self._connector.expect(ticket, sender_deadline_s=DEADLINE_S)
        return ticket

    def wait_landed(self) -> float:
        """Wait until the prompt has landed; return CPU seconds of this process since `reserve`.

        Raises `RuntimeError` when the landing failed.
        """
        event = self._events.get(timeout=DEADLINE_S)
        if not isinstance(event, Landed):
            raise RuntimeError(f"the landing failed: {event}")
        return process_cpu_s() - self._cpu_before_s

    def close(self) -> None:
        self._connector.close()
