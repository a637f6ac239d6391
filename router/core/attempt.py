"""One attempt of a choice: the nodes that were asked, what is open there, and its tokens. No I/O.

A *leg* is one attempt on one node. It is open from the moment the node is asked until the node is
known to hold nothing: it refused, it finished, or (a prefill node) its KV was taken over.
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
        self.ticket: object | None = None
        self._source: PrefixSource | None = None
        """What holds most of the prompt, but for the decode node."""
        self._num_cached_tokens = 0
        """What the decode node that granted the ticket has cached of the prompt."""
        self.reason = ""
        self.has_asked = False
        self._has_started = False
        self._is_placed = False

    @property
    def has_first_token(self) -> bool:
        """Whether the first token after those of earlier attempts is known."""
        return self.ledger.has(self.ledger.num_before)

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
        self.state, self.has_asked = State.RESERVING, True
        self.decode, self.planned_prefill = decode, planned_prefill
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
        """Take what the decode node granted, which has cached so much of the prompt."""
        self.ticket, self._num_cached_tokens = ticket, num_cached_tokens

    def choose_source(self, source: PrefixSource | None) -> None:
        """Take which node has more of the prompt than the one that is to compute it."""
        self._source = source

    def _best_source(self) -> PrefixSource | None:
        """Return the source with the most tokens: of two, the node with which KV travels anyway."""
        num_tokens = 0 if self._source is None else self._source.num_tokens
        if self.decode is not None and self._num_cached_tokens >= max(num_tokens, 1):
            return PrefixSource(self.decode, self._num_cached_tokens)
        return self._source

    def drop_plan(self) -> list[Effect]:
        """Give up the planned prefill node, if there is one."""
        planned, self.planned_prefill = self.planned_prefill, None
        return [] if planned is None else [LegClosed(planned, is_prefill=True)]

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
            effects += self.drop_plan()
            self._has_started = True
            self.state = State.RUNNING
        if self.prefill is not None and self._has_started and self.has_first_token:
            effects.append(self.close_leg(self.prefill))
        return effects

    # The end.

    def close_leg(self, node: Incarnation) -> Effect:
        """Note that the node holds nothing of this attempt any more."""
        is_prefill = node != self.decode
        if is_prefill:
            self.prefill = None
        else:
            self.decode = None
        return LegClosed(node, is_prefill)

    def end(self) -> list[Effect]:
        """Abort what is open, on every node."""
        effects = self.drop_plan()
        for node in (self.decode, self.prefill):
            if node is not None:
                effects += (SendAbort(node, self.id), self.close_leg(node))
        if self._is_placed:
            self._is_placed = False
            effects.append(Unplace(self.id))
        return effects
