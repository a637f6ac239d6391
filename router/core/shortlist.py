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

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import chain, islice
from struct import Struct
from typing import NamedTuple

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.block_index import HeldBlocks
from router.core.known.node_view import NodeView
from router.core.known.roster import Kind, Roster
from router.core.known.sessions import NO_NODES
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
_STEP = 0x9E3779B97F4A7C15
_NUM_LANES = 32
_ONES = sum(1 << 128 * lane for lane in range(_NUM_LANES))
_WORDS = _WORD * _ONES
_STEPS = sum((_STEP * (lane + 1) & _WORD) << 128 * lane for lane in range(_NUM_LANES))
_LANES = Struct(f"<{2 * _NUM_LANES}Q")


class SeededDraws:
    """Numbers that follow from a seed (SplitMix64).

    Words are computed together, in lanes of one integer that have room for the product of two
    words: one by itself takes several times as long.
    """

    def __init__(self, seed: int) -> None:
        self._state = seed & _WORD
        self._words: list[int] = []
        """The next words, the first one last."""

    def below(self, end: int) -> int:
        """Return the next number, from 0 to `end - 1`."""
        if not self._words:
            self._words = self._next_words()
        return self._words.pop() * end >> 64

    def _next_words(self) -> list[int]:
        lanes = _ONES * self._state + _STEPS & _WORDS
        self._state = self._state + _NUM_LANES * _STEP & _WORD
        lanes = (lanes ^ lanes >> 30 & _WORDS) * 0xBF58476D1CE4E5B9 & _WORDS
        lanes = (lanes ^ lanes >> 27 & _WORDS) * 0x94D049BB133111EB & _WORDS
        lanes ^= lanes >> 31 & _WORDS
        words_and_zeros = _LANES.unpack(lanes.to_bytes(_LANES.size, "little"))
        return list(words_and_zeros[-2::-2])


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
        self.most_scanned = MAX_SCANNED
        """The most nodes of which a choice looks at all."""

    def for_request(
        self, roster: Roster, query: Query, excluded: Set[Incarnation]
    ) -> AbleNodes | None:
        """Return candidates, or None where all nodes must be looked at.

        A role without a candidate has no node that can be one.
        """
        if len(roster) <= self.most_scanned:
            return None
        kinds = _able(roster, query)
        decoders = self._decoders(kinds, query, excluded)
        prefillers = self._prefillers(kinds, excluded)
        if not decoders and not (prefillers and query.max_tokens == 1):
            return None
        for role, nodes in self._known(roster, kinds, query, excluded).items():
            _add(nodes, to=prefillers if role is Role.PREFILL else decoders)
        return AbleNodes(roster.views(decoders), roster.views(prefillers))

    def for_reservation(
        self, roster: Roster, query: Query, excluded: Set[Incarnation]
    ) -> list[NodeView] | None:
        """Return candidates for the prefill node of a reservation, in the same way."""
        if len(roster) <= self.most_scanned:
            return None
        kinds = [kind for kind in _able(roster, query) if kind.is_prefill]
        prefillers = self._prefillers(kinds, excluded)
        for nodes in self._known(roster, kinds, query, excluded).values():
            _add(nodes, to=prefillers)
        return roster.views(prefillers)

    def holders(
        self, nodes: Sequence[NodeView], held: HeldBlocks, decode: Incarnation | None
    ) -> Sequence[NodeView]:
        """Return the nodes to look at for what they hold of a prompt: of a wide cluster the deepest
        holders, and the decode node that was chosen."""
        if not isinstance(nodes, Roster) or len(nodes) <= self.most_scanned:
            return nodes
        found = dict.fromkeys(held.deepest(NUM_SOURCES, self._draws.below))
        if decode is not None:
            found[decode] = None
        return nodes.views(found)

    def _decoders(
        self, kinds: Sequence[Kind], query: Query, excluded: Set[Incarnation]
    ) -> list[Incarnation]:
        """Draw decode nodes: where the answer has tokens, of the layout in which they were drawn
        if there are any."""
        able = [kind for kind in kinds if not kind.is_prefill]
        alike = [kind for kind in able if query.goes_on_at(kind.record)]
        return self._drawn(alike, excluded) or self._drawn(able, excluded)

    def _prefillers(self, kinds: Sequence[Kind], excluded: Set[Incarnation]) -> list[Incarnation]:
        """Draw prefill nodes of each KV layout: the decode node that is chosen may have any."""
        by_layout: dict[tuple[str, int], list[Kind]] = {}
        for kind in kinds:
            if kind.is_prefill:
                layout = kind.record.fingerprint, kind.record.kv_protocol
                by_layout.setdefault(layout, []).append(kind)
        drawn = [self._drawn(alike, excluded) for alike in by_layout.values()]
        return [node for nodes in drawn for node in nodes]

    def _drawn(self, kinds: Sequence[Kind], excluded: Set[Incarnation]) -> list[Incarnation]:
        """Draw nodes; empty only where every one of these is excluded."""
        ready = [kind.ready for kind in kinds]
        if self._narrowing is Narrowing.IN_TURN:
            return _window(ready, excluded, self._state.turn)
        free = [kind.free for kind in kinds]
        found = self._draw(free, excluded)
        if not found or sum(map(len, free)) < NUM_DRAWN:
            _add(self._draw(ready, excluded), to=found)
        return found

    def _draw(
        self, groups: Sequence[Sequence[Incarnation]], excluded: Set[Incarnation]
    ) -> list[Incarnation]:
        num_nodes = sum(map(len, groups))
        found: dict[int, Incarnation] = {}  # by index: the hash of a node takes longer
        if num_nodes > NUM_DRAWN:
            below = self._draws.below
            at: Callable[[int], Incarnation] = (
                groups[0].__getitem__ if len(groups) == 1 else partial(_node_at, groups)
            )
            for _ in range(_TRIES):
                index = below(num_nodes)
                node = at(index)
                if not excluded or node not in excluded:
                    found[index] = node
                    if len(found) == NUM_DRAWN:
                        break
        if not found:  # few nodes, or most are excluded
            return _first(NUM_DRAWN, (node for group in groups for node in group), excluded)
        return list(found.values())

    def _known(
        self, roster: Roster, kinds: Sequence[Kind], query: Query, excluded: Set[Incarnation]
    ) -> dict[Role, list[Incarnation]]:
        """Return the deepest holders of the prompt, and the nodes of the session, by role."""
        has_holders = self._narrowing is Narrowing.DRAWN_AND_HOLDERS
        if not has_holders and query.last is NO_NODES:
            return {}
        by_role: dict[Role, list[Incarnation]] = {}
        known: dict[Kind | None, list[Incarnation]] = {
            kind: by_role.setdefault(kind.record.role, []) for kind in kinds
        }
        if has_holders:
            num_missing, kind_of = NUM_HOLDERS * len(by_role), roster.kind_of
            for node in self._holders(kinds, query):
                alike = known.get(kind_of(node))
                if alike is None or len(alike) == NUM_HOLDERS or node in excluded:
                    continue
                alike.append(node)
                num_missing -= 1
                if not num_missing:
                    break
        for last in (query.last.decode, query.last.prefill):
            alike = None if last is None else known.get(roster.kind_of(last))
            if last is not None and alike is not None and last not in excluded:
                alike.append(last)
        return by_role

    def _holders(self, kinds: Sequence[Kind], query: Query) -> Iterator[Incarnation]:
        """Return holders of the prompt, as each layout cuts it, the deepest first."""
        cuts = {id(keys): keys for keys in (query.block_keys(k.record) for k in kinds)}
        found = map(self._state.blocks.held, cuts.values())
        below = self._draws.below
        return chain.from_iterable(held.deepest(MAX_HOLDERS_SEEN, below) for held in found)


