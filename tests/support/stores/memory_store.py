"""A placement store inside one process: the reference for the behaviour of the Redis store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import StaleEpoch
from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.clock import Clock
from placement.store import Leadership, LiveNode, Placement, RoleMove


class MemoryStore:
    """Leases and placements in dictionaries. Expiry follows the injected clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_epoch = 0
        self.nodes: dict[str, tuple[LiveNode, float]] = {}
        self._placements: dict[AttemptId, tuple[Placement, float]] = {}
        self._leader: tuple[Incarnation, float] | None = None
        self._move: RoleMove | None = None

    async def next_epoch(self, node_id: str) -> int:
        """Return the next epoch; one counter serves all nodes, and `clear` does not reset it."""
        self._last_epoch += 1
        return self._last_epoch

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        """Register or renew; `StaleEpoch` when a later incarnation holds the lease."""
        self._expire()
        node_id, epoch = record.node_id, record.epoch
        held = self.nodes.get(node_id)
        if held is not None and held[0].record.epoch > epoch:
            raise StaleEpoch(f"{held[0].record.incarnation} holds the lease of {node_id}")
        expires_at_s = self._clock.now_s() + lease_s
        self.nodes[node_id] = (LiveNode(record=record, load=load), expires_at_s)

    async def take_role(
        self, record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        self._expire()
        found = [self.nodes[name][0] for name in others if name in self.nodes]
        if all(one.record.role is record.role or one.load.is_draining for one in found):
            return False
        await self.heartbeat(record, load, lease_s=lease_s)
        return True

    async def lease_left_s(self, node_id: str) -> float:
        self._expire()
        held = self.nodes.get(node_id)
        return 0.0 if held is None else held[1] - self._clock.now_s()

    async def leave(self, incarnation: Incarnation) -> None:
        held = self.nodes.get(incarnation.node_id)
        if held is not None and held[0].record.incarnation == incarnation:
            del self.nodes[incarnation.node_id]

    async def live_nodes(self) -> list[LiveNode]:
        self._expire()
        return [self.nodes[node_id][0] for node_id in sorted(self.nodes)]

    async def record(
        self,
        placed: Sequence[Placement],
        gone: Sequence[AttemptId],
        *,
        router_id: str,
        ttl_s: float,
    ) -> None:
        self._expire()
        expires_at_s = self._clock.now_s() + ttl_s
        for placement in placed:
            self._placements[placement.attempt] = (placement, expires_at_s)
        for attempt in gone:
            held = self._placements.get(attempt)
            if held is not None and held[0].router_id == router_id:
                del self._placements[attempt]

    @property
    def num_placements(self) -> int:
        return len(self._placements)

    async def placements(self) -> list[Placement]:
        self._expire()
        return [self._placements[attempt][0] for attempt in sorted(self._placements)]

    async def lead(self, router: Incarnation, *, lease_s: float) -> Leadership:
        if self._leads(router) or self._leader is None:
            self._leader = router, self._clock.now_s() + lease_s
        assert self._leader is not None
        return Leadership(leader=self._leader[0], last_move=self._move)

    async def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role
    ) -> RoleMove | None:
        if not self._leads(router) or (self._move is not None and self._move.is_open):
            return None
        self._last_epoch += 1
        self._move = RoleMove(number=self._last_epoch, node=node, role=role, is_open=True)
        return self._move

    async def end_move(self, router: Incarnation, number: int) -> bool:
        if not self._leads(router) or self._move is None or self._move.number != number:
            return False
        self._move = replace(self._move, is_open=False)
        return True

    async def stop_leading(self, router: Incarnation) -> None:
        if self._leads(router):
            self._leader = None

    def _leads(self, router: Incarnation) -> bool:
        if self._leader is not None and self._leader[1] <= self._clock.now_s():
            self._leader = None
        return self._leader is not None and self._leader[0] == router

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def clear(self) -> None:
        """Remove everything, like a flushed server."""
        self.nodes.clear()
        self._placements.clear()
        self._leader = self._move = None

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        self.nodes = {key: held for key, held in self.nodes.items() if held[1] > now_s}
        self._placements = {k: held for k, held in self._placements.items() if held[1] > now_s}
