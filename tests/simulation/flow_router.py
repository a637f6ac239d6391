"""A router for simulations that decides as the real one does: a `RequestFlow` for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from common.errors import NodeLost, Overloaded, PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.observing.clock import Clock
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest, RequestOutput
from kv_transfer.contract import Ticket
from node.flow.messages import (
    AbortAttempt,
    Answer,
    CallRefused,
    Message,
    PromptAccepted,
    Reserved,
    StartedLocally,
    Submit,
)
from router.core.effects import (
    Choose,
    Effect,
    Fail,
    Finish,
    SendAbort,
    SendPrefill,
    SendReserve,
    Wait,
)
from router.core.generation import TokenChunk
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow

Send = Callable[[Incarnation, Message], None]


@dataclass(slots=True)
class Client:
    """One request, what its client has read, and how it ended."""

    request: GenerationRequest
    flow: RequestFlow
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    asked: list[tuple[Incarnation, int]] = field(default_factory=list)
    """Nodes in the order in which they were asked, each with the tokens that it was given."""

    def answer(self) -> list[int]:
        return self.tokens


class FlowRouter:
    """Chooses the first node that was not tried; a node that left is not known any more."""

    def __init__(
        self,
        me: Incarnation,
        send: Send,
        *,
        decoders: Sequence[Incarnation],
        prefillers: Sequence[Incarnation],
        clock: Clock,
    ) -> None:
        self.me = me
        self.decoders, self.prefillers = list(decoders), list(prefillers)
        self.asked: dict[AttemptId, Client] = {}
        self._send = send
        self._clock = clock
        self._calls: dict[int, tuple[Client, Incarnation, AttemptId]] = {}
        self._call_ids = count(1)
        self._waiting: list[Client] = []

    def ask(self, request: GenerationRequest, *, may_wait: bool = False) -> Client:
        """A client's request; when every node is full, the flow itself asks one to queue it."""
        flow = RequestFlow(
            request.id.choice_id,
            request.prompt_token_ids,
            request.sampling,
            deadline_at_s=self._clock.now_s() + request.deadline_s,
        )
        client = Client(request, flow)
        self.asked[request.id] = client
        self._perform(client, flow.start())
        return client

    def leave(self, node: Incarnation) -> None:
        """The node is not chosen any more."""
        self.decoders = [other for other in self.decoders if other != node]
        self.prefillers = [other for other in self.prefillers if other != node]

    def on_node_lost(self, node: Incarnation) -> None:
        """Its stream ended."""
        self.leave(node)
        for client in self.asked.values():
            self._perform(client, client.flow.on_node_lost(node))

    def on_cut_off(self) -> None:
        """Every node ended its stream, one after the other: no call is answered any more."""
        calls, self._calls = self._calls, {}
        for node in [*self.decoders, *self.prefillers]:
            self.on_node_lost(node)
        for client, node, attempt in calls.values():
            lost = NodeLost(f"{node} was lost")
            self._perform(client, client.flow.on_call_failed(node, attempt, lost))

    def on_node_heard(self, node: Incarnation, *, is_prefill: bool) -> None:
        """It is heard again after a loss."""
        (self.prefillers if is_prefill else self.decoders).append(node)
        self.on_node_trusted(node)

    def on_node_suspected(self, node: Incarnation, *, is_heard: bool) -> None:
        """It is silent, or heard and not reached."""
        for client in self.asked.values():
            self._perform(client, client.flow.on_node_suspected(node, is_heard))

    def on_node_trusted(self, node: Incarnation) -> None:
        """It is heard, and may be chosen."""
        for client in self.asked.values():
            self._perform(client, client.flow.on_node_trusted(node))

    def on_waited(self) -> None:
        """The time of those that wait for a node has passed."""
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            self._perform(client, client.flow.on_waited())

    def on_reply(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        """A call was answered."""
        if reply_to not in self._calls:
            return  # of a stream that ended
        client, called, attempt = self._calls.pop(reply_to)
        assert called == node
        flow, now_s = client.flow, self._clock.now_s()
        reply: DecodeGrant | PdserveError
        match answer:
            case Reserved(ticket):
                reply = DecodeGrant(ticket, ticket.num_cached_tokens)
            case StartedLocally(num_cached_tokens):
                reply = DecodeGrant(None, num_cached_tokens)
            case PromptAccepted():
                self._perform(client, flow.on_prefill_reply(node, attempt, PrefillGrant()))
                return
            case CallRefused(error):
                if node in (Incarnation("p", 1), Incarnation("q", 1)):
                    self._perform(client, flow.on_prefill_reply(node, attempt, error))
                    return
                reply = error
            case _:
                raise AssertionError(f"no answer to a request: {answer}")
        self._perform(client, flow.on_reserve_reply(node, attempt, reply, now_s))

    def on_call_failed(self, reply_to: int) -> None:
        """Nobody listens at the node any more."""
        client, node, attempt = self._calls.pop(reply_to)
        failed = NodeLost(f"{node} has left")
        self._perform(client, client.flow.on_call_failed(node, attempt, failed))

    def on_output(self, node: Incarnation, output: RequestOutput) -> None:
        """Something in a node's stream."""
        client = self.asked[AttemptId(output.id.choice_id, 1)]
        self._perform(client, client.flow.on_output(node, output))

    def _perform(self, client: Client, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Choose():
                    self._choose(client, effect)
                case SendReserve():
                    known = len(effect.request.output_token_ids)
                    client.asked.append((effect.node, known))
                    submit = self._submit(client, effect.node, effect.request)
                    self._send(
                        effect.node,
                        Submit(
                            **submit,
                            must_prefill_locally=effect.must_prefill_locally,
                            may_wait=effect.may_wait,
                        ),
                    )
                case SendPrefill():
                    client.asked.append((effect.node, len(effect.request.output_token_ids)))
                    submit = self._submit(client, effect.node, effect.request)
                    ticket = cast("Ticket | None", effect.ticket)
                    source = None if effect.source is None else PrefixSource(*effect.source)
                    self._send(
                        effect.node, Submit(**submit, is_prompt=True, ticket=ticket, source=source)
                    )
                case SendAbort(node, attempt):
                    self._send(node, AbortAttempt(self.me, (attempt,)))
                case TokenChunk() as chunk:
                    assert chunk.first_index == len(client.tokens), "a seam in the answer"
                    client.tokens += chunk.token_ids
                    found = chunk.of_prompt
                    if found is not None and found.prompt_logprobs is not None:
                        assert not chunk.first_index
                        client.prompt_logprobs.append(found.prompt_logprobs)
                case Wait():
                    self._waiting.append(client)
                case Finish():
                    client.outcomes.append("finished")
                case Fail(error):
                    client.outcomes.append(f"failed: {error.code}")
                case _:
                    pass

    def _submit(self, client: Client, node: Incarnation, request: GenerationRequest) -> dict:  # type: ignore[type-arg]
        reply_to = next(self._call_ids)
        self._calls[reply_to] = (client, node, request.id)
        return {
            "request": request,
            "router": self.me,
            "reply_to": reply_to,
            "received_at_s": self._clock.now_s(),
        }

    def _choose(self, client: Client, effect: Choose) -> None:
        now_s, flow = self._clock.now_s(), client.flow
        prefill = next((n for n in self.prefillers if n not in effect.excluded), None)
        if effect.decode is not None:
            self._perform(client, flow.on_choice(effect.decode, prefill, "again", now_s))
            return
        decode = next((n for n in self.decoders if n not in effect.excluded), None)
        if decode is None:
            self._perform(client, flow.on_no_choice(Overloaded("every node was tried")))
        else:
            self._perform(client, flow.on_choice(decode, prefill, "first", now_s))
