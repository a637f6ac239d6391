"""Pairs of nodes that do without a faster lane of this node: why, and until when."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.lanes.lane import Lane, OneSidedLane
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import LANES_BY_SPEED

logger = logging.getLogger("pdserve.kv_transfer")


class Fallbacks:
    """Logs and counts each connection once that does not have this node's lane by RDMA."""

    def __init__(self, by_rdma: Mapping[str, Lane], metrics: TransferMetrics) -> None:
        self._by_rdma = by_rdma
        self._metrics = metrics
        # Lanes that were not offered to a connected peer, for a while.
        self._withheld: dict[Peer, list[Lane]] = {}

    def note(self, peer: Peer, taken: str) -> None:
        """Record that the lane `taken` was agreed on with `peer`.

        A lane that cools down was counted when it failed.
        """
        slower_than = LANES_BY_SPEED[: LANES_BY_SPEED.index(taken)]
        withheld = []
        for name, lane in self._by_rdma.items():
            if name not in slower_than:
                continue
            if lane.offer(peer) is not None:
                self._metrics.on_fallback(name, "not_agreed")
                why = "was not agreed on"
            else:
                withheld.append(lane)
                why = "failed, and is left out for a while"
                if isinstance(lane, OneSidedLane) and lane.is_full_for(peer):
                    self._metrics.on_fallback(name, "full")
                    why = "has as many peers as it can have, and is left out for a while"
            logger.warning("KV to %s goes over %s: %s %s", peer, taken, name, why)
        if withheld:
            self._withheld[peer] = withheld

    def forget(self, peer: Peer) -> None:
        """Forget a peer whose connection is over."""
        self._withheld.pop(peer, None)

    def take_offered_again(self) -> list[Peer]:
        """Return the connected peers to which a lane that was withheld can be offered now.

        Their connections must be opened again for it.
        """
        found = []
        for peer, lanes in list(self._withheld.items()):
            if any(lane.offer(peer) is not None for lane in lanes):
                logger.info("%s to %s is offered again", lanes[0].name, peer)
                del self._withheld[peer]
                found.append(peer)
        return found
