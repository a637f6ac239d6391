"""The life of a node beside its steps: its lease, its role, and its drain."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from common.errors import InternalError, PdserveError, PlacementUnavailable
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.request import FinishReason, RequestOutput
from node.control.drain import LAST_GRACE_S
from node.control.role import NodeRole
from node.flow.messages import Drain, Message, RoleChanged
from node.flow.node_flow import NodeFlow
from node.life.lease_keeper import RENEWALS_PER_LEASE
from simulator.faults.hosts import ProcessClock
from simulator.faults.kv.end import KVEnd
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline

T = TypeVar("T")
OnLeft = Callable[[Incarnation, bool], object]
"""Called with a node that has drained, and whether it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStore:
    """The store of a node's lease, and callbacks for changes of the node.

    `on_replaced` is called with a node whose name belongs to a later life, `on_role` with one whose
    role has changed, and the number of the change.
    """

    leases: Leases
    timeline: Timeline
    lease_s: float
    drain_s: float
    on_left: OnLeft
    on_replaced: Callable[[Incarnation], object]
    on_role: Callable[[Incarnation, int], object]


class LivingNode(Protocol):
    """The part of a node that its event loop calls."""

    me: Incarnation
    clock: ProcessClock
    flow: NodeFlow
    kv: KVEnd

    def put(self, message: Message) -> None:
        """Take a message."""

    def is_empty(self) -> bool:
        """Return whether the node holds no attempt, no block, no seat and no message."""


class NodeLife:
    """The event loop of a node; the real `NodeRole` decides about roles."""

    def __init__(
        self,
        node: LivingNode,
        record: NodeRecord,
        role: Role,
        refused: Mapping[Role, str],
        store: LifeStore,
    ) -> None:
        self._node, self._record, self._store = node, record, store
        self.is_on = False
        """Whether the node drains; `NodeRole` asks for it by this name."""
        self.drain_ends_s = float("inf")
        self.num_moves = 0
        """How often the node's role has changed."""
        self._has_left = False
        leaving: Any = self
        self._role = NodeRole(role, leaving, refused)
        self._role.on_change(lambda: node.put(RoleChanged()), self._announce, self._claim)

    @property
    def role(self) -> Role:
        """The role that the node has now."""
        return self._role.current

    def keep_lease(self) -> None:
        """Renew the lease now, and from now on."""
        self._renew()
        span_s = self._store.lease_s / RENEWALS_PER_LEASE
        self._node.clock.after(span_s, self.keep_lease)

    def set_role(
        self, role: Role, number: int = 0, others: Sequence[str] | None = None
    ) -> PdserveError | None:
        """Take new work of another role, by the change of this number; return a refusal, if any."""
        try:
            earlier = _result(self._role.change(role, number, others))
        except InternalError:  # A check has failed: no refusal.
            raise
        except PdserveError as refused:
            return refused
        if self.role is not earlier:
            self.num_moves += 1
            self._store.on_role(self._node.me, number)
        return None

    def drain(self) -> None:
        """Begin to leave, once."""
        if self.is_on:
            return
        clock, drain_s = self._node.clock, self._store.drain_s
        self.is_on, self.drain_ends_s = True, clock.now_s() + drain_s
        self._renew()
        self._node.put(Drain(drain_s))
        clock.after(drain_s + LAST_GRACE_S, lambda: self._leave(is_empty=False))

    def on_drained(self) -> None:
        """Leave the cluster after the turn in which the last resource was released.

        The rest of that turn may begin to copy a prefix to host memory. Raises `InternalError` if
        the node holds something now.
        """
        if not (self._node.is_empty() and self._node.kv.is_idle):
            raise InternalError(f"{self._node.me} has drained, and holds something")
        self._node.clock.after(0.0, lambda: self._leave(is_empty=True))

    def check_output(self, output: RequestOutput) -> None:
        """Raise `InternalError` where a node hands over a request that has time to finish."""
        details = output.details
        if details.finish_reason is not FinishReason.ERROR or details.error_code != "draining":
            return
        if self._node.clock.now_s() < self.drain_ends_s:
            raise InternalError(f"{self._node.me} gives up {output.id}, which has time")

    def _leave(self, *, is_empty: bool) -> None:
        if not self._has_left:
            self._has_left = True
            self._store.leases.leave(self._node.me)
            self._store.on_left(self._node.me, is_empty)

    async def _announce(self) -> None:
        self._renew()

    async def _claim(self, role: Role, others: Sequence[str]) -> bool:
        record, now_s = replace(self._record, role=role), self._store.timeline.now_s()
        return self._store.leases.take_role(record, self._load(), others, now_s)

    def _load(self) -> NodeLoad:
        load, unreachable = self._node.flow.load(), self._node.kv.sender.unreachable
        if load.is_draining is not self.is_on or unreachable:
            load = replace(load, is_draining=self.is_on, kv_unreachable=unreachable)
        return load

    def _renew(self) -> None:
        store, node = self._store, self._node
        if self._record.role is not self.role:
            self._record = replace(self._record, role=self.role)
        try:
            is_newest = store.leases.heartbeat(self._record, self._load(), store.timeline.now_s())
        except PlacementUnavailable:
            return
        if not is_newest:
            store.on_replaced(node.me)


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise InternalError("it waits for something")
