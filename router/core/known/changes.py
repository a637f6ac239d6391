"""Changes of nodes that this router has begun, and of which it has not heard the effect. Pure.

A node that is to prefill, or to leave, decodes no more, and its reports say so only later. A change
of another node that is decided meanwhile must count on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView


class ChangesUnderWay:
    """What nodes were told to become, and which were told to leave."""

    def __init__(self) -> None:
        self.roles: list[tuple[Incarnation, Role]] = []
        """Roles that nodes may not have yet, one for each change that was asked for."""
        self.by_load: tuple[Incarnation, Role] | None = None
        """The change of a role by which the leader of all routers follows the load, if this router
        leads: it is open from before the store allows it until the store has closed it."""
        self._leaving: set[Incarnation] = set()

    @contextmanager
    def of_role(self, node: Incarnation, role: Role) -> Iterator[None]:
        """Count a role as one to be, until the node has answered, or does not."""
        self.roles.append((node, role))
        try:
            yield
        finally:
            self.roles.remove((node, role))

    @contextmanager
    def of_leaving(self, nodes: Iterable[NodeView], node: Incarnation) -> Iterator[None]:
        """Count a node as one that leaves, until it says so or fails to answer.

        Others that are not among `nodes`, or have said so, are forgotten.
        """
        self._forget(nodes)
        self._leaving.add(node)
        try:
            yield
        except BaseException:
            self._leaving.discard(node)
            raise

    def are_asked(self, nodes: Iterable[NodeView]) -> bool:
        """Return whether any was asked for and not heard of, but for that by load."""
        self._forget(nodes)
        return bool(self.roles or self._leaving)

    def leaves_one(self, nodes: Iterable[NodeView], changed: Incarnation, role: Role) -> bool:
        """Return whether, with `changed` in its new role, a node certainly does what those of the
        other role do: it decodes if `role` is prefill, and prefills if it is decode."""
        nodes = list(nodes)
        self._forget(nodes)
        if role is Role.MIXED:
            return True
        return any(self._keeps(node, role) for node in nodes if node.incarnation != changed)

    def _keeps(self, node: NodeView, role: Role) -> bool:
        """Return whether a node has not this role, gets it by no change, and stays."""
        me = node.incarnation
        is_to_be = (me, role) in self.roles or (me, role) == self.by_load
        is_leaving = node.load.is_draining or me in self._leaving
        return node.record.role is not role and not is_to_be and not is_leaving

    def _forget(self, nodes: Iterable[NodeView]) -> None:
        """Forget those that say themselves that they leave, and those that have left."""
        if self._leaving:
            silent = {node.incarnation for node in nodes if not node.load.is_draining}
            self._leaving &= silent
