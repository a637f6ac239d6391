"""Which nodes take a request: filter, score, pick, with the reason in words. Pure.

`Placer` chooses by the nodes and one request. `Chooser` adds what earlier requests taught: the
nodes of the request's session, and the pairs of nodes whose handoffs fail. `Placing` are the
settings of all that decides where requests go.

A decode node is chosen first, then a prefill node that can exchange KV with it: with the same
layout and the same version of the KV protocol. Of both roles the node that served the request's
session last comes before what the policy says, unless it is too busy. A mixed node prefills for
itself, and so does a decode node without a live prefill partner. A request for one token needs no
decode node at all where a prefill node is live. A suspected node decodes only where no other one
can, and prefills nothing.

In a wide cluster all of this is done with a shortlist of its nodes (`shortlist`), and with all
nodes only where that has none that will do.

An answer that has tokens goes on at nodes with the layout of those that drew them, while one of
these can take it: others compute with other weights, or in another arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from common.errors import Overloaded
from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import Role
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.node_view import NodeView
from router.core.known.pair_health import Pair, PairHealth
from router.core.known.roster import Roster
from router.core.known.sessions import KnownSessions, Placed, SessionNodes
from router.core.membership import Membership
from router.core.policies import NARROWINGS, POLICIES
from router.core.policies.query import NoneStays, PolicyState, Query, TooLong
from router.core.policies.session_nodes import session_node
from router.core.prefix_sources import prefix_source
from router.core.shortlist import AbleNodes, Shortlist

_by_id = attrgetter("incarnation")
_DECODE_ROLES = (Role.DECODE, Role.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenNodes:
    """The nodes for one attempt. `decode` None: the request ends with its first token.

    `source` has more of the prompt than the node that is to compute it, which can pull it. `layout`
    is the fingerprint of the nodes.
    """

    decode: Incarnation | None
    prefill: Incarnation | None
    reason: str
    source: PrefixSource | None = None
    layout: str = ""


class _Found(NamedTuple):
    decode: NodeView | None
    prefill: NodeView | None
    reason: str

    @property
    def lacks_partner(self) -> bool:
        return (
            self.prefill is None
            and self.decode is not None
            and self.decode.record.role is Role.DECODE
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The settings of both machines: which nodes there are, and which of them are chosen."""

    model: str
    lease_s: float
    policy: str
    session_ttl_s: float
    seed: int
    tokens: str = ""
    """What tells the router's tokenizer apart, see `NodeRecord`."""

    def machines(self) -> tuple[Membership, Chooser]:
        """Return both, new. Raises `KeyError` for a policy that does not exist."""
        membership = Membership(model=self.model, lease_s=self.lease_s, tokens=self.tokens)
        return membership, Chooser(self.policy, self.session_ttl_s, self.seed)


class Chooser:
    """A `Placer`, the pairs that it avoids, and where the requests of sessions were placed."""

    def __init__(self, policy: str, session_ttl_s: float, seed: int) -> None:
        """Look the policy up. Raises `KeyError` for a policy that does not exist.

        A session is known for `session_ttl_s` after its last request was placed. From `seed`
        follows which nodes of a wide cluster are looked at.
        """
        self._placer = Placer(policy, seed)
        self._pairs = PairHealth()
        self._sessions = KnownSessions(session_ttl_s)

    @property
    def num_sessions(self) -> int:
        """Sessions that are known."""
        return len(self._sessions)

    @property
    def num_known_blocks(self) -> int:
        """Blocks that nodes have reported."""
        return self._placer.num_known_blocks

    @property
    def has_failed_pairs(self) -> bool:
        """Whether a pair failed that has not worked since."""
        return bool(self._pairs)

    def avoided(self, nodes: Roster, now_s: float) -> frozenset[Pair]:
        """Return the pairs on which no attempt is placed now: a handoff failed, or its prefill
        node says that it does not reach the other one."""
        return self._pairs.avoided(now_s) | nodes.unreachable

    def choose(
        self, nodes: Roster, query: Query, wanted: Choose, now_s: float
    ) -> tuple[ChosenNodes, Placed | None]:
        """Choose nodes, or a prefill node for a reservation; for a session, say how it is placed.

        Raises `TooLong` and `Overloaded` as `Placer` does.
        """
        avoided = self.avoided(nodes, now_s)
        query.layout = wanted.layout
        if query.session:
            query.last = self._sessions.last(query.session, now_s)
        if wanted.decode is None:
            chosen = self._placer.choose(nodes, query, wanted.excluded, avoided)
        else:
            chosen = self._placer.choose_prefill(
                nodes, query, wanted.decode, wanted.excluded, avoided
            )
        if chosen.prefill is not None and chosen.decode is not None:
            self._pairs.on_placed((chosen.prefill, chosen.decode), now_s)
        if not query.session:
            return chosen, None
        at = SessionNodes(chosen.decode, chosen.prefill, len(query.prompt_token_ids))
        return chosen, self._sessions.on_placed(query.session, at, now_s)

    def on_blocks(self, node: Incarnation, report: BlockReport) -> int:
        """Record a node's report of its prefix cache; return how many blocks had no room."""
        return self._placer.on_blocks(node, report)

    def on_lost(self, node: Incarnation) -> None:
        """Forget the blocks of a node; if it comes back, it reports all of them again."""
        self._placer.on_lost(node)

    def on_worked(self, pair: Pair) -> bool:
        """Record a handoff that worked; return whether the pair had failed before."""
        return self._pairs.on_worked(pair)

    def on_failed(self, pair: Pair, now_s: float) -> tuple[int, float] | None:
        """Record a handoff that failed; return what `PairHealth.on_failed` does."""
        return self._pairs.on_failed(pair, now_s)


