"""The store's lease of the router that decides about roles, and the last change. Pure.

These are the scripts of the real store (`placement.scripts`), one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from common.ids import Incarnation
from common.nodes import Role
from placement.store import Leadership, RoleMove
from simulator.faults.store.leases import Leases


class Leading:
    """The leading router, by the clock of the store; change numbers outlive an emptied store.

    `now_s` is the time that the store would have if its clock had not jumped.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._leader: tuple[Incarnation, float] | None = None
        self._last_number = 0
        self._num_emptied = 0
        self.last_move: RoleMove | None = None

    def lead(self, router: Incarnation, lease_s: float, now_s: float) -> Leadership:
        """Take or renew the lease, unless another router has it."""
        leader = self.leader(now_s) or router
        if leader == router:
            self._leader = router, now_s + self._leases.ahead_s + lease_s
        return Leadership(leader=leader, last_move=self.last_move)

    def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role, now_s: float
    ) -> RoleMove | None:
        """Allow the leader one change; None where another router leads, or one is open."""
        leads, last = self.leader(now_s) == router, self.last_move
        if not leads or (last is not None and last.is_open):
            return None
        self._last_number += 1
        self.last_move = RoleMove(number=self._last_number, node=node, role=role, is_open=True)
        return self.last_move

    def end_move(self, router: Incarnation, number: int, now_s: float) -> bool:
        """Close the change; return whether `router` leads and it was the last one."""
        leader, last = self.leader(now_s), self.last_move
        if leader != router or last is None or last.number != number:
            return False
        self.last_move = replace(last, is_open=False)
        return True

    def leader(self, now_s: float) -> Incarnation | None:
        """Return the router that leads now, if any does."""
        self._forget()
        if self._leader is None or self._leader[1] <= now_s + self._leases.ahead_s:
            return None
        return self._leader[0]

    def _forget(self) -> None:
        """Forget the leader and the last change after the store was emptied."""
        if self._num_emptied != self._leases.num_emptied:
            self._num_emptied = self._leases.num_emptied
            self._leader = self.last_move = None
