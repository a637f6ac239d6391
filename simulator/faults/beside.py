"""What an administrator asks a router for: that a node takes another role, or leaves.

The router's own code decides what is asked of which node. Its calls go beside the streams, between
the same hosts; one whose path is cut is not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from common.errors import PdserveError
from common.ids import Incarnation
from common.nodes import Role
from router.cluster.admin_calls import UnknownNode
from router.cluster.drain import drain_node
from router.cluster.role import give_role
from router.core.known.member_effects import MembershipEffect
from router.core.known.roster import Roster
from router.core.membership import Membership
from router.dispatch.calls_beside import TIMEOUT_S
from router.http.errors import ApiError
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.node.life import NodeLife
from simulator.timeline import Timeline

Ask = Callable[[NodeLife], PdserveError | None]


class _Reply:
    """What a coroutine waits for, until `on_reply` is called."""

    def __init__(self) -> None:
        self.on_reply: Callable[[PdserveError | None], object] = lambda _: None

    def __await__(self) -> Generator[_Reply, PdserveError | None, None]:
        refused = yield self
        if refused is not None:
            raise refused


class AdministratorCalls:
    """Those of one router, which finds here what `NodePool` has."""

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
        self.roles_to_be: list[tuple[Incarnation, Role]] = []

    def give_role(self, node_id: str, role: Role) -> None:
        """Have a node take another role, unless the router or the node refuses."""
        pool: Any = self
        _drive(give_role(pool, node_id, role))

    def drain(self, node_id: str) -> None:
        """Have a node leave."""
        pool: Any = self
        _drive(drain_node(pool, node_id))

    # What the router's code asks of its nodes.

    def nodes(self) -> Roster:
        """Return the nodes that can be chosen."""
        return self.membership.nodes()

    def client(self, node: Incarnation) -> _Client:
        """Return who calls a member."""
        return _Client(self, node)

    async def set_role(self, node: Incarnation, role: Role) -> None:
        """Have a node take new work of another role. Raises what it refuses it with."""
        change = node, role
        self.roles_to_be.append(change)
        self._clock.after(TIMEOUT_S, partial(self._end, change))
        await self.call(node, lambda life: life.set_role(role))
        self._end(change)
        self._follow(self.membership.on_role(node, role))
        self._refresh_soon()

    def call(self, node: Incarnation, ask: Ask) -> _Reply:
        """Ask a node something; it answers when that is done."""
        reply = _Reply()
        self._timeline.after(self._latency_s, partial(self._arrive, self._lives[node], ask, reply))
        return reply

    # Inside.

    def _end(self, change: tuple[Incarnation, Role]) -> None:
        self.roles_to_be = [one for one in self.roles_to_be if one is not change]

    def _arrive(self, node: FaultyNode, ask: Ask, reply: _Reply) -> None:
        if self._paths.is_open(self._router.node_id, node.me.node_id):
            node.clock.run(partial(self._take, node, ask, reply))

    def _take(self, node: FaultyNode, ask: Ask, reply: _Reply) -> None:
        answer = ask(node.life)
        self._timeline.after(self._latency_s, partial(self._arrive_back, node, answer, reply))

    def _arrive_back(self, node: FaultyNode, answer: PdserveError | None, reply: _Reply) -> None:
        if self._paths.is_open(node.me.node_id, self._router.node_id):
            self._clock.run(partial(reply.on_reply, answer))


class _Client:
    """Calls one node; `NodeClient` has its calls beside the stream under that name."""

    def __init__(self, calls: AdministratorCalls, node: Incarnation) -> None:
        self._calls = calls
        self._node = node

    @property
    def beside(self) -> _Client:
        return self

    async def drain(self) -> float:
        """Ask the node to leave; return the seconds that it gives to running requests."""
        await self._calls.call(self._node, lambda life: life.drain())
        return 0.0


def _drive(call: Coroutine[Any, Any, object], refused: PdserveError | None = None) -> None:
    """Run a call until it waits for a node, and on when that has answered."""
    try:
        reply: _Reply = call.send(refused)
    except StopIteration:
        return
    except (ApiError, UnknownNode, PdserveError):
        return  # the administrator is told
    reply.on_reply = partial(_drive, call)
