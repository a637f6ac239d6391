"""The nodes that can be chosen, kept by what a request may ask of them. Pure.

Nodes of one *kind* are alike in all that a request can require of a record. Whether a kind can take
a request is asked once, and not of each of its nodes. What a choice needs of a kind is kept in
order as nodes change, so that some of its nodes can be had without a look at the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from router.core.known.node_view import NodeView
from router.core.known.pair_health import Pair


class _KindKey(NamedTuple):
    """All of a record that decides which requests a node can take, and from whom."""

    role: Role
    fingerprint: str
    kv_protocol: int
    block_size: int
    max_model_len: int
    has_grammars: bool
    has_token_rules: bool
    has_prompt_logprobs: bool


@dataclass(slots=True, eq=False)
class Kind:
    """Nodes that are alike. Each list is ordered by id."""

    record: NodeRecord
    """That of one of them."""
    num_nodes: int = 0
    staying: list[Incarnation] = field(default_factory=list)
    """The nodes that do not drain."""
    ready: list[Incarnation] = field(default_factory=list)
    """The nodes of `staying` that are not suspected."""
    free: list[Incarnation] = field(default_factory=list)
    """The nodes of `ready` that have a seat for one more answer, as far as is known."""

    @property
    def is_prefill(self) -> bool:
        return self.record.role is Role.PREFILL


class Standing(NamedTuple):
    """In which lists of its kind a node is."""

    kind: Kind
    is_staying: bool
    is_ready: bool
    is_free: bool


class Roster(Sequence[NodeView]):
    """Views of nodes, ordered by id. `put` and `discard` cost little, however many there are."""

    def __init__(self, views: Iterable[NodeView] = ()) -> None:
        self._views: dict[Incarnation, NodeView] = {}
        self._order: list[Incarnation] = []
        self._kinds: dict[_KindKey, Kind] = {}
        self._standings: dict[Incarnation, Standing] = {}
        self._ready: dict[Incarnation, Kind] = {}
        """The kinds of the nodes that are ready."""
        self._silent: dict[Incarnation, tuple[Incarnation, ...]] = {}
        self._unreachable: frozenset[Pair] | None = frozenset()
        for view in views:
            self.put(view)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> NodeView: ...

    @overload
    def __getitem__(self, index: slice) -> list[NodeView]: ...

    def __getitem__(self, index: int | slice) -> NodeView | list[NodeView]:
        if isinstance(index, slice):
            return [self._views[node] for node in self._order[index]]
        return self._views[self._order[index]]

    def __iter__(self) -> Iterator[NodeView]:
        return map(self._views.__getitem__, self._order)

    def view(self, node: Incarnation) -> NodeView | None:
        """Return the view of a node; None when it cannot be chosen."""
        return self._views.get(node)

    def views(self, nodes: Iterable[Incarnation]) -> list[NodeView]:
        """Return the views of those of these nodes that can be chosen."""
        found = map(self._views.get, nodes)
        return [view for view in found if view is not None]

    def kind_of(self, node: Incarnation) -> Kind | None:
        """Return the kind of a node that is ready, or None."""
        return self._ready.get(node)

    def kinds(self) -> Iterable[Kind]:
        """Return all kinds; each has a node."""
        return self._kinds.values()

    @property
    def unreachable(self) -> frozenset[Pair]:
        """The pairs whose prefill node does not reach its decode node, as it says itself."""
        if self._unreachable is None:
            self._unreachable = frozenset(
                (node, decode) for node, silent in self._silent.items() for decode in silent
            )
        return self._unreachable

    def max_model_len(self) -> int | None:
        """Return the longest prompt and answer that a node which stays can finish."""
        lengths = (
            kind.record.max_model_len
            for kind in self._kinds.values()
            if kind.staying and not kind.is_prefill
        )
        return max(lengths, default=None)

    def put(self, view: NodeView) -> None:
        """Take a node's present view, in place of an earlier one."""
        node, record = view.incarnation, view.record
        earlier = self._views.get(node)
        self._views[node] = view
        if earlier is not None and _is_only_busier(earlier, view):
            return
        if earlier is None:
            insort(self._order, node)
        is_staying = not view.load.is_draining
        is_ready = is_staying and not view.is_suspected
        kind = self._kind(record, earlier, node)
        self._stand(node, Standing(kind, is_staying, is_ready, is_ready and not view.is_full))
        self._set_silent(node, view.load.kv_unreachable)

    def discard(self, node: Incarnation) -> None:
        """Take a node out that cannot be chosen any more."""
        if self._views.pop(node, None) is not None:
            _keep(self._order, node, is_in=False)
            self._stand(node, None)
            self._set_silent(node, ())

    def _kind(self, record: NodeRecord, earlier: NodeView | None, node: Incarnation) -> Kind:
        if earlier is not None and earlier.record is record:
            return self._standings[node].kind
        key = _kind_key(record)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(record)
        return kind

    def _stand(self, node: Incarnation, now: Standing | None) -> None:
        before = self._standings.get(node)
        if before == now:
            return
        if before is not None and (now is None or now.kind is not before.kind):
            self._standings.pop(node)
            _list_in_kind(node, Standing(before.kind, False, False, False))
            before.kind.num_nodes -= 1
            if not before.kind.num_nodes:
                del self._kinds[_kind_key(before.kind.record)]
        self._ready.pop(node, None)
        if now is not None:
            if now.is_ready:
                self._ready[node] = now.kind
            now.kind.num_nodes += node not in self._standings
            self._standings[node] = now
            _list_in_kind(node, now)

    def _set_silent(self, node: Incarnation, silent: tuple[Incarnation, ...]) -> None:
        if silent != self._silent.get(node, ()):
            self._silent.pop(node, None)
            if silent:
                self._silent[node] = silent
            self._unreachable = None


def _list_in_kind(node: Incarnation, standing: Standing) -> None:
    _keep(standing.kind.staying, node, is_in=standing.is_staying)
    _keep(standing.kind.ready, node, is_in=standing.is_ready)
    _keep(standing.kind.free, node, is_in=standing.is_free)


def _is_only_busier(earlier: NodeView, view: NodeView) -> bool:
    """Return whether nothing is new of what places a node in the lists, as with almost every
    request and report."""
    before, load = earlier.load, view.load
    return (
        view.record is earlier.record
        and view.is_suspected is earlier.is_suspected
        and (
            load is before
            or (
                load.is_draining is before.is_draining
                and load.kv_unreachable == before.kv_unreachable
            )
        )
        and view.is_full is earlier.is_full
    )


def _kind_key(record: NodeRecord) -> _KindKey:
    return _KindKey(
        role=record.role,
        fingerprint=record.fingerprint,
        kv_protocol=record.kv_protocol,
        block_size=record.block_size,
        max_model_len=record.max_model_len,
        has_grammars=record.has_grammars,
        has_token_rules=record.has_token_rules,
        has_prompt_logprobs=record.has_prompt_logprobs,
    )


def _keep(nodes: list[Incarnation], node: Incarnation, *, is_in: bool) -> None:
    """Put the node into an ordered list, or take it out."""
    index = bisect_left(nodes, node)
    was_in = index < len(nodes) and nodes[index] == node
    if is_in and not was_in:
        nodes.insert(index, node)
    elif was_in and not is_in:
        del nodes[index]
