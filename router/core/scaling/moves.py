"""Which node changes its role next, if any. Pure.

A role is short where its need is above its nodes. The other role gives it a node only where that
lowers the larger of both pressures (need per node) to `BETTER` of it at least, which counts the
nodes that stay with all of the load that is left to them. The same has to be found for `HOLD_S`,
after the last change `COOL_DOWN_S` pass, and `RETURN_S` until a node goes the other way. Each role
keeps one node; a role that has lost its last one gets one as soon as the other has two, whichever
way the last change went. Where nothing decodes, nothing is answered, and a decode node computes
prompts too: so even the only prefill node becomes one, when no other has come for `MOST_HOLD_S`.

A change costs: the prefixes that the node holds are of no use in its other role, and the role that
gave it away lacks it. One that is taken back before `PAYS_BACK_S` has not paid for that. So the
next one that takes a change back has to be found for twice as long, up to `MOST_HOLD_S`, which
bursts are too short for; a load that has turned for good is followed a little later.

Mixed nodes serve on as they are: their load is theirs, and a cluster of them alone has no moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.scaling.demand import RoleDemand, pressure
from router.core.scaling.measure import counts

BETTER = 0.85
HOLD_S = 2.5
MOST_HOLD_S = 20.0
COOL_DOWN_S = 4.0
RETURN_S = 30.0
PAYS_BACK_S = 90.0


@dataclass(frozen=True, slots=True)
class Move:
    """A node gets another role; `why` has the numbers."""

    node: Incarnation
    role_before: Role
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class NextMove:
    """The move to make now, or None; `why` there is one or none."""

    move: Move | None
    why: str


class Moves:
    """Remembers since when a role is short, and what was moved last."""

    def __init__(self) -> None:
        self._short: Role | None = None
        self._short_since_s = 0.0
        self._moved_at_s: float | None = None
        self._moved_to: Role | None = None
        self._return_hold_s = HOLD_S
        """The time for which the same has to be found before the last change is taken back."""

    def begin(self, now_s: float) -> None:
        """Forget what was found: this router decides from now on, and waits as after a move."""
        self._short, self._moved_at_s, self._moved_to = None, now_s, None
        self._return_hold_s = HOLD_S

    def on_moved(self, role: Role, now_s: float) -> None:
        """Record that a node got this role."""
        if self._is_back(role) and self._moved_at_s is not None:
            has_paid = now_s - self._moved_at_s >= PAYS_BACK_S
            self._return_hold_s = HOLD_S if has_paid else min(MOST_HOLD_S, 2 * self._return_hold_s)
        self._short, self._moved_at_s, self._moved_to = None, now_s, role

    def choose(
        self, demands: Mapping[Role, RoleDemand], nodes: Sequence[NodeView], now_s: float
    ) -> NextMove:
        """Return the move to make now, if any."""
        prefill, decode = demands[Role.PREFILL], demands[Role.DECODE]
        if not prefill.num_nodes and not decode.num_nodes:
            return self._none("no prefill or decode node is there")
        short, giving = (
            (prefill, decode) if prefill.pressure > decode.pressure else (decode, prefill)
        )
        if not short.num_nodes or not giving.num_nodes:
            short, giving = (decode, prefill) if prefill.num_nodes else (prefill, decode)
        why_not = _why_not(short, giving, has_mixed=bool(demands[Role.MIXED].num_nodes))
        if why_not:
            return self._none(why_not)
        if short.role is not self._short:
            self._short, self._short_since_s = short.role, now_s
        found = f"{_told(short)}; {_told(giving)}"
        is_back = bool(short.num_nodes) and self._is_back(short.role)
        wait_s = self._wait_s(now_s, is_back=is_back, is_only=giving.num_nodes == 1)
        if wait_s > 0:
            return NextMove(None, f"{found}; no change for another {wait_s:.0f} s")
        node = _least_busy(nodes, giving.role, short.role)
        if node is None:
            return NextMove(None, f"{found}; no {giving.role.value} node can change its role")
        return NextMove(Move(node.incarnation, giving.role, short.role, found), found)

    def _none(self, why: str) -> NextMove:
        self._short = None
        return NextMove(None, why)

    def _wait_s(self, now_s: float, *, is_back: bool, is_only: bool) -> float:
        hold_s, pause_s = (self._return_hold_s, RETURN_S) if is_back else (HOLD_S, COOL_DOWN_S)
        if is_only:  # The others may start just now.
            hold_s = MOST_HOLD_S
        wait_s = self._short_since_s + hold_s - now_s
        if self._moved_at_s is None:
            return wait_s
        return max(wait_s, self._moved_at_s + pause_s - now_s)

    def _is_back(self, role: Role) -> bool:
        """Return whether a node that gets this role takes the last change back."""
        return self._moved_to is not None and role is not self._moved_to


def _why_not(short: RoleDemand, giving: RoleDemand, *, has_mixed: bool) -> str:
    """Return why no node changes from one role to the other; empty: one may."""
    if not short.num_nodes and short.role is Role.DECODE and not has_mixed:
        return ""
    if giving.num_nodes < 2:
        return f"{_told(short)}; {giving.role.value} keeps its only node"
    if not short.num_nodes:
        # Decode nodes compute prompts, so a cluster without prefill nodes may be meant.
        return "" if short.need > 0 else f"{_told(short)}; {_told(giving)}"
    if short.pressure <= 1:
        return f"enough of both: {_told(short)}; {_told(giving)}"
    after = max(
        pressure(short.need, short.num_nodes + 1), pressure(giving.need, giving.num_nodes - 1)
    )
    if after > BETTER * short.pressure:
        return (
            f"{_told(short)}; {_told(giving)}: with one less it would be at {after:.0%}, "
            f"{short.role.value} is at {short.pressure:.0%}"
        )
    return ""


def _told(demand: RoleDemand) -> str:
    return (
        f"{demand.role.value} needs {demand.need:.2f} nodes and has {demand.num_nodes} "
        f"({demand.why})"
    )


def _least_busy(nodes: Sequence[NodeView], role: Role, becomes: Role) -> NodeView | None:
    """Return the node of a role that has the least to do and can have the other one."""
    able = [
        node
        for node in nodes
        if counts(node) and node.record.role is role and node.record.can_become(becomes)
    ]
    return min(
        able,
        key=lambda n: (n.load.queued_tokens, n.load.num_running, n.incarnation),
        default=None,
    )