def _able(roster: Roster, query: Query) -> list[Kind]:
    """Return the kinds of nodes that can take the request."""
    return [
        kind
        for kind in roster.kinds()
        if kind.ready and query.fits(kind.record) and query.is_followed_by(kind.record)
    ]


def _window(
    groups: Sequence[Sequence[Incarnation]], excluded: Set[Incarnation], turn: int
) -> list[Incarnation]:
    """Return the nodes among which the turn is taken: `NUM_DRAWN` turns go round one window, the
    next ones round the window behind it, so that in the end each node had as many."""
    num_nodes = sum(map(len, groups))
    first = turn // NUM_DRAWN * NUM_DRAWN
    turns = range(first, first + num_nodes)
    found = [_node_at(groups, one % num_nodes) for one in turns[:NUM_DRAWN]]
    window = [node for node in found if node not in excluded]
    if window:
        return window
    rest = (_node_at(groups, one % num_nodes) for one in turns[NUM_DRAWN:])
    return _first(NUM_DRAWN, rest, excluded)


def _first(
    number: int, nodes: Iterable[Incarnation], excluded: Set[Incarnation]
) -> list[Incarnation]:
    return list(islice((node for node in nodes if node not in excluded), number))


def _add(nodes: Iterable[Incarnation], *, to: list[Incarnation]) -> None:
    """Add the nodes that are not there yet."""
    for node in nodes:
        if node not in to:
            to.append(node)


def _node_at(groups: Sequence[Sequence[Incarnation]], index: int) -> Incarnation:
    for group in groups:
        if index < len(group):
            return group[index]
        index -= len(group)
    raise IndexError(index)