class Placer:
    """One policy and its state, which lasts from placement to placement."""

    def __init__(self, policy: str, seed: int = 0) -> None:
        """Look the policy up. Raises `KeyError` for a policy that does not exist.

        From `seed` follows which nodes of a wide cluster are looked at.
        """
        self._name = policy
        self._score = POLICIES[policy]
        self._state = PolicyState()
        self._shortlist = Shortlist(NARROWINGS[policy], self._state, seed)

    @property
    def num_known_blocks(self) -> int:
        """Blocks that nodes have reported."""
        return len(self._state.blocks)

    def on_blocks(self, node: Incarnation, report: BlockReport) -> int:
        """Record a node's report of its blocks; return how many had no room."""
        if report.is_first:
            self.on_lost(node)
        return self._state.blocks.on_report(node, report.added, report.removed, report.tier)

    def on_lost(self, node: Incarnation) -> None:
        """Forget the blocks of a node."""
        self._state.blocks.forget(node)

    def choose(
        self,
        nodes: Sequence[NodeView],
        query: Query,
        excluded: Set[Incarnation],
        avoided: Set[Pair] = frozenset(),
    ) -> ChosenNodes:
        """Choose nodes for a new attempt, none of them in `excluded`.

        A pair in `avoided` is not chosen: rather another decode node, or local prefill. Of a
        `Roster` only some nodes may be looked at, any other sequence is looked at whole.

        Raises `TooLong` when no node is made for a request this long, and `Overloaded` when a role
        is missing or every node was tried.
        """
        few = None
        if isinstance(nodes, Roster):
            few = self._shortlist.for_request(nodes, query, excluded)
        found = None if few is None else self._best(few, query, avoided)
        # With an avoided pair, a partner may be among those that are not on the list.
        if found is None or (avoided and found.lacks_partner):
            found = self._best(_able_nodes(nodes, query, excluded), query, avoided)
        self._state.turn += 1
        return self._choice(nodes, found.decode, found.prefill, query, found.reason)

    def _best(self, able: AbleNodes, query: Query, avoided: Set[Pair]) -> _Found:
        prefillers = able.prefillers
        if query.max_tokens == 1 and prefillers:
            prefill = self._pick(_alike_first(prefillers, query), query, query.last.prefill)
            return _Found(None, prefill, "one token: prefill alone")
        decoders = _with_a_path(_alike_first(able.decoders, query), prefillers, avoided)
        decode = self._pick(decoders, query, query.last.decode)
        is_mixed = decode.record.role is Role.MIXED
        partner = None if is_mixed else self._partner(decode, prefillers, query, avoided)
        reason = self._reason(decode, query, len(decoders))
        if partner is None and decode.record.role is Role.DECODE:
            reason = f"{reason}, {_why_alone(decode, prefillers)}: local prefill"
        return _Found(decode, partner, reason)

    def choose_prefill(
        self,
        nodes: Sequence[NodeView],
        query: Query,
        decode: Incarnation,
        excluded: Set[Incarnation],
        avoided: Set[Pair] = frozenset(),
    ) -> ChosenNodes:
        """Choose another prefill node for a reservation on `decode`; `prefill` None: none left."""
        if isinstance(nodes, Roster):
            holder = nodes.view(decode)
            few = self._shortlist.for_reservation(nodes, query, excluded)
        else:
            holder = next((node for node in nodes if node.incarnation == decode), None)
            few = None
        partner = None
        if holder is not None:
            if few is not None:
                partner = self._partner(holder, few, query, avoided)
            if few is None or (avoided and partner is None):
                prefillers = _without(_prefillers(nodes, query), excluded)
                partner = self._partner(holder, prefillers, query, avoided)
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
        """Return the best node to compute a prompt for `decode`, whose role may have changed since
        it was chosen: it is not its own partner."""
        me = decode.incarnation
        others = [one for one in _with_same_kv(decode, prefillers) if one is not decode]
        if avoided:
            others = [one for one in others if (one.incarnation, me) not in avoided]
        return self._pick(others, query, query.last.prefill) if others else None

    def _pick(self, nodes: Sequence[NodeView], query: Query, last: Incarnation | None) -> NodeView:
        """Return the best node; of those that are as good, the first one by id."""
        if len(nodes) == 1:
            return nodes[0]
        kept = session_node(nodes, last, query)
        if kept is not None:
            return kept
        scores = self._score(nodes, query, self._state)
        most = max(scores)
        best = [node for node, score in zip(nodes, scores, strict=True) if score == most]
        return min(best, key=_by_id)

    def _choice(
        self,
        nodes: Sequence[NodeView],
        decode: NodeView | None,
        prefill: NodeView | None,
        query: Query,
        reason: str,
    ) -> ChosenNodes:
        source = self._source(nodes, decode, prefill, query)
        for node in (decode, prefill):
            if node is not None:
                self._state.blocks.expect(query.block_keys(node.record), node.incarnation)
        computing = decode or prefill
        return ChosenNodes(
            decode=None if decode is None else decode.incarnation,
            prefill=None if prefill is None else prefill.incarnation,
            reason=reason,
            source=source,
            layout="" if computing is None else computing.record.fingerprint,
        )

    def _source(
        self,
        nodes: Sequence[NodeView],
        decode: NodeView | None,
        prefill: NodeView | None,
        query: Query,
    ) -> PrefixSource | None:
        receiver = prefill or decode
        if receiver is None:
            return None
        blocks, keys = self._state.blocks, query.block_keys(receiver.record)
        held = blocks.held(keys, to_send=True)
        if not held.runs:
            return None
        at = None if decode is None else decode.incarnation
        holders = self._shortlist.holders(nodes, held, at)
        in_memory = partial(blocks.num_in_memory, keys)
        return prefix_source(holders, receiver, at, held, in_memory)

    def _reason(self, decode: NodeView, query: Query, num_candidates: int) -> str:
        is_kept = decode.incarnation == query.last.decode
        rule = "its session's node" if is_kept else f"{self._name}: best of {num_candidates}"
        reason = f"{rule}, {decode.num_requests} requests there"
        return f"{reason}, mixed" if decode.record.role is Role.MIXED else reason


