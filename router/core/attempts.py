"""The attempts of one choice: the nodes that were asked, what is open there, its tokens. No I/O.

A *leg* is one attempt on one node. It is open from the moment the node is asked until the node is
known to hold nothing: it refused, it finished, or (a prefill node) its KV was taken over.

One attempt goes on, or two while a node is suspected: then a second one runs elsewhere; where the
node is heard and only not reached, for an attempt that waits for its first word alone. When one of
the two ends, the other one is the main attempt from then on.
"""

from __future__ import annotations

from enum import Enum

from common.errors import PeerProtocolError
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.request import GenerationRequest, RequestOutput
from router.core.effects import (
    Effect,
    LegClosed,
    PlaceRecord,
    PromptComputed,
    PromptKept,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
)
from router.core.generation import TokenChunk
from router.core.token_ledger import TokenLedger


class State(Enum):
    """Where an attempt is; see the table in `router.core.request_flow`."""

    CHOOSING = "choosing"
    WAITING = "waiting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    LOCAL = "local"
    RUNNING = "running"
    DONE = "done"


class Attempt:
    """The legs and tokens of one attempt. Which node is asked, and when it ends, others decide."""

    def __init__(self, attempt_id: AttemptId, ledger: TokenLedger) -> None:
        self.id = attempt_id
        self.ledger = ledger
        self.state = State.CHOOSING
        self.decode: Incarnation | None = None
        self.prefill: Incarnation | None = None
        self.planned_prefill: Incarnation | None = None
        """The node to be asked next; its leg counts already."""
        self._has_lost_plan = False
        self._has_prompt = False
        """Whether the prompt counts as load of the decode node: it is being computed there."""
        self.ticket: object | None = None
        self._source: PrefixSource | None = None
        """The node, other than the decode node, that has most of the prompt cached."""
        self._num_cached_tokens = 0
        """Tokens of the prompt that are cached on the decode node that granted the ticket."""
        self.reason = ""
        self.layout = ""
        """The fingerprint of its nodes."""
        self.has_asked = False
        self.may_wait = False
        """Whether the decode node was asked to queue it."""
        self.asks_suspects = False
        """Whether suspected nodes may be asked: no other one is left."""
        self.asks_one = False
        """Whether its first refusal ends it, beside another one."""
        self._has_started = False
        self._is_placed = False

    @property
    def has_first_token(self) -> bool:
        """Whether the first token after those of earlier attempts is known."""
        return self.ledger.has(self.ledger.num_before)

    @property
    def has_drawn(self) -> bool:
        """Whether a token of it was passed on."""
        return self.ledger.num_emitted > self.ledger.num_before

    def is_on(self, node: Incarnation) -> bool:
        """Return whether a leg on this node is open."""
        return node in (self.decode, self.prefill)

    def waits_for(self, node: Incarnation) -> bool:
        """Return whether the node was asked and has answered neither with a reply nor tokens."""
        if self.state is State.RESERVING:
            return node == self.decode
        return self.state is State.PREFILLING and node == self.prefill and not self.has_first_token

    # Asking nodes.

    def reserve(
        self,
        decode: Incarnation,
        planned_prefill: Incarnation | None,
        request: GenerationRequest,
        *,
        may_wait: bool,
    ) -> Effect:
        """Ask a decode node; `planned_prefill` None: it computes the prompt itself."""
        assert self.planned_prefill is None, "its leg would be counted for ever"
        self.state, self.has_asked, self.may_wait = State.RESERVING, True, may_wait
        self.decode, self.planned_prefill = decode, planned_prefill
        self._has_lost_plan = False
        self._has_prompt = planned_prefill is None
        return SendReserve(decode, request, planned_prefill, may_wait, self._source)

    def send_prefill(self, prefill: Incarnation, request: GenerationRequest) -> list[Effect]:
        """Ask a prefill node, with the ticket if there is one."""
        self.state, self.has_asked = State.PREFILLING, True
        is_counted = prefill == self.planned_prefill
        effects = [] if is_counted else self.drop_plan()
        self.prefill, self.planned_prefill = prefill, None
        return [
            *effects,
            SendPrefill(prefill, request, self.ticket, is_counted, self._best_source()),
            self.place(),
        ]

    def take_ticket(self, ticket: object, num_cached_tokens: int) -> None:
        """Keep the decode node's ticket, and how many tokens of the prompt the node has cached."""
        self.ticket, self._num_cached_tokens = ticket, num_cached_tokens

    def choose_source(self, source: PrefixSource | None) -> None:
        """Set the node that has more of the prompt cached than the one that will compute it."""
        self._source = source

    def _best_source(self) -> PrefixSource | None:
        """Return the source with the most tokens: of two, the node with which KV travels anyway."""
        num_tokens = 0 if self._source is None else self._source.num_tokens
        if self.decode is not None and self._num_cached_tokens >= max(num_tokens, 1):
            source = PrefixSource(self.decode, self._num_cached_tokens)
            if self._source is None or self._source.node != self.decode:
                return source
            return source._replace(num_queued_tokens=self._source.num_queued_tokens)
        return self._source

    def compute_alone(self, decode: Incarnation) -> list[Effect]:
        """Let the decode node compute the prompt, whatever was planned."""
        self.state = State.LOCAL
        return [*self._keep_prompt(decode), self.place()]

    def _keep_prompt(self, decode: Incarnation) -> list[Effect]:
        """Count the prompt on the decode node, in place of the planned prefill node."""
        effects = self.drop_plan()
        if not self._has_prompt:
            self._has_prompt = True
            effects.append(PromptKept(decode))
        return effects

    @property
    def wants_prefill(self) -> bool:
        """Whether a prefill node was planned, although it may be lost since."""
        return self.planned_prefill is not None or self._has_lost_plan

    def on_lost(self, node: Incarnation) -> list[Effect]:
        """Give up the planned prefill node if that is lost: it counts there no more, even where it
        comes back before the decode node has answered."""
        if node != self.planned_prefill:
            return []
        self._has_lost_plan = True
        return self.drop_plan()

    def drop_plan(self) -> list[Effect]:
        """Give up the planned prefill node, if there is one."""
        planned, self.planned_prefill = self.planned_prefill, None
        return [] if planned is None else [LegClosed(planned, has_prompt=True)]

    def place(self) -> Effect:
        """Record where the attempt runs."""
        self._is_placed = True
        return PlaceRecord(self.id, self.decode, self.prefill, self.reason)

    # Tokens.

    def push(self, node: Incarnation, output: RequestOutput) -> TokenChunk | None:
        """Put the output into the ledger. Raises `PeerProtocolError` for what no node may send."""
        is_prefill, first = node == self.prefill, self.ledger.num_before
        if is_prefill and output.first_index + len(output.token_ids) > first + 1:
            raise PeerProtocolError(f"{node} sent more than token {first} of {output.id}")
        if is_prefill and output.details.finish_reason and not output.token_ids:
            raise PeerProtocolError(f"{node} ended {output.id} without token {first}")
        if self.ticket is not None:
            # A decode node fed by a prefill node owes the tokens after its first one.
            return self.ledger.push(output, first if is_prefill else first + 1)
        if is_prefill and output.token_ids and not output.details.finish_reason:
            raise PeerProtocolError(f"{node} did not end {output.id}, which is not handed off")
        return self.ledger.push(output, 0)

    def on_tokens(self, node: Incarnation, *, is_last: bool) -> list[Effect]:
        """Close the legs that are over with an output of this node."""
        effects: list[Effect] = []
        is_prefill = node == self.prefill
        if is_last:
            effects.append(self.close_leg(node))
        if not is_prefill:
            if self.planned_prefill is not None:  # the output overtook the node's reply
                is_over = is_last or self.has_first_token
                effects += self.drop_plan() if is_over else self._keep_prompt(node)
            effects += self._end_prompt(node)
            self._has_started = True
            self.state = State.RUNNING
        if self.prefill is not None and self._has_started and self.has_first_token:
            effects.append(self.close_leg(self.prefill))
        return effects

    def _end_prompt(self, decode: Incarnation) -> list[Effect]:
        """Stop counting the prompt on the decode node, which has computed it."""
        if not (self._has_prompt and self.has_first_token):
            return []
        self._has_prompt = False
        return [PromptComputed(decode)]

    # The end.

    def close_leg(self, node: Incarnation) -> Effect:
        """Close the leg: the node holds nothing of this attempt any more."""
        if node != self.decode:
            self.prefill = None
            return LegClosed(node, has_prompt=True)
        self.decode = None
        had_prompt, self._has_prompt = self._has_prompt, False
        return LegClosed(node, had_prompt)

    def end(self) -> list[Effect]:
        """Abort the attempt on every node with an open leg."""
        effects = self.drop_plan()
        for node in (self.decode, self.prefill):
            if node is not None:
                effects += (SendAbort(node, self.id), self.close_leg(node))
        if self._is_placed:
            self._is_placed = False
            effects.append(Unplace(self.id))
        return effects


