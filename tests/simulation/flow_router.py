"""The simulator's router, which chooses nodes in the order of a list and follows no store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry

from common.errors import NodeLost, Overloaded
from common.ids import AttemptId, Incarnation
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest, RequestOutput
from node.flow.messages import Answer, Message
from router.core.effects import Choose, Effect, SendPrefill, SendReserve
from router.core.generation import TokenChunk
from router.core.request_flow import RequestFlow
from router.watch.router_metrics import RouterMetrics
from simulator.clients import ClientRequest
from simulator.faults.checks.ends import FINISHED
from simulator.router import SimulatedRouter
from simulator.served import ServedRequest, TokenTimes
from simulator.timeline import Timeline
from simulator.trace_file import TraceRequest

Send = Callable[[Incarnation, Message], None]


@dataclass(slots=True, eq=False, kw_only=True)
class Client(ServedRequest):
    """One request, what its client has read, and how it ended."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    asked: list[tuple[Incarnation, int]] = field(default_factory=list)
    """Nodes in the order in which they were asked, each with the tokens that it was given."""
    num_attempts: int = 1

    def answer(self) -> list[int]:
        return self.tokens


@cache
def _metrics() -> RouterMetrics:
    """Return metrics that nobody reads; they are slow to make."""
    return RouterMetrics(CollectorRegistry())


class FlowRouter(SimulatedRouter):
    """Chooses the first node that was not tried; a node that left is not known any more."""

    def __init__(
        self,
        me: Incarnation,
        send: Send,
        *,
        decoders: Sequence[Incarnation],
        prefillers: Sequence[Incarnation],
        clock: Timeline,
    ) -> None:
        super().__init__(
            clock,
            policy="round_robin",
            session_ttl_s=60.0,
            model="hash-runner",
            lease_s=10.0,
            latency_s=0.0,
            seed=0,
            on_end=lambda served: None,
            metrics=_metrics(),
        )
        self.me = me
        self.decoders, self.prefillers = list(decoders), list(prefillers)
        self.asked: dict[AttemptId, Client] = {}
        self._put_on_way = send

    def ask(self, request: GenerationRequest, *, may_wait: bool = False) -> Client:  # type: ignore[override]
        """A client's request; when every node is full, the flow itself asks one to queue it."""
        most = request.sampling.max_tokens
        now_s, num_prompt = self._timeline.now_s(), len(request.prompt_token_ids)
        trace = TraceRequest(now_s, num_prompt, most)
        client = Client(ClientRequest(trace, len(self.asked), most, 0), now_s, request=request)
        self.asked[request.id] = client
        super().ask(request, client)
        return client

    # What the test says of nodes.

    def leave(self, node: Incarnation) -> None:
        """The node is not chosen any more."""
        self.decoders = [other for other in self.decoders if other != node]
        self.prefillers = [other for other in self.prefillers if other != node]

    def on_node_lost(self, node: Incarnation) -> None:
        """Its stream ended."""
        self.leave(node)
        self._tell_all(lambda flow: flow.on_node_lost(node))

    def on_cut_off(self) -> None:
        """Every node ended its stream, one after the other: no call is answered any more."""
        lost = list(self._calls)
        for node in [*self.decoders, *self.prefillers]:
            self.on_node_lost(node)
        for reply_to in lost:
            self.on_call_failed(reply_to)

    def on_node_heard(self, node: Incarnation, *, is_prefill: bool) -> None:
        """It is heard again after a loss."""
        (self.prefillers if is_prefill else self.decoders).append(node)
        self.on_node_trusted(node)

    def on_node_suspected(self, node: Incarnation, *, is_heard: bool) -> None:
        """It is silent, or heard and not reached."""
        self._tell_all(lambda flow: flow.on_node_suspected(node, is_heard))

    def on_node_trusted(self, node: Incarnation) -> None:
        """It is heard, and may be chosen."""
        self._tell_all(lambda flow: flow.on_node_trusted(node))

    def on_call_failed(self, reply_to: int) -> None:
        """Nobody listens at the node any more."""
        choice, node, attempt, _ = self._calls.pop(reply_to)
        failed = NodeLost(f"{node} has left")
        self._perform(choice, choice.flow.on_call_failed(node, attempt, failed))

    # What nodes say.

    def on_reply(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        """A call was answered; one of a stream that ended is forgotten."""
        if reply_to in self._calls:
            self._on_answer(node, reply_to, answer)

    def on_output(self, node: Incarnation, output: RequestOutput) -> None:
        """Something in a node's stream."""
        self._on_output(node, output, TokenTimes.of([self._timeline.now_s()]))

    # Inside: what differs from a router that follows a store.

    def _tell_all(self, event: Callable[[RequestFlow], Sequence[Effect]]) -> None:
        for choice in list(self._choices.values()):
            self._perform(choice, event(choice.flow))

    def _send(self, node: Incarnation, message: Message) -> bool:
        self._put_on_way(node, message)
        return True

    def _choose(self, choice: Any, effect: Choose) -> list[Effect]:
        now_s = self._timeline.now_s()
        flow: RequestFlow = choice.flow
        prefill = next((n for n in self.prefillers if n not in effect.excluded), None)
        if effect.decode is not None:
            return flow.on_choice(effect.decode, prefill, "again", now_s)
        decode = next((n for n in self.decoders if n not in effect.excluded), None)
        if decode is None:
            return flow.on_no_choice(Overloaded("every node was tried"))
        return flow.on_choice(decode, prefill, "first", now_s)

    def _reserve(self, choice: Any, effect: SendReserve) -> None:
        self._note_asked(choice, effect.node, effect.request)
        super()._reserve(choice, effect)

    def _prefill(self, choice: Any, effect: SendPrefill) -> None:
        self._note_asked(choice, effect.node, effect.request)
        super()._prefill(choice, effect)

    def _note_asked(self, choice: Any, node: Incarnation, request: GenerationRequest) -> None:
        client = _client(choice)
        client.asked.append((node, len(request.output_token_ids)))
        client.num_attempts = max(client.num_attempts, request.id.attempt)

    def _on_chunk(self, choice: Any, chunk: TokenChunk, times: TokenTimes) -> None:
        super()._on_chunk(choice, chunk, times)
        client = _client(choice)
        assert chunk.first_index == len(client.tokens), "a seam in the answer"
        client.tokens += chunk.token_ids
        found = chunk.of_prompt
        if found is not None and found.prompt_logprobs is not None:
            assert not chunk.first_index
            client.prompt_logprobs.append(found.prompt_logprobs)

    def _end(self, choice: Any, outcome: str) -> None:
        is_answered = outcome in FINISHED
        _client(choice).outcomes.append("finished" if is_answered else f"failed: {outcome}")
        super()._end(choice, outcome)


def _client(choice: Any) -> Client:
    assert isinstance(choice.served, Client), "requests come by `ask`"
    return choice.served
