"""A router in one life: the simulator's router on streams that break, as its dispatcher runs it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

from prometheus_client import CollectorRegistry

from common.errors import InternalError, NodeLost, PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest, RequestCounts, TokenLogprobs
from node.flow.messages import Answer, Message, Submit
from router.core.candidates import NodeAway
from router.core.effects import Choose, Effect
from router.core.generation import TokenChunk
from router.core.known.block_reports import BlockReport
from router.core.known.member_effects import (
    MembershipEffect,
    NodeDecodes,
    NodeSuspected,
    NodeTrusted,
    StreamLost,
)
from router.core.known.sessions import SessionId
from router.core.placement import ChosenNodes
from router.core.request_flow import RequestFlow
from router.dispatch.liveness.pace import ALARM_TICKS
from router.dispatch.liveness.silence import TICK_S
from router.watch.router_metrics import RouterMetrics
from simulator.faults.awaited import drive
from simulator.faults.beside import AdministratorCalls
from simulator.faults.between import NodesInContact
from simulator.faults.books.choices import SessionBooks, check_choice, check_goes_on, check_kept
from simulator.faults.books.known import check_blocks, check_roles, check_suspected, check_views
from simulator.faults.books.requests import Legs, Losses, Unanswered
from simulator.faults.books.told import Placements, check_counts
from simulator.faults.demand.grammars import is_hopeless
from simulator.faults.demand.watched_router import WatchedRouter
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.shape import MODEL
from simulator.faults.store.calls import StoreCalls
from simulator.faults.streams import NodeLink
from simulator.node import NodeSaid
from simulator.router import _Choice, keys_of
from simulator.served import ServedRequest, TokenTimes
from simulator.timeline import Timeline

_CALLS_PER_LIFE = 1_000_000
_LATENCIES = (1, 1, 1, 40)
"""How much longer messages from and to a node take: what one says overtakes what another has."""


@dataclass(slots=True, eq=False)
class Answered(ServedRequest):
    """The tokens that the client of one request has read, and the end of the request."""

    tokens: list[int] = field(default_factory=list)
    failure: str = ""
    """The error of an earlier attempt."""
    ended_at_s: float = -1.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """The log probabilities of the prompt's tokens, which come with token 0."""
    counts: RequestCounts | None = None


@cache
def _metrics() -> RouterMetrics:
    """Return metrics that are never read, cached because they are slow to make."""
    return RouterMetrics(CollectorRegistry())


