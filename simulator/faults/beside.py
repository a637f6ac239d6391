"""Changes that an administrator asks a router for: a node takes another role, or drains.

The router's own code decides which calls to which nodes that takes. They go beside the streams,
between the same hosts; a call whose path is cut is not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from common.errors import DeadlineExceeded, InternalError, PdserveError
from common.ids import Incarnation
from common.nodes import Role
from router.cluster.drain import drain_node
from router.cluster.role import give_role
from router.core.known.changes import ChangesUnderWay
from router.core.known.member_effects import MembershipEffect
from router.core.known.roster import Roster
from router.core.membership import Membership
from router.dispatch.client.calls_beside import TIMEOUT_S
from simulator.faults.awaited import AwaitedReply, drive
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.node.life import NodeLife
from simulator.timeline import Timeline

Ask = Callable[[NodeLife], PdserveError | None]


class AdministratorCalls:
    """The calls of one router, with the part of `NodePool` that its code uses."""

    def __init__(
        self,
        router: Incarnation,
        clock: ProcessClock,
        timeline: Timeline,
        paths: Paths,
        latency_s: float,
        lives: Mapping[Incarnation, FaultyNode],
        membership: Membership,
        *,
        follow: Callable[[Sequence[MembershipEffect]], object],
        refresh_soon: Callable[[], object],
    ) -> None:
        self._router, self._clock = router, clock
        self._timeline, self._paths, self._latency_s = timeline, paths, latency_s
        self._lives = lives
        self._follow, self._refresh_soon = follow, refresh_soon
        self.membership = membership
        self._told_roles: dict[Incarnation, tuple[Role, int]] = {}
        """The role that each node has told last that was given one here, and how often it had
        changed when it answered."""
        self.changes = ChangesUnderWay()

    def give_role(self, node_id: str, role: Role) -> None:
        """Give a node another role, unless the router or the node refuses."""
        pool: Any = self
        drive(give_role(pool, node_id, role))

    def have_leave(self, node_id: str) -> None:
        """Drain a node."""
        pool: Any = self
        drive(drain_node(pool, node_id))

    # The part of `NodePool` that the router's code calls.

    @property
    def is_store_away(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self.membership.is_store_away

    def roles_told(self) -> dict[Incarnation, Role]:
        """Return the roles that nodes have told here and have not changed since."""
        return {
            node: role
            for node, (role, num_moves) in self._told_roles.items()
            if self._lives[node].life.num_moves == num_moves
        }

    def nodes(self) -> Roster:
        """Return the nodes that can be chosen."""
        return self.membership.nodes()

    def is_member(self, node: Incarnation) -> bool:
        """Return whether a node is a member, be it suspected or lost."""
        return any(record.incarnation == node for record in self.membership.records())

    def has_heard_all(self) -> bool:
        """Return whether there are members, and each was heard."""
        records = self.membership.records()
        return bool(records) and all(
            self.membership.was_heard(record.incarnation) for record in records
        )

    async def set_role(
        self,
        node: Incarnation,
        role: Role,
        *,
        number: int = 0,
        others: Sequence[str] | None = None,
    ) -> Role:
        """Give a node another role for new work; return the one that it had until now.

        Raises the error with which the node refuses, and `DeadlineExceeded` where it does not
        answer.
        """
        num_moves, earlier = 0, role

        def ask(life: NodeLife) -> PdserveError | None:
            nonlocal num_moves, earlier
            earlier = life.role
            refusal = life.set_role(role, number, others)
            num_moves = life.num_moves  # It may change again before its answer arrives.
            return refusal

        with self.changes.of_role():
            await self.call(node, ask)
        self._told_roles[node] = role, num_moves
        try:
            self._follow(self.membership.on_role(node, role))
        except InternalError as wrong:
            # Not in this call, whose caller would take it for a refusal of the node.
            self._clock.after(0.0, partial(_raise, wrong))
        self._refresh_soon()
        return earlier

    async def drain(self, node: Incarnation) -> float:
        """Ask the node to leave; return the seconds that it gives to running requests."""
        with self.changes.of_leaving(self.membership.nodes(), node):
            await self.call(node, lambda life: life.drain())
        self._refresh_soon()
        return 0.0

    def call(self, node: Incarnation, ask: Ask) -> AwaitedReply:
        """Send a call to a node, which answers when it has performed it."""
        reply = AwaitedReply()
        self._timeline.after(self._latency_s, partial(self._arrive, self._lives[node], ask, reply))
        late = DeadlineExceeded(f"{node} did not answer within {TIMEOUT_S:g} s")
        self._clock.after(TIMEOUT_S, partial(reply.end, late))
        return reply

    # Inside.

    def _arrive(self, node: FaultyNode, ask: Ask, reply: AwaitedReply) -> None:
        if self._paths.is_open(self._router.node_id, node.me.node_id):
            node.clock.run(partial(self._take, node, ask, reply))

    def _take(self, node: FaultyNode, ask: Ask, reply: AwaitedReply) -> None:
        answer = ask(node.life)
        self._timeline.after(self._latency_s, partial(self._arrive_back, node, answer, reply))

    def _arrive_back(
        self, node: FaultyNode, answer: PdserveError | None, reply: AwaitedReply
    ) -> None:
        if self._paths.is_open(node.me.node_id, self._router.node_id):
            self._clock.run(partial(reply.end, answer))


def _raise(wrong: InternalError) -> None:
    raise wrong
