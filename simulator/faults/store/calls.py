"""A router's calls of the store: who is alive, and roles.

A call that the store does not answer in time has failed for the router. The store may have
performed it: the answer may be lost, and a call that waits at a cut path is performed when the path
is open again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from placement.redis_store import CALL_TIMEOUT_S
from placement.store import Leadership, LiveNode, RoleMove
from simulator.faults.awaited import AwaitedReply
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kinds import STORE
from simulator.faults.store.leading import Leading
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline

Do = Callable[[float], object]
_LATENCIES = (1, 1, 4, 20)
"""How much longer than a message to a node one to the store takes."""


class StoreCalls:
    """The calls of one router: the methods of a `PlacementStore` that it and its `RoleKeeper` call.

    Each raises `PlacementUnavailable` without an answer in time.
    """

    def __init__(
        self,
        router: Incarnation,
        clock: ProcessClock,
        timeline: Timeline,
        paths: Paths,
        leases: Leases,
        leading: Leading,
        latency_s: float,
        seed: int,
    ) -> None:
        self._router, self._clock, self._timeline = router, clock, timeline
        self._paths, self._leases, self._leading = paths, leases, leading
        self._latency_s, self._rng = latency_s, random.Random(f"{router} asks the store of {seed}")
        self._waiting: deque[Callable[[], object]] = deque()

    async def live_nodes(self) -> Sequence[LiveNode]:
        """Return the nodes whose leases have not expired."""
        found: Sequence[LiveNode] = await self._call(self._leases.live_nodes)
        return found

    async def lead(self, router: Incarnation, *, lease_s: float) -> Leadership:
        """Take or renew the lease."""
        found: Leadership = await self._call(partial(self._leading.lead, router, lease_s))
        return found

    async def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role
    ) -> RoleMove | None:
        """Begin a change, or return None."""
        begun: RoleMove | None = await self._call(
            partial(self._leading.begin_move, router, node, role)
        )
        return begun

    async def end_move(self, router: Incarnation, number: int) -> bool:
        """Close a change; return whether that was to be done."""
        is_closed: bool = await self._call(partial(self._leading.end_move, router, number))
        return is_closed

    @property
    def has_failed(self) -> bool:
        """Whether the store was asked while it was away, by whomever: roles may not be written."""
        return self._leases.has_failed

    def flush(self) -> None:
        """Make the calls that waited for a path that is open again."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call()

    # Inside.

    def _call(self, do: Do) -> AwaitedReply:
        reply = AwaitedReply()
        self._timeline.after(self._some_time_s(), partial(self._arrive, do, reply))
        away = PlacementUnavailable("the store does not answer")
        self._clock.after(CALL_TIMEOUT_S, partial(reply.end, away))
        return reply

    def _arrive(self, do: Do, reply: AwaitedReply) -> None:
        if not self._clock.is_alive or self._leases.is_away:
            self._leases.has_failed |= self._leases.is_away
            return
        if not self._paths.is_open(self._router.node_id, STORE):
            self._waiting.append(partial(self._arrive, do, reply))
            return
        found = do(self._timeline.now_s())
        self._timeline.after(self._some_time_s(), partial(self._arrive_back, reply, found))

    def _some_time_s(self) -> float:
        return self._latency_s * self._rng.choice(_LATENCIES)

    def _arrive_back(self, reply: AwaitedReply, found: object) -> None:
        if self._paths.is_open(STORE, self._router.node_id):
            self._clock.run(partial(reply.end, found))
