"""Whether chosen nodes can take a request, and a session stays on its node. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InternalError
from common.nodes import Role
from router.core.effects import Choose
from router.core.known.node_view import NodeView
from router.core.placement import ChosenNodes
from router.core.policies.query import Query


def check_choice(nodes: Iterable[NodeView], wanted: Choose, chosen: ChosenNodes) -> None:
    """Check that chosen nodes can take a request: they are there, stay, and have not refused it.

    One that holds a reservation is not chosen anew. Raises `InternalError`.
    """
    able = {one.incarnation for one in nodes if not one.load.is_draining} - wanted.excluded
    for node in filter(None, (chosen.decode, chosen.prefill)):
        if node not in able and node != wanted.decode:
            raise InternalError(f"{node} is chosen, which is gone, leaves or has refused it")
    if chosen.decode is not None and chosen.decode == chosen.prefill:
        raise InternalError(f"{chosen.decode} is chosen to send to itself")


def check_kept(
    nodes: Iterable[NodeView], query: Query, wanted: Choose, chosen: ChosenNodes
) -> None:
    """Check that a session stays on its node where that can decode the request, has a seat and has
    no more to do than any other. Raises `InternalError`.
    """
    able = {
        one.incarnation: one
        for one in nodes
        if one.record.role is not Role.PREFILL
        and not (one.load.is_draining or one.is_suspected)
        and query.fits(one.record)
        and one.incarnation not in wanted.excluded
    }
    last = able.get(query.last.decode) if query.last.decode is not None else None
    is_asked = wanted.decode is None and chosen.decode is not None
    if last is None or last.is_full or not is_asked or chosen.decode == last.incarnation:
        return
    if all(last.pressure <= one.pressure for one in able.values()):
        raise InternalError(f"a session leaves {last.incarnation}, which is as idle as any")
