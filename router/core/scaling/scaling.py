"""What the load wants of the cluster, decided anew with each reading. Pure.

Nodes serve on while what they report is not read: the placement store is away, or a node cannot
write to it. Taken for idle, busy nodes would be removed by an autoscaler. So a role with such nodes
wants no fewer than in the last seconds before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.nodes import Role
from common.observing.latency import LatencyTargets
from router.core.known.node_view import NodeView
from router.core.scaling.demand import RoleDemand, demands
from router.core.scaling.measure import ROLES, WINDOW_S, Meter
from router.core.scaling.moves import Moves, NextMove


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was found at one moment: each role's demand, and the move to make, or why there is
    none."""

    at_s: float
    targets: LatencyTargets
    demands: Mapping[Role, RoleDemand]
    choice: NextMove


class RoleScaling:
    """Reads the nodes, and says what they should be."""

    def __init__(self, targets: LatencyTargets) -> None:
        self.targets = targets
        self._meter = Meter()
        self.moves = Moves()
        self._last: Decision | None = None
        self._untold_at_s: dict[Role, float] = {}
        """The time at which nodes of a role served last without a report."""
        self._wanted: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in ROLES}
        """The nodes that were wanted in the last seconds in which all of a role had reported."""

    def decide(
        self, nodes: Sequence[NodeView], now_s: float, *, is_store_away: bool = False
    ) -> Decision:
        """Read the present reports of all nodes; return the decision.

        With `is_store_away` these are old, and what was decided last holds, without a move.
        """
        if is_store_away and self._last is not None:
            self._untold_at_s = dict.fromkeys(ROLES, now_s)
            return replace(self._last, choice=NextMove(None, "the placement store is away"))
        found = demands(self._meter.read(nodes, now_s), self.targets)
        self._last = Decision(
            at_s=now_s,
            targets=self.targets,
            demands=self._held(found, nodes, now_s),
            choice=self.moves.choose(found, nodes, now_s),
        )
        return self._last

    def _held(
        self, found: Mapping[Role, RoleDemand], nodes: Sequence[NodeView], now_s: float
    ) -> dict[Role, RoleDemand]:
        """Return what is found, and where not all have reported no fewer nodes than before."""
        for node in nodes:
            if not node.is_listed and not node.is_suspected and not node.load.is_draining:
                self._untold_at_s[node.record.role] = now_s
        return {role: self._least(demand, now_s) for role, demand in found.items()}

    def _least(self, demand: RoleDemand, now_s: float) -> RoleDemand:
        wanted, untold_at_s = self._wanted[demand.role], self._untold_at_s.get(demand.role)
        # Rates need a window of reports again.
        if untold_at_s is None or now_s - untold_at_s > WINDOW_S:
            wanted.append((now_s, demand.desired))
            while wanted[0][0] < now_s - WINDOW_S:
                wanted.popleft()
            return demand
        least = max((desired for _, desired in wanted), default=0)
        if least <= demand.desired:
            return demand
        why = f"{demand.why}; some have not reported, and {least} were wanted before"
        return replace(demand, desired=least, why=why)
