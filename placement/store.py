"""The contract of a placement store.

Losing the store costs cache hits and new nodes, never an answer: no request waits for it on its
data path, and `heartbeat` contains the whole record, so an emptied store fills again by itself.
Every method has a deadline of its own and raises `PlacementUnavailable` when the store is
unreachable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import PlacementUnavailable
from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, NodeRecord, Role


class PlacementSlow(PlacementUnavailable):
    """The store accepted a call but did not answer within its time: it may be busy."""

    code = "placement_slow"


class PlacementRefused(PlacementUnavailable):
    """The store answered that it does not do the call: it takes no writes now, or not from us."""

    code = "placement_refused"


class PlacementForbidden(PlacementRefused):
    """The store and this process do not accept each other: a password, user or certificate is
    wrong, or the server has no such database or not the commands that a store needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A node whose lease has not expired, with the load it last reported."""

    record: NodeRecord
    load: NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one attempt runs and why. `prefill` is None when the decode node prefills it itself."""

    attempt: AttemptId
    router_id: str
    decode: Incarnation | None
    prefill: Incarnation | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMove:
    """A node that is to have another role, as the leader of that time was allowed to tell it.

    `number` is higher than that of every earlier move; nodes take none with a lower one. While
    `is_open`, nobody may begin another move: the node may hear of it at any time.
    """

    number: int
    node: Incarnation
    role: Role
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Which router decides about roles now, and the last move that any of them began."""

    leader: Incarnation
    last_move: RoleMove | None


class PlacementStore(Protocol):
    """Thirteen methods; the in-memory and the Redis store pass one contract suite."""

    async def next_epoch(self, node_id: str) -> int:
        """Return an epoch higher than any before for `node_id`, also after the store was emptied.

        Raises `PlacementUnavailable`, like every method.
        """

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        """Register or renew a lease. Raises `StaleEpoch` when a later incarnation holds it."""

    async def take_role(
        self, record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        """Renew a lease as `heartbeat` does, with another role, if the old work is still done.

        It is if one of the nodes named in `others` has a valid lease, another role than that of
        `record`, and does not drain. That is looked at in the same step that writes: of the last
        two that change their roles at once, one is refused. Returns whether the role was written.
        """

    async def lease_left_s(self, node_id: str) -> float:
        """Return in how many seconds the lease of a node ends; 0 where nobody holds one."""

    async def leave(self, incarnation: Incarnation) -> None:
        """Drop the lease, only if this incarnation holds it."""

    async def live_nodes(self) -> list[LiveNode]:
        """Return all nodes with a valid lease, ordered by node id."""

    async def record(
        self,
        placed: Sequence[Placement],
        gone: Sequence[AttemptId],
        *,
        router_id: str,
        ttl_s: float,
    ) -> None:
        """Write one router's changes in one call, all of them or none.

        The `placed` attempts run on the given nodes; they expire `ttl_s` after the last call that
        names them. Those that are `gone` are removed if this router placed them.
        """

    async def placements(self) -> list[Placement]:
        """Return all recorded placements, ordered by attempt."""

    async def lead(self, router: Incarnation, *, lease_s: float) -> Leadership:
        """Take or renew the lease of the router that decides about roles, unless another has it."""

    async def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role
    ) -> RoleMove | None:
        """Allow the leader one move; None where `router` does not lead, or a move is open.

        The lease and the last move are looked at in the same step that writes this one, so a router
        that was frozen and believes to lead gets None.
        """

    async def end_move(self, router: Incarnation, number: int) -> bool:
        """Close the move of this number; return whether `router` leads and it was the last one."""

    async def stop_leading(self, router: Incarnation) -> None:
        """Drop the lease, only if this router holds it."""

    async def close(self) -> None:
        """Release connections."""
