"""Roles that follow the load in one cluster: the controllers of its routers, and their books."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.errors import InternalError
from common.ids import Incarnation
from common.nodes import Role
from common.observing.latency import LatencyTargets
from simulator.faults.checks.fault_times import fault_times
from simulator.faults.history import History
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.roles.role_turns import RoleTurns
from simulator.faults.router import FaultyRouter
from simulator.faults.shape import are_roles_by_load
from simulator.faults.store.leading import Leading
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline


class RolesByLoad:
    """The controllers of all routers; in a cluster whose nodes keep their roles, checks alone.

    `nodes` are the living nodes, by name.
    """

    def __init__(
        self,
        history: History,
        timeline: Timeline,
        leases: Leases,
        nodes: Mapping[str, FaultyNode],
    ) -> None:
        self._shape, self._timeline = history.shape, timeline
        self._leases, self._nodes = leases, nodes
        self._is_on = are_roles_by_load(history.shape)
        self._breaks_s = fault_times(history).first_broken_s
        self._has_changed = False
        """Whether a node took a role that an administrator gave it."""
        self.leading = Leading(leases)
        self.num_moved = 0

    def start(self, router: FaultyRouter) -> None:
        """Add the controller of a router that has just started."""
        if not self._is_on:
            return
        shape = self._shape
        targets = LatencyTargets(ttft_s=shape.target_ttft_s, tpot_s=shape.target_tpot_s)
        RoleTurns(router.me, router.clock, router.store, router.beside, targets, shape.lease_s)

    def on_role(self, node: Incarnation, number: int) -> None:
        """Record the new role of a node. Raises `InternalError` where it must not have it."""
        if number:
            self.num_moved += 1
            self._check_number(node, number)
        else:
            self._has_changed = True
        if self._timeline.now_s() >= self._breaks_s:
            return
        if all(one.role is Role.PREFILL for one in self._staying()):
            raise InternalError(f"{node} was the last node that decodes, and is given another role")
        is_moved = number and not self._has_changed
        is_lost = all(one.role is Role.DECODE for one in self._nodes.values())
        if is_moved and is_lost and any(one.me != node for one in self._staying()):
            raise InternalError(f"{node} was the last node that prefills")

    def why_unserved(self, routers: Iterable[FaultyRouter]) -> str:
        """Return a violation if no node decodes although a controller could change that, or ''."""
        staying = self._staying()
        is_lost = all(one.role is Role.PREFILL for one in staying)
        is_led = any(one.clock.is_running for one in routers)
        if self._is_on and staying and is_lost and is_led:
            return f"no node decodes, and {len(staying)} could"
        return ""

    def _staying(self) -> list[FaultyNode]:
        """Return the nodes that do not drain."""
        return [one for one in self._nodes.values() if not one.life.is_on]

    def _check_number(self, node: Incarnation, number: int) -> None:
        """Check that a node takes a role by the change that is open."""
        last = self.leading.last_move
        if self._leases.num_emptied:
            return  # it has forgotten what was open
        if last is None or last.number != number or not last.is_open:
            raise InternalError(f"{node} takes a role by change {number}: the last one is {last}")
