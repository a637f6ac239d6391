"""The store's leases: the nodes that are alive, as far as the store was told. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord
from placement.store import LiveNode


class Leases:
    """The leases as the scripts of the real store change them. `now_s` is the store's time.

    While `is_away` every call raises `PlacementUnavailable`.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held: dict[str, tuple[LiveNode, float]] = {}
        self._epoch = 0
        self.is_away = False
        self.has_failed = False
        """Whether it was asked while it was away."""
        self.ahead_s = 0.0
        self.num_emptied = 0

    def next_epoch(self) -> int:
        """Return an epoch above all earlier ones, by the clock, also in an emptied store."""
        self._check()
        self._epoch += 1
        return self._epoch

    def heartbeat(self, record: NodeRecord, load: NodeLoad, now_s: float) -> bool:
        """Renew a lease; return whether no later incarnation holds it."""
        self._check()
        held = self._live(record.node_id, now_s)
        if held is not None and held.record.epoch > record.epoch:
            return False
        ends_s = now_s + self.ahead_s + self._lease_s
        self._held[record.node_id] = LiveNode(record=record, load=load), ends_s
        return True

    def take_role(
        self, record: NodeRecord, load: NodeLoad, others: Sequence[str], now_s: float
    ) -> bool:
        """Renew a lease with another role if one of `others` stays in one that is not the new one;
        return whether that was done."""
        self._check()
        found = [one for one in (self._live(name, now_s) for name in others) if one is not None]
        if all(one.record.role is record.role or one.load.is_draining for one in found):
            return False
        return self.heartbeat(record, load, now_s)

    def leave(self, node: Incarnation) -> None:
        """Give a lease back."""
        held = self._held.get(node.node_id)
        if not self.is_away and held is not None and held[0].record.epoch == node.epoch:
            del self._held[node.node_id]

    def live_nodes(self, now_s: float) -> list[LiveNode]:
        """Return the nodes whose leases have not expired, by name."""
        self._check()
        found = [self._live(name, now_s) for name in sorted(self._held)]
        return [one for one in found if one is not None]

    def empty(self) -> None:
        """Lose everything."""
        self._held.clear()
        self.num_emptied += 1

    def _live(self, name: str, now_s: float) -> LiveNode | None:
        held = self._held.get(name)
        return None if held is None or held[1] <= now_s + self.ahead_s else held[0]

    def _check(self) -> None:
        if self.is_away:
            self.has_failed = True
            raise PlacementUnavailable("the store does not answer")
