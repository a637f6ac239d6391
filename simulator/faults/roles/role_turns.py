"""The turns of one router's controller of roles: `RoleKeeper`, as it serves."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from common.ids import Incarnation
from common.observing.latency import LatencyTargets
from router.cluster.role_keeper import READINGS_PER_LEASE, RoleKeeper
from simulator.faults.awaited import drive
from simulator.faults.beside import AdministratorCalls
from simulator.faults.hosts import ProcessClock
from simulator.faults.store.calls import StoreCalls

_UNHEARD_S = 0.25


class RoleTurns:
    """Turns that begin when every node of the store's list was heard, as in `RoleKeeper.run`."""

    def __init__(
        self,
        router: Incarnation,
        clock: ProcessClock,
        store: StoreCalls,
        nodes: AdministratorCalls,
        targets: LatencyTargets,
        lease_s: float,
    ) -> None:
        self._router, self._clock, self._nodes = router, clock, nodes
        self._pause_s = lease_s / READINGS_PER_LEASE
        leading: Any = store
        running: Any = nodes
        self.keeper = RoleKeeper(
            leading,
            running,
            targets,
            registry=CollectorRegistry(),
            lease_s=lease_s,
            clock=clock,
            auto_roles=True,
        )
        self._begin()

    def _begin(self) -> None:
        if self._nodes.has_heard_all():
            self._turn()
        else:
            self._clock.after(_UNHEARD_S, self._begin)

    def _turn(self) -> None:
        drive(self.keeper.turn(self._router), on_end=self._pause)

    def _pause(self) -> None:
        self._clock.after(self._pause_s, self._turn)
