"""A router: a real `RequestFlow` for each request, the real placement and membership.

It performs the effects of its flows on simulated nodes. Only the way to the nodes and back is
modelled: each message takes `latency_s`, and messages of one node keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, cast

from prometheus_client import CollectorRegistry

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.blocks import BlockHash, BlockKey, block_keys
from common.nodes import Role
from common.request import GenerationRequest, RequestOutput
from kv_transfer.contract import Ticket
from node.flow.messages import (
    AbortAttempt,
    Answer,
    CallRefused,
    Message,
    PromptAccepted,
    PullRefused,
    Reserved,
    SendBlocks,
    StartedLocally,
    Submit,
)
from placement.store import LiveNode
from router.core.counted_legs import count_legs
from router.core.effects import (
    Choose,
    Effect,
    Fail,
    Finish,
    LegClosed,
    PromptComputed,
    PromptKept,
    SendAbort,
    SendPrefill,
    SendReserve,
    Wait,
)
from router.core.generation import TokenChunk
from router.core.known.block_reports import BlockReport
from router.core.known.member_effects import NodeDecodes
from router.core.known.roster import Roster
from router.core.known.sessions import SessionId
from router.core.placement import ChosenNodes, Placing
from router.core.policies.query import Query, query_of
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow
from router.dispatch.handoff_watch import HandoffWatch
from router.watch.router_metrics import RouterMetrics
from simulator.node import NodeSaid
from simulator.served import ServedRequest, TokenTimes
from simulator.timeline import Timeline


@dataclass(slots=True)
class _Choice:
    flow: RequestFlow
    query: Query
    served: ServedRequest
    is_waiting: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.query.prompt_token_ids)


class _Call(NamedTuple):
    """A call that waits for its reply: a reservation, or a prompt."""

    choice: _Choice
    node: Incarnation
    attempt: AttemptId
    is_prompt: bool


def keys_of(
    news: Mapping[BlockHash, bool],
) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
    """Return the blocks that entered, and those that left, by the names that routers know."""
    if all(news.values()):  # as most often
        return block_keys(news), ()
    added = [name for name, is_there in news.items() if is_there]
    removed = [name for name, is_there in news.items() if not is_there]
    return block_keys(added), block_keys(removed)


class SimulatedRouter:
    """Places requests and follows them to their ends; `on_end` is called after each."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        policy: str,
        session_ttl_s: float,
        model: str,
        lease_s: float,
        latency_s: float,
        seed: int,
        on_end: Callable[[ServedRequest], object],
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.me = Incarnation("router", 1)
        self._timeline = timeline
        self._latency_s = latency_s
        self._on_end = on_end
        metrics = metrics or RouterMetrics(CollectorRegistry())
        placing = Placing(
            model=model, lease_s=lease_s, policy=policy, session_ttl_s=session_ttl_s, seed=seed
        )
        self._membership, self._chooser = placing.machines()
        self._handoffs = HandoffWatch(self._chooser, timeline, metrics)
        self._deliver: dict[Incarnation, Callable[[Message], object]] = {}
        self._choices: dict[str, _Choice] = {}
        self._calls: dict[int, _Call] = {}
        self._call_ids = count(1)
        self.num_reports = self.num_reported_blocks = 0
        """Reports of blocks that entered or left a tier of a node, and the blocks in them."""

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._choices)

    # Events.

    def connect(self, inboxes: Mapping[Incarnation, Callable[[Message], object]]) -> None:
        """Set the inbox of each node, to which its messages are sent."""
        self._deliver.update(inboxes)

    def on_role(self, node: Incarnation, role: Role) -> None:
        """Record the new role of a node, before the store lists it."""
        for effect in self._membership.on_role(node, role):
            assert isinstance(effect, NodeDecodes), "nothing else follows from a role"
            for choice in list(self._choices.values()):
                self._perform(choice, choice.flow.on_node_decodes(node))

    def on_listing(self, nodes: Sequence[LiveNode]) -> None:
        """Take the store's list of nodes; all of them are heard from now on."""
        self._membership.on_asking()
        self._membership.on_listing(nodes, self._timeline.present_s)
        for node in nodes:
            self._membership.on_heard(node.record.incarnation)
        while self._membership.has_unread:
            self._membership.nodes()

    def nodes(self) -> Roster:
        """Return the nodes that can be chosen."""
        return self._membership.nodes()

    def ask(
        self,
        request: GenerationRequest,
        served: ServedRequest,
        session: SessionId = b"",
        *,
        is_cut_to_fit: bool = False,
    ) -> None:
        """Take a request of a client; `is_cut_to_fit` as `router.core.generation` has it."""
        name, prompt = request.id.choice_id, request.prompt_blocks
        flow = RequestFlow(
            name,
            prompt,
            request.sampling,
            deadline_at_s=self._timeline.present_s + request.deadline_s,
            priority=request.priority,
            is_cut_to_fit=is_cut_to_fit,
            cache_salt=request.cache_salt,
        )
        query = query_of(prompt, request.sampling, request.cache_salt, session)
        choice = self._choices[name] = _Choice(flow, query, served)
        self._perform(choice, flow.start(self._membership.suspects))

    def on_said(self, said: NodeSaid) -> None:
        """Take a message of a node."""
        for reply_to, answer in said.answers:
            self._on_answer(said.node, reply_to, answer)
        if said.outputs:
            self._on_outputs(said.node, said.outputs, said.step_ends_s)
        for wanted in said.pulls:
            self._send(wanted.source, SendBlocks(self.me, wanted.ticket, wanted.block_hashes))
        for refused in said.refused_pulls:
            self._send(refused.node, PullRefused(refused.lease_token))
        for tier, news in said.news.items():
            added, removed = keys_of(news)
            self.num_reports += 1
            self.num_reported_blocks += len(news)
            self._chooser.on_blocks(said.node, BlockReport(False, added, removed, tier))

    # Inside: events.

    def _on_answer(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        choice, called, attempt, is_prompt = self._calls.pop(reply_to)
        assert called == node, "an answer of another node"
        flow, now_s = choice.flow, self._timeline.present_s
        reply: DecodeGrant | PdserveError
        match answer:
            case PromptAccepted():
                effects = flow.on_prefill_reply(node, attempt, PrefillGrant())
            case CallRefused(error) if is_prompt:
                self._note(choice, "{} refuses the prompt: {}", node, error.code)
                effects = flow.on_prefill_reply(node, attempt, error)
            case Reserved(ticket):
                self._note_grant(choice, node, "has a place for it", ticket.num_cached_tokens)
                reply = DecodeGrant(ticket, ticket.num_cached_tokens)
                effects = flow.on_reserve_reply(node, attempt, reply, now_s)
            case StartedLocally(num_cached_tokens):
                self._note_grant(choice, node, "computes the prompt itself", num_cached_tokens)
                reply = DecodeGrant(None, num_cached_tokens)
                effects = flow.on_reserve_reply(node, attempt, reply, now_s)
            case CallRefused(error):
                self._note(choice, "{} refuses it: {}", node, error.code)
                effects = flow.on_reserve_reply(node, attempt, error, now_s)
        self._perform(choice, effects)

    def _on_outputs(
        self, node: Incarnation, outputs: Sequence[RequestOutput], step_ends_s: Sequence[float]
    ) -> None:
        now = TokenTimes.of([self._timeline.present_s])
        num_steps, of_steps = len(step_ends_s), now
        if num_steps > 1:
            of_steps = TokenTimes.of([end_s + self._latency_s for end_s in step_ends_s])
        for output in outputs:
            self._on_output(node, output, of_steps if len(output.token_ids) == num_steps else now)

    def _on_output(self, node: Incarnation, output: RequestOutput, times: TokenTimes) -> None:
        choice = self._choices.get(output.id.choice_id)
        if choice is None:
            return
        details = output.details
        if details.compute_s:
            served = choice.served
            served.queue_s, served.compute_s = details.queue_s, details.compute_s
            told = "token 0 of {}: {:.4f} s queued, {:.4f} s computed"
            self._note(choice, told, node, details.queue_s, details.compute_s)
        chunk = choice.flow.next_tokens(node, output)
        if chunk is not None:
            self._on_chunk(choice, chunk, times)
            return
        self._handoffs.before_output(choice.flow, node, output)
        self._perform(choice, choice.flow.on_output(node, output), times)

    def _on_chunk(self, choice: _Choice, chunk: TokenChunk, times: TokenTimes) -> None:
        if chunk.counts is not None:
            choice.served.num_cached_tokens = chunk.counts.num_cached_tokens
        if chunk.token_ids:
            choice.served.on_tokens(len(chunk.token_ids), times)

    def _on_waited(self, choice: _Choice) -> None:
        choice.is_waiting = False
        if not choice.flow.is_done:
            self._perform(choice, choice.flow.on_waited())

    # Inside: effects.

    def _perform(
        self, choice: _Choice, effects: Sequence[Effect], times: TokenTimes | None = None
    ) -> None:
        for effect in effects:
            match effect:
                case TokenChunk():
                    at = times or TokenTimes.of([self._timeline.present_s])
                    self._on_chunk(choice, effect, at)
                case Choose():
                    self._perform(choice, self._choose(choice, effect))
                case Wait(wait_s) if not choice.is_waiting:
                    choice.is_waiting = True
                    self._timeline.after(wait_s, partial(self._on_waited, choice))
                case SendReserve():
                    count_legs(self._membership, effect, choice.num_prompt_tokens)
                    self._reserve(choice, effect)
                case SendPrefill():
                    count_legs(self._membership, effect, choice.num_prompt_tokens)
                    self._prefill(choice, effect)
                case SendAbort(node, attempt):
                    self._send(node, AbortAttempt(self.me, (attempt,)))
                case PromptKept() | PromptComputed() | LegClosed():
                    count_legs(self._membership, effect, choice.num_prompt_tokens)
                case Finish(reason):
                    self._end(choice, reason.value)
                case Fail(error):
                    self._fail(choice, error)

    def _choose(self, choice: _Choice, effect: Choose) -> list[Effect]:
        flow = choice.flow
        try:
            nodes, now_s = self._membership.nodes(), self._timeline.present_s
            choice.query.max_tokens = flow.max_tokens
            chosen, _ = self._chooser.choose(nodes, choice.query, effect, now_s)
        except PdserveError as none_left:
            return self._on_none_left(choice, none_left)
        self._on_chosen(choice, effect, chosen)
        return flow.on_choice(
            chosen.decode, chosen.prefill, chosen.reason, now_s, chosen.source, chosen.layout
        )

    def _on_none_left(self, choice: _Choice, error: PdserveError) -> list[Effect]:
        return choice.flow.on_no_choice(error)

    def _on_chosen(self, choice: _Choice, wanted: Choose, chosen: ChosenNodes) -> None:
        prefill = chosen.prefill or "none"
        told = "placed by {}: decode {}, prefill {}"
        self._note(choice, told, chosen.reason, chosen.decode, prefill)

    def _reserve(self, choice: _Choice, effect: SendReserve) -> None:
        submit = Submit(
            request=effect.request,
            router=self.me,
            reply_to=self._call(choice, effect.node, effect.request.id, is_prompt=False),
            received_at_s=self._timeline.present_s + self._latency_s,
            source=effect.source,
            must_prefill_locally=effect.must_prefill_locally,
            may_wait=effect.may_wait,
        )
        self._send(effect.node, submit)

    def _prefill(self, choice: _Choice, effect: SendPrefill) -> None:
        submit = Submit(
            request=effect.request,
            router=self.me,
            reply_to=self._call(choice, effect.node, effect.request.id, is_prompt=True),
            received_at_s=self._timeline.present_s + self._latency_s,
            is_prompt=True,
            ticket=cast("Ticket | None", effect.ticket),
            source=effect.source,
        )
        self._send(effect.node, submit)

    def _call(
        self, choice: _Choice, node: Incarnation, attempt: AttemptId, *, is_prompt: bool
    ) -> int:
        number = next(self._call_ids)
        self._calls[number] = _Call(choice, node, attempt, is_prompt)
        return number

    def _send(self, node: Incarnation, message: Message) -> bool:
        """Return whether the message leaves."""
        self._timeline.after(self._latency_s, partial(self._deliver[node], message))
        return True

    def _note_grant(self, choice: _Choice, node: Incarnation, what: str, num_cached: int) -> None:
        choice.served.granted_at_s = self._timeline.present_s
        num_prompt = choice.num_prompt_tokens
        self._note(choice, "{} {}: {} of {} tokens cached", node, what, num_cached, num_prompt)

    def _note(self, choice: _Choice, what: str, *values: object) -> None:
        """Add an entry to the choice's story if one is kept; only then is its text formatted."""
        if choice.served.story is not None:
            choice.served.story.append((self._timeline.present_s, what.format(*values)))

    def _fail(self, choice: _Choice, error: PdserveError) -> None:
        self._end(choice, error.code)

    def _end(self, choice: _Choice, outcome: str) -> None:
        self._note(choice, "ended: {}, {} tokens", outcome, choice.served.num_tokens)
        choice.served.outcome = outcome
        if self._choices.pop(choice.flow.attempt.choice_id, None) is not None:
            self._on_end(choice.served)
