"""A router for simulations: asks two nodes, keeps every token, and notices what no node may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.observing.clock import Clock
from common.request import FinishReason, GenerationRequest, RequestOutput
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

Send = Callable[[Incarnation, Message], None]
"""Puts a message on its way to a node."""


@dataclass(slots=True)
class Leg:
    """What one node said about one attempt; `is_cut`: its stream broke, the rest is lost.

    `is_taken`: it has taken a call. It refuses the same call where its attempt is over.
    """

    next_index: int | None = None
    is_taken: bool = False
    is_over: bool = False
    is_cut: bool = False


@dataclass(slots=True)
class Asked:
    """One request: what was asked, what came, how it ended."""

    request: GenerationRequest
    may_wait: bool = False
    tokens: dict[int, int] = field(default_factory=dict)
    legs: dict[Incarnation, Leg] = field(default_factory=dict)
    ticket: Ticket | None = None
    outcomes: list[str] = field(default_factory=list)
    error: PdserveError | None = None
    end: int | None = None
    has_started: bool = False
    is_local: bool = False
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def is_done(self) -> bool:
        return bool(self.outcomes)

    def answer(self) -> list[int]:
        """The tokens from index 0 on, up to the first that is missing."""
        found: list[int] = []
        while len(found) in self.tokens:
            found.append(self.tokens[len(found)])
        return found


class ScriptedRouter:
    """One router. `change_ticket` stands for what goes wrong with a ticket on its way.

    With `may_pull` prefill nodes may pull what the decode node has cached, or `source`.
    """

    def __init__(
        self,
        me: Incarnation,
        send: Send,
        *,
        decode: Incarnation,
        prefill: Incarnation | None,
        clock: Clock,
    ) -> None:
        self.me = me
        self._clock = clock
        self.decode = decode
        self.prefill = prefill
        self.asked: dict[AttemptId, Asked] = {}
        self.may_pull = False
        self.source: PrefixSource | None = None
        self.change_ticket: Callable[[Ticket], Ticket] = lambda ticket: ticket
        self.send = send
        self._calls: dict[int, tuple[AttemptId, Incarnation]] = {}

    @property
    def num_unanswered(self) -> int:
        """Calls that no node has answered."""
        return len(self._calls)

    # --- asking -------------------------------------------------------------------------------

    def ask(self, request: GenerationRequest, *, may_wait: bool = False) -> Asked:
        """A client's request: reserve first; one token alone needs no reservation (S50)."""
        asked = Asked(request, may_wait)
        self.asked[request.id] = asked
        if request.sampling.max_tokens == 1 and self.prefill is not None:
            self.send_prefill(asked)
        else:
            self.send_reserve(asked)
        return asked

    def send_reserve(self, asked: Asked) -> None:
        """Ask the decode node; asking again is the same question (F02)."""
        submit = Submit(
            request=asked.request,
            router=self.me,
            reply_to=self._new_call(asked, self.decode),
            received_at_s=self._clock.now_s(),
            source=self.source,
            must_prefill_locally=self.prefill is None,
            may_wait=asked.may_wait,
        )
        self.send(self.decode, submit)

    def send_prefill(self, asked: Asked) -> None:
        """Ask the prefill node; the other one where that holds the reservation, since it was given
        another role."""
        ticket = None if asked.ticket is None else self.change_ticket(asked.ticket)
        has_moved = ticket is not None and ticket.decode_node == self.prefill
        node = self.decode if has_moved else self.prefill
        assert node is not None
        submit = Submit(
            request=asked.request,
            router=self.me,
            reply_to=self._new_call(asked, node),
            received_at_s=self._clock.now_s(),
            is_prompt=True,
            ticket=ticket,
            source=self._source(ticket),
        )
        self.send(node, submit)

    def _source(self, ticket: Ticket | None) -> PrefixSource | None:
        if self.source is not None or ticket is None or not self.may_pull:
            return self.source
        return PrefixSource(self.decode, ticket.num_cached_tokens)

    def abort(self, asked: Asked) -> None:
        """The client went away."""
        if not asked.is_done:
            self._end(asked, "aborted")

    # --- what nodes say -----------------------------------------------------------------------

    def on_reply(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        """A call was answered; a call is answered once."""
        attempt, called = self._calls.pop(reply_to)
        assert called == node
        asked = self.asked[attempt]
        if not isinstance(answer, CallRefused):
            asked.legs[node].is_taken = True
        match answer:
            case CallRefused(error):
                if not asked.is_done:
                    is_asked = (attempt, node) in self._calls.values()
                    if not (is_asked or asked.legs[node].is_taken):
                        del asked.legs[node]  # nothing is held where every call was refused
                    asked.error = error
                    self._end(asked, f"refused: {error.code}")
            case Reserved(ticket):
                assert ticket.attempt == attempt
                assert asked.ticket in (None, ticket), "two reservations for one attempt (F02)"
                is_new, asked.ticket = asked.ticket is None, ticket
                if is_new and not asked.is_done:
                    self.send_prefill(asked)
            case StartedLocally():
                asked.is_local = True
            case PromptAccepted():
                pass
            case _:
                raise AssertionError(f"no answer to a request: {answer}")

    def on_output(self, node: Incarnation, output: RequestOutput) -> None:
        """A node reported tokens or an end."""
        asked = self.asked[output.id]
        if asked.legs[node].is_cut:
            return
        self._check_leg(asked, node, output)
        if asked.is_done:
            return
        if output.details.finish_reason is FinishReason.ERROR:
            if node == self.prefill and asked.has_started and 0 in asked.tokens:
                return  # its part was done: decode goes on without it
            self._end(asked, f"failed: {output.details.error_code}")
            return
        asked.has_started |= node == self.decode
        if output.counts is not None:
            _, num_drafted, num_accepted = output.counts
            assert num_drafted >= num_accepted
            asked.num_drafted = max(asked.num_drafted, num_drafted)
            asked.num_accepted = max(asked.num_accepted, num_accepted)
        for offset, token_id in enumerate(output.token_ids):
            index = output.first_index + offset
            assert asked.tokens.get(index, token_id) == token_id, "one index, two tokens (F44)"
            asked.tokens[index] = token_id
        if output.details.finish_reason is not None:
            asked.end = output.first_index + len(output.token_ids)
        if asked.end is not None and len(asked.answer()) == asked.end:
            self._end(asked, "finished")

    def on_node_lost(self, node: Incarnation) -> None:
        """The stream of a node broke."""
        for asked in self.asked.values():
            if not asked.is_done:
                self._end(asked, f"lost: {node}")

    # --- inside -------------------------------------------------------------------------------

    def _new_call(self, asked: Asked, node: Incarnation) -> int:
        reply_to = len(self._calls) + sum(len(a.legs) for a in self.asked.values()) + 1
        while reply_to in self._calls:
            reply_to += 1
        self._calls[reply_to] = (asked.request.id, node)
        asked.legs.setdefault(node, Leg())
        return reply_to

    def _check_leg(self, asked: Asked, node: Incarnation, output: RequestOutput) -> None:
        leg = asked.legs[node]
        assert not leg.is_over, f"{node} went on after its end: {output}"
        leg.is_over = output.details.finish_reason is not None
        if output.token_ids:
            expected = leg.next_index if leg.next_index is not None else output.first_index
            assert output.first_index == expected, f"{node} skipped or repeated a token"
            leg.next_index = expected + len(output.token_ids)

    def _end(self, asked: Asked, outcome: str) -> None:
        asked.outcomes.append(outcome)
        for node in asked.legs:
            self.send(node, AbortAttempt(self.me, (asked.request.id,)))
