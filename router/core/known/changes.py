"""Changes of nodes that this router has begun, and of which it has not heard the effect. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from common.ids import Incarnation
from router.core.known.node_view import NodeView


class ChangesUnderWay:
    """How many nodes were told to take another role, and which were told to leave."""

    def __init__(self) -> None:
        self._num_roles = 0
        self._leaving: set[Incarnation] = set()

    @contextmanager
    def of_role(self) -> Iterator[None]:
        """Count a change of a role, until the node has answered, or does not."""
        self._num_roles += 1
        try:
            yield
        finally:
            self._num_roles -= 1

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
        """Return whether any was asked for and not heard of."""
        self._forget(nodes)
        return bool(self._num_roles or self._leaving)

    def others_that_stay(self, nodes: Iterable[NodeView], node: Incarnation) -> list[str]:
        """Return the names of all others of `nodes` but those that leave.

        Their roles may have changed since they were listed: the store knows.
        """
        return [
            one.record.node_id
            for one in nodes
            if one.record.node_id != node.node_id
            and not one.load.is_draining
            and one.incarnation not in self._leaving
        ]

    def _forget(self, nodes: Iterable[NodeView]) -> None:
        """Forget those that say themselves that they leave, and those that have left."""
        if self._leaving:
            silent = {node.incarnation for node in nodes if not node.load.is_draining}
            self._leaving &= silent
