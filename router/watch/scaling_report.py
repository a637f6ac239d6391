"""How many nodes of each role the load needs: one value, so that `/v1/scaling`, `/v1/cluster`, the
live page and metrics agree."""

from __future__ import annotations

from collections import deque
from typing import Annotated

from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import Field
from typing_extensions import TypedDict

from common.ids import Incarnation
from common.nodes import Role
from common.wire_types import Count
from router.core.scaling.demand import RoleDemand
from router.core.scaling.moves import Move
from router.core.scaling.scaling import Decision

MAX_MOVES = 32
_Number = Annotated[float, Field(ge=0)]


class ScalingTargets(TypedDict):
    ttft_s: _Number
    tpot_s: _Number


class MeasuredRole(TypedDict):
    """Rates and means of the last seconds. Tokens are those of prompts."""

    arriving_tokens_per_s: _Number
    computed_tokens_per_s: _Number
    node_tokens_per_s: Annotated[float, Field(ge=0, description="0: none was seen to compute.")]
    queued_tokens: Count
    prefill_wait_s: Annotated[float, Field(ge=0, description="What they take the role's nodes.")]
    used_blocks: _Number
    waiting_blocks: _Number
    node_blocks: _Number
    running: _Number
    waiting: _Number
    node_seats: _Number
    step_s: _Number


class ScaledRole(TypedDict):
    nodes: Count
    needed: Annotated[float, Field(ge=0, description="Nodes that the targets need, not rounded.")]
    desired: Annotated[int, Field(ge=0, description="Nodes that there should be.")]
    why: str
    measured: MeasuredRole


class RoleChange(TypedDict):
    node_id: str
    role_before: str
    role: str
    why: str
    age_s: _Number


class ScalingAnswer(TypedDict):
    """`next` is the change of a role that is made now, or why there is none."""

    auto_roles: bool
    leader: Annotated[str | None, Field(description="The router that changes roles now.")]
    targets: ScalingTargets
    roles: Annotated[dict[str, ScaledRole], Field(description="prefill, decode and mixed.")]
    next: str
    changes: Annotated[list[RoleChange], Field(description="Of this router; the latest first.")]


class ScalingReport:
    """Keeps the last decision and the last changes, and sets the metrics."""

    def __init__(self, registry: CollectorRegistry, first: Decision, *, auto_roles: bool) -> None:
        self._auto_roles = auto_roles
        self._decision = first
        self._leader: str | None = None
        self._changes: deque[tuple[Move, float]] = deque(maxlen=MAX_MOVES)
        self._nodes = Gauge(
            "pdserve_scaling_nodes",
            "Nodes that take new work, by role",
            ["role"],
            registry=registry,
        )
        self._needed = Gauge(
            "pdserve_scaling_needed_nodes",
            "Nodes that the present load needs to meet the targets, by role, not rounded",
            ["role"],
            registry=registry,
        )
        self._desired = Gauge(
            "pdserve_scaling_desired_nodes",
            "Nodes that there should be for the present load and the targets, by role",
            ["role"],
            registry=registry,
        )
        self._is_leader = Gauge(
            "pdserve_scaling_leader",
            "1 on the router that changes roles now; with --auto-roles one router has it",
            registry=registry,
        )
        self._changed = Counter(
            "pdserve_role_changes_total",
            "Changes of a node's role by this router, by the role that the node got",
            ["role"],
            registry=registry,
        )
        for role in (Role.PREFILL, Role.DECODE):
            self._changed.labels(role.value)
        self.on_decision(first)

    def on_decision(self, decision: Decision) -> None:
        """Show what was decided last."""
        self._decision = decision
        for role, demand in decision.demands.items():
            self._nodes.labels(role.value).set(demand.num_nodes)
            self._needed.labels(role.value).set(round(demand.need, 4))
            self._desired.labels(role.value).set(demand.desired)

    def on_leader(self, leader: Incarnation | None, *, is_me: bool) -> None:
        """Show which router changes roles now; None: none does, or it is not known."""
        self._leader = None if leader is None else leader.node_id
        self._is_leader.set(int(is_me))

    def on_changed(self, move: Move, now_s: float) -> None:
        """Show that a node has changed its role."""
        self._changes.appendleft((move, now_s))
        self._changed.labels(move.role.value).inc()

    def answer(self, now_s: float) -> ScalingAnswer:
        """Return the answer of `/v1/scaling`."""
        decision = self._decision
        return {
            "auto_roles": self._auto_roles,
            "leader": self._leader,
            "targets": {
                "ttft_s": decision.targets.ttft_s,
                "tpot_s": decision.targets.tpot_s,
            },
            "roles": {role.value: _role(demand) for role, demand in decision.demands.items()},
            "next": decision.choice.why,
            "changes": [
                {
                    "node_id": move.node.node_id,
                    "role_before": move.role_before.value,
                    "role": move.role.value,
                    "why": move.why,
                    "age_s": round(max(0.0, now_s - at_s), 3),
                }
                for move, at_s in self._changes
            ],
        }


def _role(demand: RoleDemand) -> ScaledRole:
    seen = demand.measured
    return {
        "nodes": demand.num_nodes,
        "needed": round(demand.need, 4),
        "desired": demand.desired,
        "why": demand.why,
        "measured": {
            "arriving_tokens_per_s": round(seen.arriving_per_s, 1),
            "computed_tokens_per_s": round(seen.tokens_per_s, 1),
            "node_tokens_per_s": round(seen.node_tokens_per_s, 1),
            "queued_tokens": seen.queued_tokens,
            "prefill_wait_s": round(demand.prefill_wait_s, 3),
            "used_blocks": round(seen.used_blocks, 1),
            "waiting_blocks": round(seen.waiting_blocks, 1),
            "node_blocks": round(seen.node_blocks, 1),
            "running": round(seen.num_running, 1),
            "waiting": round(seen.num_waiting, 1),
            "node_seats": round(seen.node_seats, 1),
            "step_s": round(seen.step_s, 6),
        },
    }