def _able_nodes(nodes: Sequence[NodeView], query: Query, excluded: Set[Incarnation]) -> AbleNodes:
    """Return every node that can take the request and is not excluded. Raises as `choose` does."""
    prefillers = _without(_prefillers(nodes, query), excluded)
    if query.max_tokens == 1 and prefillers:
        return AbleNodes([], prefillers)
    fitting = _decoders(nodes, query)
    decoders = _trusted_first(_without(fitting, excluded))
    if not decoders:
        raise Overloaded(_all_tried(len(fitting)))
    return AbleNodes(decoders, prefillers)


def _alike_first(nodes: Sequence[NodeView], query: Query) -> Sequence[NodeView]:
    """Return the nodes that draw the tokens of those before them, or all when none does."""
    return [node for node in nodes if query.goes_on_at(node.record)] or nodes


def _with_a_path(
    decoders: Sequence[NodeView], prefillers: Sequence[NodeView], avoided: Set[Pair]
) -> Sequence[NodeView]:
    """Return the nodes without an avoided pair; else those with another one; else all."""
    if not avoided:
        return decoders
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
    return _without(usable, failing) or usable or decoders


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
    return [node for node in nodes if not node.is_suspected and _is_staying_prefiller(node, query)]


def _is_staying_prefiller(node: NodeView, query: Query) -> bool:
    return (
        node.record.role is Role.PREFILL
        and not node.load.is_draining
        and query.fits(node.record)
        and query.is_followed_by(node.record)
    )


def _decoders(nodes: Sequence[NodeView], query: Query) -> list[NodeView]:
    """Return the nodes that may decode this request, at least one. Raises as `Placer.choose`."""
    heard = [node for node in nodes if node.record.role in _DECODE_ROLES]
    staying = [node for node in heard if not node.load.is_draining]
    if not staying:
        state = "is draining" if heard else "is heard"
        raise NoneStays(f"{'every' if heard else 'no'} decode or mixed node {state}")
    staying = [node for node in staying if query.is_followed_by(node.record)]
    if not staying:
        raise Overloaded(f"no decode or mixed node {_wanted(query)}")
    fitting = [node for node in staying if query.fits(node.record)]
    if not fitting:
        if query.max_tokens == 1 and any(_is_staying_prefiller(node, query) for node in nodes):
            raise Overloaded(
                "only prefill nodes hold the request, and none of them can take it now"
            )
        longest = max(node.record.max_model_len for node in staying)
        raise TooLong(
            f"{len(query.prompt_token_ids)} prompt tokens and max_tokens {query.max_tokens} make "
            f"{query.num_tokens}: wanted at most max_model_len = {longest}",
            longest=longest,
        )
    return fitting


def _trusted_first(nodes: list[NodeView]) -> list[NodeView]:
    """Return the nodes that are not suspected, or all when every one is."""
    return [node for node in nodes if not node.is_suspected] or nodes


def _wanted(query: Query) -> str:
    wanted = []
    if query.needs_grammars:
        wanted.append("follows grammars")
    if query.needs_token_rules:
        wanted.append("knows biases, bad words and salts")
    if query.needs_prompt_logprobs:
        wanted.append("answers with prompt_logprobs")
    return " and ".join(wanted)


def _without(nodes: Sequence[NodeView], excluded: Set[Incarnation]) -> list[NodeView]:
    return [node for node in nodes if node.incarnation not in excluded]
