"""Evaluates how many nodes of each role the load wants; with `--auto-roles`, changes roles.

One router does so at a time: the one that holds the leader's lease in the placement store. It may
believe so after its lease has ended: it was frozen, or cut off. So a change of a role has three
steps, and each is safe if the router stops before or after it for any time:

    begin   the store allows it, in the same step in which it sees that this router leads and that
            no other change is open, and gives it a number
    tell    the node takes the role, unless it was told of a change with a higher number
    end     the store closes it, if this router leads still; the router that closes it counts it

A leader that finds an open change ends it, before it decides anything: it tells the node the same
role under the same number, or closes it where the node is no member any more. So what a router that
wakes still has to tell is what the node has already, or is old and refused. Persons may change
other nodes meanwhile, through any router: the node keeps its role, and the change is over, if no
other node does what it does in the step in which the store writes its new role.

While changes that a person has asked this router for are under way, no change begins: what nodes
report is then not what they will be.

Without the store nothing is decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from prometheus_client import CollectorRegistry

from common.errors import (
    Draining,
    InvalidRequest,
    LastInRole,
    PdserveError,
    PlacementUnavailable,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from common.observing.clock import Clock
from common.observing.lasting_failure import LastingFailure
from common.observing.latency import LatencyTargets
from placement.store import Leadership, PlacementStore, RoleMove
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from router.core.scaling.moves import Move
from router.core.scaling.scaling import RoleScaling
from router.watch.scaling_report import ScalingAnswer, ScalingReport

log = logging.getLogger("pdserve.router.roles")

READINGS_PER_LEASE = 4


class RunningNodes(Protocol):
    """The nodes of the cluster, their roles, and the changes that this router has begun."""

    changes: ChangesUnderWay

    @property
    def is_store_away(self) -> bool:
        """Whether the placement store did not answer when it was asked last."""

    def nodes(self) -> Sequence[NodeView]:
        """Return the nodes that can be chosen now."""

    def is_member(self, node: Incarnation) -> bool:
        """Return whether a node may be heard, now or again."""

    async def set_role(
        self,
        node: Incarnation,
        role: Role,
        *,
        number: int = 0,
        others: Sequence[str] | None = None,
    ) -> Role:
        """Change the role of a node for new work; see `NodePool.set_role`."""

    async def wait_heard(self) -> None:
        """Return when every node that the store listed first was heard or left."""


class RoleKeeper:
    """Decides at each turn of `run`. With `auto_roles` it takes part in who leads."""

    def __init__(
        self,
        store: PlacementStore,
        nodes: RunningNodes,
        targets: LatencyTargets,
        *,
        registry: CollectorRegistry,
        lease_s: float,
        clock: Clock,
        auto_roles: bool,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._scaling = RoleScaling(targets)
        first = self._scaling.decide([], clock.now_s())
        self._report = ScalingReport(registry, first, auto_roles=auto_roles)
        self._lease_s = lease_s
        self._clock = clock
        self._auto_roles = auto_roles
        self._leads = False
        self._failing = LastingFailure(clock)
        self._begun: tuple[int, Move] | None = None
        """The last change that this router began, and its number."""

    def scaling(self) -> ScalingAnswer:
        """Return the answer of `/v1/scaling`."""
        return self._report.answer(self._clock.now_s())

    async def run(self, router: Incarnation) -> None:
        """Decide until cancelled; then another router may lead at once."""
        await self._nodes.wait_heard()
        try:
            while True:
                await self.turn(router)
                await asyncio.sleep(self._lease_s / READINGS_PER_LEASE)
        finally:
            if self._leads:
                with suppress(PlacementUnavailable):
                    await self._store.stop_leading(router)

    async def turn(self, router: Incarnation) -> None:
        """Read the nodes once, and make the change that follows, if this router leads."""
        try:
            leadership = await self._lead(router) if self._auto_roles else None
        except PlacementUnavailable as away:
            self._on_store_away(away)
            leadership = None
        nodes = self._nodes.nodes()
        decision = self._scaling.decide(
            nodes, self._clock.now_s(), is_store_away=self._nodes.is_store_away
        )
        self._report.on_decision(decision)
        if leadership is None or not self._leads:
            return
        move, changes = decision.choice.move, self._nodes.changes
        try:
            if leadership.last_move is not None and leadership.last_move.is_open:
                await self._finish(router, leadership.last_move)
            elif move is not None and not changes.are_asked(nodes):
                await self._make(router, move)
        except PlacementUnavailable as away:
            self._on_store_away(away)

    async def _lead(self, router: Incarnation) -> Leadership:
        leadership = await self._store.lead(router, lease_s=self._lease_s)
        if self._failing.end():
            log.info("the placement store says again who leads")
        led, self._leads = self._leads, leadership.leader == router
        if self._leads and not led:
            log.info("this router decides about roles now")
            self._scaling.moves.begin(self._clock.now_s())
        elif led and not self._leads:
            log.warning("%s decides about roles now", leadership.leader)
        self._report.on_leader(leadership.leader, is_me=self._leads)
        return leadership

    def _on_store_away(self, away: PlacementUnavailable) -> None:
        if self._failing.is_news():
            log.warning("no role is changed until the placement store is back: %s", away)
        self._leads = False
        self._report.on_leader(None, is_me=False)

    async def _make(self, router: Incarnation, move: Move) -> None:
        begun = await self._store.begin_move(router, move.node, move.role)
        if begun is None:
            log.warning("%s keeps its role: another router leads, or is changing one", move.node)
            self._leads = False
            return
        log.info(
            "change %d: %s becomes a %s node, it was a %s node: %s",
            *(begun.number, move.node, move.role.value, move.role_before.value, move.why),
        )
        self._begun = begun.number, move
        await self._finish(router, begun)

    async def _finish(self, router: Incarnation, begun: RoleMove) -> None:
        """Send the change to the node, and close it when the node has the role or cannot get it."""
        now_s, told = self._clock.now_s(), f"change {begun.number} of {begun.node}"
        has_role = False
        if not self._nodes.is_member(begun.node):
            log.warning("%s is over: the node has left", told)
            self._scaling.moves.begin(now_s)
        else:
            try:
                await self._nodes.set_role(
                    begun.node, begun.role, number=begun.number, others=self._others(begun)
                )
            except (Draining, InvalidRequest, LastInRole, StaleEpoch) as refused:
                log.warning("%s is over, the node keeps its role: %s", told, refused)
                self._scaling.moves.begin(now_s)
            except PdserveError as failed:
                log.warning("%s is told again: %s", told, failed)
                return
            else:
                has_role = True
                self._scaling.moves.on_moved(begun.role, now_s)
        # Another router may have found it open meanwhile: one of both closes it.
        is_closed = await self._store.end_move(router, begun.number)
        if is_closed and has_role:
            self._report.on_changed(self._move_of(begun), now_s)

    def _others(self, begun: RoleMove) -> list[str] | None:
        """Return the nodes of which one must stay in another role than the new one; None: nobody
        has to. Where no other node decodes, one that is to decode is needed most."""
        nodes = self._nodes.nodes()
        others = self._nodes.changes.others_that_stay(nodes, begun.node)
        decoding = {one.record.node_id for one in nodes if one.record.role is not Role.PREFILL}
        is_needed = begun.role is Role.DECODE and decoding.isdisjoint(others)
        return None if is_needed else others

    def _move_of(self, begun: RoleMove) -> Move:
        """Return the change with what it was begun for, if this router began it."""
        if self._begun is not None and self._begun[0] == begun.number:
            return self._begun[1]
        before = Role.DECODE if begun.role is Role.PREFILL else Role.PREFILL
        return Move(begun.node, before, begun.role, "begun by the router that led before")
