"""Which nodes take a request: filter, score, pick, with the reason in words.

A decode node is chosen first, then a prefill node that can exchange KV with it: with the same
layout and the same version of the KV protocol. Of both roles the node that served the request's
session last comes before what the policy says, unless it is too busy. A mixed node prefills for
itself, and so does a decode node without a live prefill partner. A request for one token needs no
decode node at all where a prefill node is live. A suspected node decodes only where no other one
can, and prefills nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from common.errors import InvalidRequest, Overloaded
from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import Role
from router.core.known.block_reports import BlockReport
from router.core.known.pair_health import Pair
from router.core.policies import POLICIES
from router.core.policies.query import NodeView, PolicyState, Query
from router.core.policies.session_nodes import session_node
from router.core.prefix_sources import prefix_source

_DECODE_ROLES = (Role.DECODE, Role.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenNodes:
    """The nodes for one attempt. `decode` None: the request ends with its first token.

    `source` has more of the prompt than `prefill`, which can pull it.
    """

    decode: Incarnation | None
    prefill: Incarnation | None
    reason: str
    source: PrefixSource | None = None


class Placer:
    """One policy and what it remembers from placement to placement."""

    def __init__(self, policy: str) -> None:
        """Look the policy up. Raises `KeyError` for a policy that does not exist."""
        self._name = policy
        self._score = POLICIES[policy]
        self._state = PolicyState()

    @property
    def num_known_blocks(self) -> int:
        """Blocks that nodes have reported."""
        return len(self._state.blocks)

    def on_blocks(self, node: Incarnation, report: BlockReport) -> int:
        """Take what a node holds; return for how many blocks there was no room."""
        if report.is_first:
            self.on_lost(node)
        return self._state.blocks.on_report(node, report.added, report.removed, report.tier)

    def on_lost(self, node: Incarnation) -> None:
        """Forget what a node holds."""
        self._state.blocks.forget(node)

    def choose(
        self,
        nodes: Sequence[NodeView],
        query: Query,
        excluded: Set[Incarnation],
        avoided: Set[Pair] = frozenset(),
    ) -> ChosenNodes:
        """Choose nodes for a new attempt, none of them in `excluded`.

        A pair in `avoided` is not chosen: rather another decode node, or local prefill.

        Raises `InvalidRequest` when no node is made for a request this long, and `Overloaded`
        when a role is missing or every node was tried.
        """
        open_prefillers = _without(_prefillers(nodes, query), excluded)
        if query.max_tokens == 1 and open_prefillers:
            prefill = self._pick(open_prefillers, query, query.last.prefill)
            self._state.turn += 1
            return self._choice(nodes, None, prefill, query, "one token: prefill alone")
        decoders = _decoders(nodes, query)
        open_decoders = _trusted_first(_without(decoders, excluded))
        if not open_decoders:
            raise Overloaded(_all_tried(len(decoders)))
        open_decoders = _with_a_path(open_decoders, open_prefillers, avoided)
        decode = self._pick(open_decoders, query, query.last.decode)
        partner = self._partner(decode, open_prefillers, query, avoided)
        self._state.turn += 1
        reason = self._reason(decode, query, len(open_decoders))
        if partner is None and decode.record.role is Role.DECODE:
            why = _why_alone(decode, open_prefillers)
            reason = f"{reason}, {why}: local prefill"
        return self._choice(nodes, decode, partner, query, reason)

    def choose_prefill(
        self,
        nodes: Sequence[NodeView],
        query: Query,
        decode: Incarnation,
        excluded: Set[Incarnation],
        avoided: Set[Pair] = frozenset(),
    ) -> ChosenNodes:
        """Choose another prefill node for a reservation on `decode`; `prefill` None: none left."""
        holder = next((node for node in nodes if node.incarnation == decode), None)
        prefillers = _without(_prefillers(nodes, query), excluded)
        partner = None if holder is None else self._partner(holder, prefillers, query, avoided)
        if partner is None:
            return ChosenNodes(decode=decode, prefill=None, reason="no prefill node is left")
        return self._choice(nodes, holder, partner, query, f"{self._name}: another prefill node")

    def _partner(
        self,
        decode: NodeView,
        prefillers: Sequence[NodeView],
        query: Query,
        avoided: Set[Pair],
    ) -> NodeView | None:
        if decode.record.role is Role.MIXED:
            return None
        pairs = [
            node
            for node in _with_same_kv(decode, prefillers)
            if (node.incarnation, decode.incarnation) not in avoided
        ]
        return self._pick(pairs, query, query.last.prefill) if pairs else None

    def _pick(self, nodes: Sequence[NodeView], query: Query, last: Incarnation | None) -> NodeView:
        kept = session_node(nodes, last, query)
        if kept is not None:
            return kept
        ordered = sorted(nodes, key=lambda node: node.incarnation)
        scores = self._score(ordered, query, self._state)
        best = max(range(len(ordered)), key=lambda index: (scores[index], -index))
        return ordered[best]

    def _choice(
        self,
        nodes: Sequence[NodeView],
        decode: NodeView | None,
        prefill: NodeView | None,
        query: Query,
        reason: str,
    ) -> ChosenNodes:
        source = None
        if prefill is not None:
            held = self._state.blocks.held(query.block_hashes(prefill.record), in_pools=True)
            at = None if decode is None else decode.incarnation
            source = prefix_source(nodes, prefill, at, held)
        for node in (decode, prefill):
            if node is not None:
                hashes = query.block_hashes(node.record)
                self._state.blocks.expect(hashes, node.incarnation)
        return ChosenNodes(
            decode=None if decode is None else decode.incarnation,
            prefill=None if prefill is None else prefill.incarnation,
            reason=reason,
            source=source,
        )

    def _reason(self, decode: NodeView, query: Query, num_candidates: int) -> str:
        is_kept = decode.incarnation == query.last.decode
        rule = "its session's node" if is_kept else f"{self._name}: best of {num_candidates}"
        reason = f"{rule}, {decode.num_requests} requests there"
        return f"{reason}, mixed" if decode.record.role is Role.MIXED else reason


def _with_a_path(
    decoders: Sequence[NodeView], prefillers: Sequence[NodeView], avoided: Set[Pair]
) -> list[NodeView]:
    """Return the nodes without an avoided pair; else those with another one; else all."""
    if not avoided:
        return list(decoders)
    failing = {decode for _, decode in avoided}
    usable = [
        decode
        for decode in decoders
        if decode.record.role is Role.MIXED
        or any(
            (prefill.incarnation, decode.incarnation) not in avoided
            for prefill in _with_same_kv(decode, prefillers)
        )
    ]
    return _without(usable, failing) or usable or list(decoders)


def _with_same_kv(decode: NodeView, prefillers: Sequence[NodeView]) -> list[NodeView]:
    return [node for node in prefillers if node.record.can_exchange_kv(decode.record)]


def _why_alone(decode: NodeView, prefillers: Sequence[NodeView]) -> str:
    if not prefillers:
        return "no prefill node"
    return "failed handoffs" if _with_same_kv(decode, prefillers) else "another KV layout"


def _all_tried(num_decoders: int) -> str:
    if num_decoders == 1:
        return "the only decode or mixed node refused or failed"
    return f"all {num_decoders} decode and mixed nodes refused or failed"


def _prefillers(nodes: Sequence[NodeView], query: Query) -> list[NodeView]:
    """Return the prefill nodes that may take this request, possibly none."""
    return [
        node
        for node in nodes
        if node.record.role is Role.PREFILL
        and not (node.load.is_draining or node.is_suspected)
        and _fits(node, query)
        and _follows(node, query)
    ]


def _decoders(nodes: Sequence[NodeView], query: Query) -> list[NodeView]:
    """Return the nodes that may decode this request, at least one."""
    heard = [node for node in nodes if node.record.role in _DECODE_ROLES]
    staying = [node for node in heard if not node.load.is_draining]
    if not staying:
        state = "is draining" if heard else "is heard"
        raise Overloaded(f"{'every' if heard else 'no'} decode or mixed node {state}")
    staying = [node for node in staying if _follows(node, query)]
    if not staying:
        raise Overloaded(f"no decode or mixed node {_wanted(query)}")
    fitting = [node for node in staying if _fits(node, query)]
    if not fitting:
        longest = max(node.record.max_model_len for node in staying)
        raise InvalidRequest(
            f"{len(query.prompt_token_ids)} prompt tokens and max_tokens {query.max_tokens} make "
            f"{_num_tokens(query)}: wanted at most max_model_len = {longest}",
            param="max_tokens",
        )
    return fitting


def _trusted_first(nodes: list[NodeView]) -> list[NodeView]:
    """Return the nodes that are not suspected, or all when every one is."""
    return [node for node in nodes if not node.is_suspected] or nodes


def _fits(node: NodeView, query: Query) -> bool:
    return _num_tokens(query) <= node.record.max_model_len


def _follows(node: NodeView, query: Query) -> bool:
    """Return whether the node knows all that the request asks; another one would ignore it."""
    record = node.record
    return (
        (record.has_grammars or not query.needs_grammars)
        and (record.has_token_rules or not query.needs_token_rules)
        and (record.has_prompt_logprobs or not query.needs_prompt_logprobs)
    )


def _wanted(query: Query) -> str:
    wanted = []
    if query.needs_grammars:
        wanted.append("follows grammars")
    if query.needs_token_rules:
        wanted.append("knows biases, bad words and salts")
    if query.needs_prompt_logprobs:
        wanted.append("answers with prompt_logprobs")
    return " and ".join(wanted)


def _num_tokens(query: Query) -> int:
    return len(query.prompt_token_ids) + query.max_tokens


def _without(nodes: Sequence[NodeView], excluded: Set[Incarnation]) -> list[NodeView]:
    return [node for node in nodes if node.incarnation not in excluded]
