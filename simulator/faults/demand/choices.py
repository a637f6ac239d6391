"""Whether chosen nodes can take a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InternalError
from router.core.effects import Choose
from router.core.known.node_view import NodeView
from router.core.placement import ChosenNodes


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
