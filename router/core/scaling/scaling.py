"""What the load wants of the cluster, decided anew with each reading. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.nodes import Role
from common.observing.latency import LatencyTargets
from router.core.known.node_view import NodeView
from router.core.scaling.demand import RoleDemand, demands
from router.core.scaling.measure import Meter
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

    def decide(self, nodes: Sequence[NodeView], now_s: float) -> Decision:
        """Read the present reports of all nodes; return the decision."""
        found = demands(self._meter.read(nodes, now_s), self.targets)
        return Decision(
            at_s=now_s,
            targets=self.targets,
            demands=found,
            choice=self.moves.choose(found, nodes, now_s),
        )
