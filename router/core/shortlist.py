"""Which nodes of a wide cluster a choice looks at: some, and always those that hold the prompt.

Up to `MAX_SCANNED` nodes a choice looks at all. In a wider cluster it looks at a few nodes of each
role: `NUM_DRAWN` that are drawn, the deepest holders of the prompt, and those of the session. The
policy then chooses among these as it does among all, so what a choice costs does not grow with the
cluster. The best of eight random nodes is nearly as good as the best of all, and routers that
know the same reports do not all choose the same node.

Only nodes are drawn that can take the request, are not excluded, do not drain and are not
suspected; those with a free seat before those without. Where there is no such decode node there is
no shortlist, and the choice looks at all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from common.ids import Incarnation
from router.core.known.block_index import HeldBlocks
from router.core.known.node_view import NodeView
from router.core.known.roster import Kind, Roster
from router.core.policies import Narrowing
from router.core.policies.query import PolicyState, Query

MAX_SCANNED = 32
NUM_DRAWN = 8
NUM_HOLDERS = 4
"""Holders of each role that are candidates in any case."""
MAX_HOLDERS_SEEN = 64
"""Holders that a choice looks at to find these."""
NUM_SOURCES = 8
"""The deepest holders that a choice looks at for one that can send what the prefill node lacks."""
_TRIES = 2 * NUM_DRAWN
_WORD = 2**64 - 1


class SeededDraws:
    """Numbers that follow from a seed (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _WORD

    def below(self, end: int) -> int:
        """Return the next number, from 0 to `end - 1`."""
        self._state = word = self._state + 0x9E3779B97F4A7C15 & _WORD
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
        return (word ^ word >> 31) * end >> 64


class AbleNodes(NamedTuple):
    """Nodes that can take a request, of both roles, in no order."""

    decoders: list[NodeView]
    prefillers: list[NodeView]


class Shortlist:
    """Draws candidates for one policy, whose memory is `state`."""

    def __init__(self, narrowing: Narrowing, state: PolicyState, seed: int) -> None:
        self._narrowing = narrowing
        self._state = state
        self._draws = SeededDraws(seed)

    def for_request(
        self, roster: Roster, query: Query, excluded: Set[Incarnation]
    ) -> AbleNodes | None:
        """Return candidates, or None where all nodes must be looked at.

        A role without a candidate has no node that can be one.
        """
        if len(roster) <= MAX_SCANNED:
            return None
        kinds = _able(roster, query)
        decoders = self._drawn([kind for kind in kinds if not kind.is_prefill], excluded)
        prefillers = self._prefillers(kinds, excluded)
        if not decoders and not (prefillers and query.max_tokens == 1):
            return None
        for node, kind in self._known(roster, kinds, query, excluded):
            (prefillers if kind.is_prefill else decoders)[node] = None
        return AbleNodes(_views(roster, decoders), _views(roster, prefillers))

    def for_reservation(
        self, roster: Roster, query: Query, excluded: Set[Incarnation]
    ) -> list[NodeView] | None:
        """Return candidates for the prefill node of a reservation, in the same way."""
        if len(roster) <= MAX_SCANNED:
            return None
        kinds = [kind for kind in _able(roster, query) if kind.is_prefill]
        prefillers = self._prefillers(kinds, excluded)
        prefillers |= {node: None for node, _ in self._known(roster, kinds, query, excluded)}
        return _views(roster, prefillers)

    def holders(
        self, nodes: Sequence[NodeView], held: HeldBlocks, decode: Incarnation | None
    ) -> Sequence[NodeView]:
        """Return the nodes to look at for what they hold of a prompt: of a wide cluster the deepest
        holders, and the decode node that was chosen."""
        if not isinstance(nodes, Roster) or len(nodes) <= MAX_SCANNED:
            return nodes
        found = dict.fromkeys(held.deepest(NUM_SOURCES, self._draws.below))
        if decode is not None:
            found[decode] = None
        return _views(nodes, found)

    def _prefillers(
        self, kinds: Sequence[Kind], excluded: Set[Incarnation]
    ) -> dict[Incarnation, None]:
        """Draw prefill nodes of each KV layout: the decode node that is chosen may have any."""
        by_layout: dict[tuple[str, int], list[Kind]] = {}
        for kind in kinds:
            if kind.is_prefill:
                layout = kind.record.fingerprint, kind.record.kv_protocol
                by_layout.setdefault(layout, []).append(kind)
        found: dict[Incarnation, None] = {}
        for alike in by_layout.values():
            found |= self._drawn(alike, excluded)
        return found

    def _drawn(self, kinds: Sequence[Kind], excluded: Set[Incarnation]) -> dict[Incarnation, None]:
        """Draw nodes; empty only where every one of these is excluded."""
        ready = [kind.ready for kind in kinds]
        if self._narrowing is Narrowing.IN_TURN:
            return _window(ready, excluded, self._state.turn)
        free = [kind.free for kind in kinds]
        found = self._draw(free, excluded)
        if not found or sum(map(len, free)) < NUM_DRAWN:
            found |= self._draw(ready, excluded)
        return found

    def _draw(
        self, groups: Sequence[Sequence[Incarnation]], excluded: Set[Incarnation]
    ) -> dict[Incarnation, None]:
        num_nodes = sum(map(len, groups))
        found: dict[Incarnation, None] = {}
        if num_nodes > NUM_DRAWN:
            for _ in range(_TRIES):
                node = _node_at(groups, self._draws.below(num_nodes))
                if node not in excluded:
                    found[node] = None
                    if len(found) == NUM_DRAWN:
                        break
        if not found:  # few nodes, or most are excluded
            return _first(NUM_DRAWN, (node for group in groups for node in group), excluded)
        return found

    def _known(
        self, roster: Roster, kinds: Sequence[Kind], query: Query, excluded: Set[Incarnation]
    ) -> Iterator[tuple[Incarnation, Kind]]:
        """Return the nodes of the session, and the deepest holders of the prompt."""
        for last in (query.last.decode, query.last.prefill):
            kind = None if last is None else roster.kind_of(last)
            if last is not None and kind is not None and kind in kinds and last not in excluded:
                yield last, kind
        if self._narrowing is not Narrowing.DRAWN_AND_HOLDERS:
            return
        num_left = {kind.record.role: NUM_HOLDERS for kind in kinds}
        num_missing = NUM_HOLDERS * len(num_left)
        for node in self._holders(kinds, query):
            kind = roster.kind_of(node)
            if kind is None or kind not in kinds or node in excluded:
                continue
            if num_left[kind.record.role]:
                yield node, kind
                num_left[kind.record.role] -= 1
                num_missing -= 1
                if not num_missing:
                    return

    def _holders(self, kinds: Sequence[Kind], query: Query) -> Iterator[Incarnation]:
        """Return holders of the prompt, as each layout cuts it, the deepest first."""
        cuts = {id(keys): keys for keys in (query.block_keys(k.record) for k in kinds)}
        for keys in cuts.values():
            held = self._state.blocks.held(keys)
            yield from held.deepest(MAX_HOLDERS_SEEN, self._draws.below)


def _able(roster: Roster, query: Query) -> list[Kind]:
    """Return the kinds of nodes that can take the request."""
    return [
        kind
        for kind in roster.kinds()
        if kind.ready and query.fits(kind.record) and query.is_followed_by(kind.record)
    ]


def _window(
    groups: Sequence[Sequence[Incarnation]], excluded: Set[Incarnation], turn: int
) -> dict[Incarnation, None]:
    """Return the nodes among which the turn is taken: `NUM_DRAWN` turns go round one window, the
    next ones round the window behind it, so that in the end each node had as many."""
    num_nodes = sum(map(len, groups))
    first = turn // NUM_DRAWN * NUM_DRAWN
    turns = range(first, first + num_nodes)
    found = [_node_at(groups, one % num_nodes) for one in turns[:NUM_DRAWN]]
    window = {node: None for node in found if node not in excluded}
    if window:
        return window
    rest = (_node_at(groups, one % num_nodes) for one in turns[NUM_DRAWN:])
    return _first(NUM_DRAWN, rest, excluded)


def _first(
    number: int, nodes: Iterable[Incarnation], excluded: Set[Incarnation]
) -> dict[Incarnation, None]:
    found: dict[Incarnation, None] = {}
    for node in nodes:
        if node not in excluded:
            found[node] = None
            if len(found) == number:
                break
    return found


def _node_at(groups: Sequence[Sequence[Incarnation]], index: int) -> Incarnation:
    for group in groups:
        if index < len(group):
            return group[index]
        index -= len(group)
    raise IndexError(index)


def _views(roster: Roster, nodes: Iterable[Incarnation]) -> list[NodeView]:
    found = map(roster.view, nodes)
    return [view for view in found if view is not None]