class FaultyRouter(WatchedRouter):
    """A router of the nodes that the store lists; `nodes` are all lives of all nodes."""

    def __init__(
        self,
        timeline: Timeline,
        clock: ProcessClock,
        me: Incarnation,
        paths: Paths,
        store: StoreCalls,
        nodes: Mapping[Incarnation, FaultyNode],
        *,
        policy: str,
        session_ttl_s: float,
        lease_s: float,
        latency_s: float,
        seed: int,
        on_end: Callable[[], object],
        is_wide: bool,
    ) -> None:
        super().__init__(
            clock,  # type: ignore[arg-type]
            policy=policy,
            session_ttl_s=session_ttl_s,
            model=MODEL,
            lease_s=lease_s,
            latency_s=latency_s,
            seed=seed,
            on_end=lambda served: on_end(),
            metrics=_metrics(),
        )
        self.me = me
        self.clock = clock
        self.is_wide = is_wide
        if is_wide:
            self._chooser._placer._shortlist.most_scanned = 0
        self._alarm_ticks = 0
        self._rng = random.Random(f"links of {me} in {seed}")
        self._call_ids = count(1 + me.epoch * _CALLS_PER_LIFE)
        self._paths = paths
        self.store = store
        self._nodes = nodes
        self._lives = timeline
        self._refresh_s = lease_s / 4
        self._num_refreshes = 0
        self._is_refreshing = self._is_refresh_due = False
        self._sessions = SessionBooks(session_ttl_s)
        self._unanswered, self._legs = Unanswered(), Legs()
        self._placements = Placements()
        self._num_performing = 0
        self.links: dict[Incarnation, NodeLink] = {}
        self._between = NodesInContact(me, self._send, self._membership, clock)
        self.beside = AdministratorCalls(
            me,
            clock,
            timeline,
            paths,
            latency_s,
            nodes,
            self._membership,
            follow=self._follow,
            refresh_soon=self._refresh_soon,
        )
        self._refresh(0)
        self._tick()

    @property
    def num_calls(self) -> int:
        """Calls that were not answered."""
        return len(self._calls)

    def why_held(self) -> str:
        """Return the counts on a node that are left although nothing runs; empty: none."""
        for view in self._membership.nodes():
            own = self._membership._members[view.incarnation].own.num_requests
            if own:
                return f"the router counts {own} requests on {view.incarnation}, and none runs"
        return ""

    def check_blocks(self) -> None:
        """Check what is known of the blocks of nodes that were heard to the end.

        Raises `InternalError`.
        """
        index = self._chooser._placer._state.blocks
        unheard = index._slots.keys() - {node for node, one in self.links.items() if one.is_heard}
        if unheard:
            raise InternalError(f"{self.me} knows blocks of {unheard}, which are not heard")
        for node, link in self.links.items():
            if link.has_told_all:
                check_blocks(index, node, link.node.all_cached().news)

    # Events of the cluster.

    def ask_for(
        self,
        request: GenerationRequest,
        answered: Answered,
        session: SessionId,
        *,
        is_cut_to_fit: bool,
    ) -> None:
        """Take a request of a client, and its deadline."""
        self.ask(request, answered, session, is_cut_to_fit=is_cut_to_fit)
        choice = self._choices.get(request.id.choice_id)
        if choice is not None:
            self.clock.after(request.deadline_s, partial(self._on_deadline, choice))

    def on_client_gone(self, choice_id: str) -> None:
        """End a request whose client has left."""
        choice = self._choices.get(choice_id)
        if choice is not None:
            self._perform(choice, choice.flow.on_client_gone())

    # Events of links.

    def on_message(
        self, node: Incarnation, said: NodeSaid, *, is_first: bool, unreached: str
    ) -> None:
        """Take a message of a node, in the order of `NodeClient`."""
        for reply_to, answer in said.answers:
            self._on_answer(node, reply_to, answer)
        if is_first:
            self._chooser.on_blocks(node, BlockReport(is_first))
        for tier, news in said.news.items():
            added, removed = keys_of(news)
            self._chooser.on_blocks(node, BlockReport(False, added, removed, tier))
        self.on_heard(node, unreached)
        self._on_outputs(node, said.outputs, ())
        self._between.take(node, said)

    def has_requests(self, node: Incarnation) -> bool:
        """Return whether this router has a request on a node."""
        return node in self._membership.used

    def on_heard(self, node: Incarnation, unreached: str) -> None:
        """Record that a node is heard; `unreached` says why nothing reaches it, if so."""
        stuck_s = self._nodes[node].stuck_s
        self._follow(self._membership.on_heard(node, stuck_s=stuck_s, unreached=unreached))
        why = f"its step has lasted {stuck_s} s" if stuck_s else unreached
        check_suspected(self._membership, node, why)

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Suspect a node, which is silent, or heard and not reached."""
        if not is_heard:
            self._alarm_ticks = ALARM_TICKS
        self._follow(self._membership.on_suspected(node, reason, is_heard=is_heard))

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Handle the end of a stream: its open calls are not answered any more."""
        self._follow(self._membership.on_lost(node, reason))
        self._forget_calls(NodeLost(f"{node} was lost: {reason}"), node)

    # Inside: the store.

    def _refresh(self, number: int) -> None:
        """Ask the store, unless that was done since this was planned."""
        if number == self._num_refreshes:
            self._num_refreshes += 1
            self._is_refreshing, self._is_refresh_due = True, False
            drive(self._ask_store(), on_end=self._on_refreshed)

    async def _ask_store(self) -> None:
        membership = self._membership
        membership.on_asking()
        try:
            listing = await self.store.live_nodes()
        except PlacementUnavailable:
            self._follow(membership.on_store_away(self.clock.now_s()))
        else:
            self._follow(membership.on_listing(listing, self.clock.now_s()))
        self._match_links()
        while membership.has_unread:
            membership.nodes()
        self._between.warm()

    def _on_refreshed(self) -> None:
        self._is_refreshing = False
        self._refresh_in(0.0 if self._is_refresh_due else self._refresh_s)

    def _refresh_in(self, span_s: float) -> None:
        self.clock.after(span_s, partial(self._refresh, self._num_refreshes))

    def _refresh_soon(self) -> None:
        if self._is_refreshing:
            self._is_refresh_due = True
        else:
            self._refresh_in(0.0)

    def _match_links(self) -> None:
        wanted = {record.incarnation for record in self._membership.records()}
        for node in [one for one in self.links if one not in wanted]:
            self.links.pop(node).close()
            self._forget_calls(NodeAway(f"{node} has left"), node)
            if any(one.flow._attempts.on(node) for one in self._choices.values()):
                raise InternalError(f"{node} is forgotten, and a request is on it")
            self._on_node_lost(node, True)
        for node in sorted(wanted - self.links.keys()):
            latency_s = self._latency_s * self._rng.choice(_LATENCIES)
            link = NodeLink(self, self._nodes[node], self._lives, self._paths, latency_s)
            self.links[node] = link

    def _tick(self) -> None:
        is_alarm, self._alarm_ticks = self._alarm_ticks > 0, max(0, self._alarm_ticks - 1)
        for node, link in list(self.links.items()):
            link.tick(is_alarm=is_alarm or node in self._membership.last_unlisted)
        stuck = dict.fromkeys((n for n, one in self.links.items() if one.node.stuck_s), False)
        suspects = {**self._membership.suspects, **stuck}
        if suspects:
            # An idle node that refuses its grammar ends a second attempt alone.
            flows = [one.flow for one in self._choices.values() if not is_hopeless(one.flow)]
            self._unanswered.check(suspects, flows, self._idle_nodes)
        else:
            self._unanswered.check_none()
        self.clock.after(TICK_S, self._tick)

    def _idle_nodes(self) -> dict[Incarnation, int]:
        """Return the nodes that would decode a request at once, and the tokens that each holds."""
        able = (
            (view.incarnation, view.record.max_model_len)
            for view in self._membership.nodes()
            if view.record.role is not Role.PREFILL
            and not (view.is_suspected or view.load.is_draining)
        )
        return {node: most for node, most in able if self._is_idle(self._nodes[node])}

    def _is_idle(self, node: FaultyNode) -> bool:
        me, there = self.me.node_id, node.me.node_id
        is_reached = self._paths.is_open(me, there) and self._paths.is_open(there, me)
        is_staying = node.clock.is_running and not node.life.is_on
        return is_reached and is_staying and node.is_empty()

    # Inside: changes for requests.

    def _follow(self, effects: Sequence[MembershipEffect]) -> None:
        for effect in effects:
            match effect:
                case NodeTrusted(node, _):
                    self._between.warm()
                    self._tell_all(RequestFlow.on_node_trusted, node)
                case NodeDecodes(node):
                    self._tell_all(RequestFlow.on_node_decodes, node)
                case NodeSuspected(node, _, is_heard, _):
                    self._tell_all(RequestFlow.on_node_suspected, node, is_heard)
                case StreamLost(node, is_orderly):
                    self._on_node_lost(node, is_orderly)
                    self._refresh_soon()
                case _:
                    pass

    def _on_node_lost(self, node: Incarnation, is_orderly: bool) -> None:
        self._between.on_lost(node)
        self._chooser.on_lost(node)
        flows = (one.flow for one in self._choices.values())
        losses = Losses(node, flows, is_orderly=is_orderly)
        self._tell_all(RequestFlow.on_node_lost, node, is_orderly)
        losses.check()

    def _forget_calls(self, lost: NodeLost, node: Incarnation) -> None:
        for number in [number for number, call in self._calls.items() if call.node == node]:
            self.clock.after(0.0, partial(self._fail_call, number, lost))

    def _fail_call(self, number: int, lost: NodeLost) -> None:
        found = self._calls.pop(number, None)
        if found is not None:
            choice, node, attempt, _ = found
            self._perform(choice, choice.flow.on_call_failed(node, attempt, lost))

    def _on_deadline(self, choice: _Choice) -> None:
        self._perform(choice, choice.flow.on_time(self.clock.now_s()))
        if not choice.flow.is_done:
            self.clock.after(0.001, partial(self._on_deadline, choice))

    # Inside: overrides of a cluster without faults.

    def _perform(
        self, choice: _Choice, effects: Sequence[Effect], times: TokenTimes | None = None
    ) -> None:
        """Perform effects and those that follow from them, and then check the books."""
        self._num_performing += 1
        has_tokens = bool(_answered(choice).tokens)
        self._placements.take(choice.flow.attempt.choice_id, effects, has_tokens=has_tokens)
        super()._perform(choice, effects, times)
        flow, name = choice.flow, choice.flow.attempt.choice_id
        going_on = flow._attempts._all() if name in self._choices else ()
        self._legs.take(name, choice.num_prompt_tokens, going_on)
        self._end_performing()

    def _tell_all(self, event: Callable[..., Sequence[Effect]], *told: object) -> None:
        """Give every flow an event, and then check the books."""
        self._num_performing += 1
        for choice in list(self._choices.values()):
            self._perform(choice, event(choice.flow, *told))
        self._end_performing()

    def _end_performing(self) -> None:
        self._num_performing -= 1
        if not self._num_performing:
            self._legs.check(self._membership)

    def _choose(self, choice: _Choice, effect: Choose) -> list[Effect]:
        check_views(self._membership)
        if not self.store.has_failed:
            check_roles(self._membership.nodes(), self.beside.roles_told())
        return super()._choose(choice, effect)

    def _on_chosen(self, choice: _Choice, wanted: Choose, chosen: ChosenNodes) -> None:
        super()._on_chosen(choice, wanted, chosen)
        check_choice(self._membership.nodes(), wanted, chosen)
        check_goes_on(self._membership.nodes(), choice.query, wanted, chosen)
        if choice.query.session:
            num_known, now_s = self._chooser.num_sessions, self.clock.now_s()
            self._sessions.check(choice.query, chosen, num_known, now_s)
            nodes = self._membership.nodes()
            if not (self._chooser.has_failed_pairs or nodes.unreachable):
                check_kept(nodes, choice.query, wanted, chosen)

    def _send(self, node: Incarnation, message: Message) -> bool:
        """Return whether the message leaves; a call that does not has failed."""
        link = self.links.get(node)
        is_sent = link is not None and link.send(message)
        if not is_sent and isinstance(message, Submit):
            away = NodeAway(f"{node} is not heard")
            self.clock.after(0.0, partial(self._fail_call, message.reply_to, away))
        return is_sent

    def _on_answer(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        if reply_to in self._calls:
            super()._on_answer(node, reply_to, answer)

    def _on_chunk(self, choice: _Choice, chunk: TokenChunk, times: TokenTimes) -> None:
        super()._on_chunk(choice, chunk, times)
        answered = _answered(choice)
        name = choice.flow.attempt.choice_id
        if answered.outcome:
            raise InternalError(f"{name} gets tokens after its end")
        if chunk.first_index != len(answered.tokens):
            have = len(answered.tokens)
            raise InternalError(f"{name} gets token {chunk.first_index}, and has {have}")
        answered.tokens += chunk.token_ids
        answered.logprobs += chunk.logprobs
        if chunk.of_prompt is not None and chunk.of_prompt.prompt_logprobs is not None:
            answered.prompt_logprobs.append(chunk.of_prompt.prompt_logprobs)
        if chunk.counts is not None:
            num_prompt, num_tokens = choice.num_prompt_tokens, len(answered.tokens)
            check_counts(name, answered.counts, chunk.counts, num_prompt, num_tokens)
            answered.counts = chunk.counts

    def _end(self, choice: _Choice, outcome: str) -> None:
        answered = _answered(choice)
        if answered.outcome:
            raise InternalError(f"{choice.flow.attempt.choice_id} ends twice")
        answered.ended_at_s = self._lives.now_s()
        failure = choice.flow.failure
        answered.failure = "" if failure is None else f"{failure.code}: {failure}"
        super()._end(choice, outcome)


def _answered(choice: _Choice) -> Answered:
    assert isinstance(choice.served, Answered), "requests come by `ask_for`"
    return choice.served
