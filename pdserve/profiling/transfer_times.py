"""Times of KV transfers by size: between two connectors as nodes have them, in this process."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from common.measured_profile import TransferTime
from kv_transfer.contract import Commit, ConnectorEvent, Landed, Ticket, TransferEnded
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import host_pool
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.zmq.connector import ZmqConnector

NUM_REPEATS = 3
_DEADLINE_S = 30.0


def transfer_times(
    layout: KVLayout, tell: Callable[[str], None], most_bytes: int
) -> tuple[TransferTime, ...]:
    """Return the least time of some moves of each size, over `zmq` and over shared memory.

    Sizes are of one block, four, sixteen and so on, up to about `most_bytes`.

    Raises `HandoffFailed` when a transfer fails or takes longer than `_DEADLINE_S`.
    """
    most = max(1, most_bytes // layout.block_bytes)
    sizes = sorted({min(most, 4**power) for power in range(12)})
    found = []
    for transport in ("zmq", "shm"):
        pair = _Pair(layout, most, is_shared=transport == "shm")
        with closing(pair):
            for num_blocks in sizes:
                seconds = min(pair.move_s(num_blocks) for _ in range(NUM_REPEATS))
                num_bytes = num_blocks * layout.block_bytes
                found.append(
                    TransferTime(transport=transport, num_bytes=num_bytes, seconds=seconds)
                )
                tell(f"{num_bytes / 2**20:.2f} MiB of KV over {transport}: {1e3 * seconds:.2f} ms")
    return tuple(found)


class _Pair:
    """A prefill node's connector and a decode node's, with a pool of `num_blocks` blocks each."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, is_shared: bool) -> None:
        self._layout = layout
        self._events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        self._tokens = itertools.count(1)
        self._shared = SharedPool(num_blocks * layout.block_bytes, is_touched=True)
        target = np.zeros(num_blocks * layout.block_bytes, np.uint8)
        shape = layout.pool_shape(num_blocks)
        lanes: tuple[list[Lane], list[Lane]] = ([], [])
        if is_shared:
            lanes = [ShmLane(layout, self._shared)], [ShmLane(layout)]
        self._me = Incarnation("profile-decode", 1)
        self._sender = ZmqConnector(
            host_pool(self._shared.memory.reshape(shape), layout),
            layout,
            Incarnation("profile-prefill", 1),
            self._events.put,
            lanes=lanes[0],
            has_inline=not is_shared,
        )
        self._receiver = ZmqConnector(
            host_pool(target.reshape(shape), layout),
            layout,
            self._me,
            self._events.put,
            lanes=lanes[1],
            has_inline=not is_shared,
        )

    def move_s(self, num_blocks: int) -> float:
        """Return the seconds from the opening of a transfer until both ends have ended it."""
        token = next(self._tokens)
        ticket = Ticket(
            attempt=AttemptId(f"profile-{token}", 0),
            decode_node=self._me,
            kv_endpoint=self._receiver.endpoint,
            lease_token=token,
            generation=1,
            target_block_ids=tuple(range(num_blocks)),
            num_cached_tokens=0,
            fingerprint=self._layout.fingerprint,
            lease_s=_DEADLINE_S,
        )
        self._receiver.expect(ticket, sender_deadline_s=_DEADLINE_S)
        began_at_s = time.perf_counter()
        self._sender.open(ticket, deadline_s=_DEADLINE_S)
        ordinals = range(num_blocks)
        for layer in range(self._layout.num_layers):
            self._sender.push(token, layer=layer, ordinals=ordinals, source_blocks=ordinals)
        num_tokens = num_blocks * self._layout.block_size
        self._sender.commit(token, Commit(num_tokens=num_tokens, first_token_id=0))
        for _ in range(2):
            self._take_end()
        return time.perf_counter() - began_at_s

    def _take_end(self) -> None:
        try:
            event = self._events.get(timeout=_DEADLINE_S)
        except queue.Empty:
            raise HandoffFailed(f"no transfer ended within {_DEADLINE_S:g} s") from None
        if not isinstance(event, Landed) and (
            not isinstance(event, TransferEnded) or event.error is not None
        ):
            raise HandoffFailed(f"a transfer failed: {event}")

    def close(self) -> None:
        """End both connectors and give the memory back."""
        self._sender.close()
        self._receiver.close()
