"""The role of a running node: what it registers. What it serves is decided by each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from common.errors import Draining, InvalidRequest, LastInRole, PlacementUnavailable, StaleEpoch
from common.nodes import Role
from common.observing.logs import name_role
from node.control.drain import NodeDrain

log = logging.getLogger("pdserve.node")

Announce = Callable[[], Awaitable[None]]
Claim = Callable[[Role, Sequence[str]], Awaitable[bool]]
"""Writes a role to the placement store if one of the named nodes stays in another; says whether."""


class NodeRole:
    """Belongs to the event loop; any thread may read `current`.

    `refused` are the roles that the node cannot be given, each with why and what would help.
    """

    def __init__(self, current: Role, drain: NodeDrain, refused: Mapping[Role, str]) -> None:
        self.current = current
        self._drain = drain
        self._refused = refused
        self._tell_flow: Callable[[], object] = lambda: None
        self._announce: Announce | None = None
        self._claim: Claim | None = None
        self._changing = asyncio.Lock()
        self._last_number = 0
        self._refused_number = 0
        """The last change that was refused because no other node does what this one does."""

    @property
    def possible(self) -> tuple[Role, ...]:
        """The roles that the node can be given."""
        roles = (Role.PREFILL, Role.DECODE, Role.MIXED)
        return tuple(role for role in roles if role not in self._refused)

    def on_change(self, tell_flow: Callable[[], object], announce: Announce, claim: Claim) -> None:
        """Report each change to the flow, and to the placement store: by `announce`, or before it
        is made by `claim` where the store decides whether it is made."""
        self._tell_flow, self._announce, self._claim = tell_flow, announce, claim

    async def change(
        self, role: Role, number: int = 0, others: Sequence[str] | None = None
    ) -> Role:
        """Take new work of `role` from now on; return the role until now.

        `number` is that of a change which routers make by themselves: it is made once, and not
        after one with a higher number. Where it was made already, a person may have changed the
        role since. One of `others` must stay in another role than `role`; None: nobody has to.

        Raises `InvalidRequest` for a role that this node cannot have, `StaleEpoch` for a number
        below the last one, `Draining` when it leaves, `LastInRole` where none of `others` stays,
        `PlacementUnavailable` where that is not known, and what `announce` raises: the node has
        the role nevertheless.
        """
        async with self._changing:
            earlier = self.current
            if number and number < self._last_number:
                raise StaleEpoch(
                    f"change {number} of this node's role is older than change {self._last_number}"
                )
            if number and number == self._refused_number:
                raise self._last_in_role()
            if role is earlier or (number and number == self._last_number):
                self._last_number = max(number, self._last_number)
                return earlier
            if role in self._refused:
                raise InvalidRequest(
                    f"this {earlier.value} node cannot become {role.value}: {self._refused[role]}",
                    param="role",
                )
            if self._drain.is_on:
                raise Draining("this node is draining: it takes no new work of any role")
            if others is not None:
                await self._require_one_of(others, role, number)
            # Nothing is awaited in between: the next heartbeat has the role that was claimed.
            self.current = role
            self._last_number = max(number, self._last_number)
            name_role(role.value)
            log.info("takes new work as a %s node, until now %s", role.value, earlier.value)
            self._tell_flow()
            if self._announce is not None and others is None:
                await self._announce()
            return earlier

    async def _require_one_of(self, others: Sequence[str], role: Role, number: int) -> None:
        """Claim a role. A change that is refused is over: its number is not tried again."""
        try:
            is_done = self._claim is not None and await self._claim(role, others)
        except PlacementUnavailable as away:
            raise PlacementUnavailable(
                f"this {self.current.value} node keeps its role: whether another node does what it "
                f"does is not known while the placement store is away: {away}"
            ) from away
        if not is_done:
            self._last_number = max(number, self._last_number)
            self._refused_number = max(number, self._refused_number)
            raise self._last_in_role()

    def _last_in_role(self) -> LastInRole:
        return LastInRole(
            f"this {self.current.value} node keeps its role: no other node does what it does"
        )