class Attempts:
    """Begins and ends attempts. When that is due, its owner decides.

    Methods that end an attempt return the effects to perform, in order.
    """

    def __init__(self, choice_id: str, ledger: TokenLedger) -> None:
        self.main = self.newest = Attempt(AttemptId(choice_id, 1), ledger)
        self.second: Attempt | None = None
        self.suspects: dict[Incarnation, bool] = {}
        """Nodes that are suspected, but not lost yet, and whether each is heard."""
        self._aborted: set[tuple[Incarnation, AttemptId]] = set()
        self._layout_before = ""

    @property
    def is_done(self) -> bool:
        return self.main.state is State.DONE

    @property
    def layout(self) -> str:
        """The fingerprint of the nodes that drew the last token that was passed on."""
        return self.main.layout if self.main.has_drawn else self._layout_before

    def is_held_up(self, attempt: Attempt) -> bool:
        """Return whether a suspected node may hold it up: one that is silent, or is heard, was
        asked, and may not know it."""
        return any(
            attempt.waits_for(node) if is_heard else attempt.is_on(node)
            for node, is_heard in self.suspects.items()
        )

    @property
    def is_unanswered(self) -> bool:
        """Whether the main attempt waits for the first word of a suspected node: one whose step
        hangs may not say it for two minutes."""
        return any(self.main.waits_for(node) for node in self.suspects)

    def find(self, attempt_id: AttemptId) -> Attempt | None:
        """Return the attempt with this id, if it is one of those that go on."""
        main, second = self.main, self.second
        if main.id == attempt_id:
            return main
        return second if second is not None and second.id == attempt_id else None

    def on(self, node: Incarnation) -> list[Attempt]:
        """Return the attempts with an open leg on the node, the second one first."""
        return [one for one in reversed(self._all()) if one.is_on(node)]

    def beside(self, attempt: Attempt) -> Attempt | None:
        """Return the attempt beside this one."""
        return self.main if attempt is self.second else self.second

    def answer_late_grant(
        self, node: Incarnation, attempt_id: AttemptId, is_grant: bool
    ) -> list[Effect]:
        """Abort a grant that arrives after its abort was sent: the abort may have arrived first."""
        was_aborted = (node, attempt_id) in self._aborted
        return [SendAbort(node, attempt_id)] if is_grant and was_aborted else []

    def begin_second(self) -> Attempt:
        """Begin an attempt beside the main one, after the tokens that were emitted."""
        self.second = self._new()
        return self.second

    def restart(self) -> list[Effect]:
        """End the main attempt, and begin another one after the tokens that were emitted."""
        ending = self._end(self.main)
        self.main = self._new()
        return ending

    def drop(self, attempt: Attempt) -> list[Effect]:
        """End one of two attempts; the other one goes on alone."""
        ending = self._end(attempt)
        if attempt is self.main and self.second is not None:
            self.main = self.second
        self.second = None
        return ending

    def end(self) -> list[Effect]:
        """End all attempts."""
        ending = [effect for attempt in self._all() for effect in self._end(attempt)]
        self.second = None
        self.main.state = State.DONE
        return ending

    def on_lost(self, node: Incarnation) -> list[Effect]:
        """Give up what is planned on a node that is lost."""
        return [effect for attempt in self._all() for effect in attempt.on_lost(node)]

    def _all(self) -> tuple[Attempt, ...]:
        return (self.main,) if self.second is None else (self.main, self.second)

    def _new(self) -> Attempt:
        choice_id, number = self.newest.id
        self.newest = Attempt(AttemptId(choice_id, number + 1), self.main.ledger.continued())
        return self.newest

    def _end(self, attempt: Attempt) -> list[Effect]:
        if attempt.has_drawn:
            self._layout_before = attempt.layout
        ending = attempt.end()
        self._aborted |= {(e.node, e.attempt) for e in ending if isinstance(e, SendAbort)}
        return ending
