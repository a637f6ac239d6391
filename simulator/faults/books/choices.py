"""Chosen nodes, and where the requests of sessions were placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.errors import InternalError
from common.ids import Incarnation
from common.nodes import Role
from router.core.effects import Choose
from router.core.known.node_view import NodeView
from router.core.known.sessions import NO_NODES, SessionId, SessionNodes
from router.core.placement import ChosenNodes
from router.core.policies.query import Query


class SessionBooks:
    """Where the requests of sessions were placed, as long as sessions are known."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._placed: dict[SessionId, tuple[SessionNodes, float]] = {}

    def check(self, query: Query, chosen: ChosenNodes, num_known: int, now_s: float) -> None:
        """Check the node that a choice was given for its session, and how many sessions are known.

        Raises `InternalError`.
        """
        self._placed = {
            name: placed for name, placed in self._placed.items() if placed[1] + self._ttl_s > now_s
        }
        last, _ = self._placed.get(query.session, (NO_NODES, 0.0))
        if query.last != last:
            raise InternalError(f"a session was last on {last}: the choice is told {query.last}")
        nodes = SessionNodes(
            chosen.decode or last.decode,
            chosen.prefill or last.prefill,
            len(query.prompt_token_ids),
        )
        self._placed[query.session] = nodes, now_s
        if num_known != len(self._placed):
            raise InternalError(f"{num_known} sessions are known: {len(self._placed)} are not over")


def check_choice(nodes: Sequence[NodeView], wanted: Choose, chosen: ChosenNodes) -> None:
    """Check that chosen nodes can take a request: they are there, stay, and have not refused it.

    One that holds a reservation is not chosen anew, and KV goes between equal layouts alone. Raises
    `InternalError`.
    """
    layouts = {one.incarnation: one.record.fingerprint for one in nodes}
    source = None if chosen.source is None else chosen.source.node
    used = [layouts[one] for one in (chosen.decode, chosen.prefill, source) if one in layouts]
    if len(set(used)) > 1:
        raise InternalError(f"KV is to go between layouts: {chosen}")
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
    able = _able(nodes, query, wanted)
    able = {name: one for name, one in able.items() if query.goes_on_at(one.record)} or able
    last = able.get(query.last.decode) if query.last.decode is not None else None
    is_asked = wanted.decode is None and chosen.decode is not None
    if last is None or last.is_full or not is_asked or chosen.decode == last.incarnation:
        return
    if all(last.pressure <= one.pressure for one in able.values()):
        raise InternalError(f"a session leaves {last.incarnation}, which is as idle as any")


def check_goes_on(
    nodes: Iterable[NodeView], query: Query, wanted: Choose, chosen: ChosenNodes
) -> None:
    """Check that an answer that has tokens goes on at a node with the layout in which they were
    drawn, where one can decode the request. Raises `InternalError`.
    """
    if chosen.decode is None or wanted.decode is not None or wanted.layout in ("", chosen.layout):
        return
    able = _able(nodes, query, wanted).values()
    if any(one.record.fingerprint == wanted.layout for one in able):
        raise InternalError(f"an answer of layout {wanted.layout} goes on in another one: {chosen}")


def _able(nodes: Iterable[NodeView], query: Query, wanted: Choose) -> dict[Incarnation, NodeView]:
    """Return the nodes that can decode the request, by name."""
    return {
        one.incarnation: one
        for one in nodes
        if one.record.role is not Role.PREFILL
        and not (one.load.is_draining or one.is_suspected)
        and query.fits(one.record)
        and query.is_followed_by(one.record)
        and one.incarnation not in wanted.excluded
    }
