"""What the two halves of a connector share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock
from kv_transfer.connector.card_ring import CardRing
from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.connector.workers import Workers
from kv_transfer.lanes.lane import (
    CopyingLane,
    Lane,
    LateCopyingLane,
    LateSummingLane,
    OneSidedLane,
)
from kv_transfer.lanes.pool_memory import SourceMemory
from kv_transfer.receiving.effects import ReceiverEffect
from kv_transfer.sending.effects import SenderEffect
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import Transport

Effect = SenderEffect | ReceiverEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorParts:
    """Queue, lanes, threads and settings of a connector.

    `effects` is the connector's queue; `verify` is a mode of `shared.lanes` or auto. What arrives
    is written to the pool of `memory`, all of which is sent from. With `ring` the pool's
    `num_blocks` blocks are on a card, and the pool of `memory` has the slots of the ring.
    """

    memory: SourceMemory
    num_blocks: int
    layout: KVLayout
    incarnation: Incarnation
    transport: Transport
    lanes: dict[str, Lane]
    verify: str
    clock: Clock
    limits: Limits
    metrics: TransferMetrics
    workers: Workers
    ring: CardRing | None = None
    effects: deque[Effect] = field(default_factory=deque)

    @property
    def one_sided(self) -> dict[str, OneSidedLane]:
        """The lanes on which a sender writes the receiver's pool itself."""
        return {
            name: cast(OneSidedLane, lane)
            for name, lane in self.lanes.items()
            if name in ONE_SIDED_LANES
        }

    @property
    def copying(self) -> dict[str, CopyingLane]:
        """The lanes on which the receiver copies, and waits for it."""
        others = {*ONE_SIDED_LANES, *self.copying_late}
        return {
            name: cast(CopyingLane, lane) for name, lane in self.lanes.items() if name not in others
        }

    @property
    def copying_late(self) -> dict[str, LateCopyingLane]:
        """The lanes whose copies are completed later."""
        lanes = self.lanes.items()
        return {name: lane for name, lane in lanes if isinstance(lane, LateCopyingLane)}

    @property
    def summing_late(self) -> dict[str, LateSummingLane]:
        """The lanes whose sums are known later."""
        lanes = self.lanes.items()
        return {name: lane for name, lane in lanes if isinstance(lane, LateSummingLane)}
