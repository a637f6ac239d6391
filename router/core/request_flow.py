"""One choice of one request, from the choice of nodes to its one outcome. No I/O, no clock.

    state       event                           next        effects beside the next state's own
    ----------  ------------------------------  ----------  ------------------------------------
    (new)       start                           CHOOSING    Choose
    CHOOSING    choice: decode (and prefill)    RESERVING   SendReserve (local: no prefill named)
                choice: prefill alone           PREFILLING  SendPrefill without ticket
                choice: prefill for a ticket    PREFILLING  SendPrefill with the ticket
                choice: none for a ticket       RESERVING   abort; new attempt, local, same node
                too long, and can be cut        CHOOSING    Choose, for what the longest node holds
                no choice, nodes may come       WAITING     Wait (see `router.core.candidates`)
                no choice                       DONE        Fail
    WAITING     a node can be chosen, or waited CHOOSING    Choose
    RESERVING   reply: ticket                   PREFILLING  SendPrefill, PlaceRecord
                reply: local start              LOCAL       PlaceRecord, Accepted
                reply: refusal                  CHOOSING    Choose, this node excluded
                all refused for want of room    CHOOSING    Choose, to wait in a node's queue
                none of them queues it either   CHOOSING    Choose, also of suspected nodes
                its output comes first          RUNNING     as in RUNNING
    PREFILLING  reply: acceptance               PREFILLING  Accepted
                reply: refusal                  CHOOSING    Choose, this node excluded
                token 0                         PREFILLING  TokenChunk
                token 0 ends the answer         DONE        TokenChunk, abort decode, Finish
                decode started                  RUNNING     the prefill leg is over with token 0
    LOCAL       output                          RUNNING     TokenChunk
    RUNNING     output                          RUNNING     TokenChunk
                last token                      DONE        TokenChunk, Finish
    any         a leg fails or its node is      CHOOSING    abort; new attempt, node excluded
                lost or drained
                too many nodes were lost        WAITING     the same; no other node is asked
                a node of it is silent          (same)      a second attempt beside it: Choose
                a leg breaks the protocol or    DONE        abort, Fail
                its pool, tokens emitted
                deadline, error, client gone    DONE        abort, Fail or Finish(ABORT)

`Accepted` is emitted once for all attempts, when the first node takes the prompt to compute it. A
decode node's ticket does not cause it: every prefill node may refuse the ticket.

The attempts and their legs are in `router.core.attempts`, and what is done on an event in
`.flow_actions`. Every attempt that ends sends `SendAbort` for each open leg, and a grant that
arrives for a closed attempt is answered with one more. A ticket goes to a second prefill node only
when the first refused it explicitly: after a failed call it is unknown whether the first one
writes, so that attempt is over.

While a node of the attempt is suspected, a second attempt runs on other nodes; if there are none,
it begins when one appears or begins to decode. It has the same states, but never waits, and its
failures end it alone: another one begins after a while, as long as the node is suspected, and asks
one node, which may have refused the one before. A full node is asked to queue it only while the
first attempt has had no reply or output. Of the two, the first that sends the next token continues,
and the other one is aborted. When the first attempt fails, the second takes its place.

An attempt that begins after n tokens were emitted continues after them: its nodes get them with
the prompt, compute both and draw token n where a new request draws token 0. The client reads the
same tokens as without a failure, because each depends on those before it, the seed and its index
alone, and on what the fingerprint covers: weights and arithmetic. So nodes with the fingerprint of
those before come first, and others take the answer where none of these can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import (
    DeadlineExceeded,
    Draining,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    PoolExhausted,
    StaleEpoch,
    error_from_code,
)
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.request import FinishReason, RequestOutput
from router.core.attempts import Attempt, State
from router.core.candidates import NodeAway
from router.core.effects import Effect, Finish
from router.core.flow_actions import FlowActions
from router.core.generation import TokenChunk
from router.core.policies.query import TooLong

NO_SUSPECTS: Mapping[Incarnation, bool] = {}
_RUNNING = State.RUNNING


@dataclass(frozen=True, slots=True)
class DecodeGrant:
    """A decode node's grant. `ticket` None: the node computes the prompt itself."""

    ticket: object | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillGrant:
    """A prefill node's acceptance."""


class RequestFlow(FlowActions):
    """The state machine. Each `on_…` returns the effects to perform, in order."""

    # Read by the shell.

    @property
    def state(self) -> State:
        """Where the first of the attempts in progress is."""
        return self._main.state

    @property
    def is_done(self) -> bool:
        return self._attempts.is_done

    @property
    def attempt(self) -> AttemptId:
        """The attempt that was begun last."""
        return self._attempts.newest.id

    @property
    def answering_attempt(self) -> AttemptId:
        """The attempt whose tokens are passed on: the first of those in progress."""
        return self._main.id

    @property
    def num_output_tokens(self) -> int:
        """The tokens of the answer that were passed on so far, over all attempts."""
        return self._main.ledger.num_emitted

    @property
    def max_tokens(self) -> int:
        """The most tokens of the answer of the attempt that nodes are being chosen for."""
        return (self._choosing or self._main).ledger.max_tokens

    @property
    def failure(self) -> PdserveError | None:
        """What ended the attempt before the current one, if there was one."""
        return self._candidates.failure

    @property
    def decode(self) -> Incarnation | None:
        """The decode or mixed node that holds, or was asked to hold, the current attempt."""
        return self._main.decode

    @property
    def prefill(self) -> Incarnation | None:
        """The prefill node of the current attempt, until its KV was taken over."""
        return self._main.prefill

    @property
    def has_first_token(self) -> bool:
        """Whether the first token of the attempt is known."""
        return self._main.has_first_token

    def pair(self, attempt_id: AttemptId) -> tuple[Incarnation, Incarnation] | None:
        """Return the prefill and the decode node of an attempt, while both hold some of it."""
        attempt = self._attempts.find(attempt_id)
        if attempt is None or attempt.prefill is None or attempt.decode is None:
            return None
        return attempt.prefill, attempt.decode

    # Events.

    def start(self, suspects: Mapping[Incarnation, bool] = NO_SUSPECTS) -> list[Effect]:
        """Begin the first attempt.

        `suspects` are the nodes that are suspected now, and whether each is heard; later changes
        come through `on_node_suspected`.
        """
        self._attempts.suspects.update(suspects)
        self._choose(self._main)
        return self._take_effects()

    def on_choice(
        self,
        decode: Incarnation | None,
        prefill: Incarnation | None,
        reason: str,
        now_s: float,
        source: PrefixSource | None = None,
        layout: str = "",
    ) -> list[Effect]:
        """Ask the chosen nodes; `source` is another node that has more of the prompt cached, and
        `layout` the fingerprint of the chosen ones."""
        attempt, self._choosing = self._choosing, None
        if attempt is None:
            return []
        attempt.choose_source(source)
        attempt.layout = layout or attempt.layout
        if attempt.ticket is None:
            attempt.reason = reason
            if decode is not None:
                self._send_reserve(attempt, decode, prefill, now_s)
                self._wait_beside()
            elif prefill is not None:
                self._send_prefill(attempt, prefill, now_s)
            else:
                self._fail(InternalError("a choice of nodes named none"))
        elif prefill is not None:
            self._send_prefill(attempt, prefill, now_s)
        else:
            self._fall_back_to_local(attempt, now_s)
        return self._take_effects()

    def on_no_choice(self, error: PdserveError) -> list[Effect]:
        """Handle that no node could be chosen: ask others, wait, or fail."""
        attempt, self._choosing = self._choosing, None
        if attempt is None:
            return []
        if isinstance(error, TooLong):
            asks_again = self._is_cut(attempt, error.longest)
        else:
            asks_again = isinstance(error, Overloaded) and self._asks_others(attempt)
        if asks_again:
            self._choose(attempt)
        else:
            self._wait_or_fail(attempt, error)
        return self._take_effects()

    def on_waited(self) -> list[Effect]:
        """Ask for nodes again: the time of `Wait` has passed. Where an attempt is held up by a
        suspected node, and alone, others are asked beside it."""
        if self.state is State.WAITING:
            self._candidates.on_waited()
            self._choose_again()
        elif self._attempts.second is None and self._attempts.is_held_up(self._main):
            self._ask_beside_again()
        return self._take_effects()

    def on_reserve_reply(
        self,
        node: Incarnation,
        attempt_id: AttemptId,
        reply: DecodeGrant | PdserveError,
        now_s: float,
    ) -> list[Effect]:
        """Handle a decode node's grant or refusal."""
        attempt = self._attempts.find(attempt_id)
        if attempt is None or node != attempt.decode:
            return self._attempts.answer_late_grant(
                node, attempt_id, isinstance(reply, DecodeGrant)
            )
        if attempt.state is not State.RESERVING:
            # The outputs of the node overtook its reply: the choice runs already.
            if isinstance(reply, DecodeGrant):
                attempt.ledger.note_cached(reply.num_cached_tokens)
            self._out.append(attempt.place())
            self._accept()
        elif isinstance(reply, PdserveError):
            self._on_refusal(attempt, node, reply)
        elif reply.ticket is None:
            attempt.ledger.note_cached(reply.num_cached_tokens)
            self._out += attempt.compute_alone(node)
            self._accept()
        elif not attempt.wants_prefill:
            wrong = PeerProtocolError(f"{node} answered a local prefill with a ticket")
            self._attempt_failed(attempt, wrong, node)
        else:
            attempt.ledger.note_cached(reply.num_cached_tokens)
            attempt.take_ticket(reply.ticket, reply.num_cached_tokens)
            avoided = self._candidates.excluded.union(self._attempts.suspects)
            if attempt.planned_prefill is None or attempt.planned_prefill in avoided:
                self._choose(attempt)
            else:
                self._send_prefill(attempt, attempt.planned_prefill, now_s)
        return self._take_effects()

    def on_prefill_reply(
        self, node: Incarnation, attempt_id: AttemptId, reply: PrefillGrant | PdserveError
    ) -> list[Effect]:
        """Handle a prefill node's acceptance or refusal."""
        attempt = self._attempts.find(attempt_id)
        if attempt is None or node != attempt.prefill:
            return self._attempts.answer_late_grant(
                node, attempt_id, isinstance(reply, PrefillGrant)
            )
        if isinstance(reply, PrefillGrant):
            self._accept()
        elif attempt.state is State.PREFILLING:
            self._on_refusal(attempt, node, reply)
        return self._take_effects()

    def on_call_failed(
        self, node: Incarnation, attempt_id: AttemptId, error: PdserveError
    ) -> list[Effect]:
        """Handle a call without a reply: only `error` tells what the node may have done."""
        attempt = self._attempts.find(attempt_id)
        if attempt is None or not attempt.waits_for(node):
            return []
        if isinstance(error, (InvalidRequest, Overloaded, StaleEpoch)):
            self._on_refusal(attempt, node, error)
        elif isinstance(error, DeadlineExceeded):
            self._fail(error)
        else:
            self._attempt_failed(attempt, error, node)
        return self._take_effects()

    def next_tokens(self, node: Incarnation, output: RequestOutput) -> TokenChunk | None:
        """Return the chunk of an output that only continues a running answer, as almost all do.

        None, with nothing changed, for any other output: `on_output` handles it.
        """
        attempts = self._attempts
        attempt = attempts.main
        if (
            attempt.state is _RUNNING
            and attempt.id == output.id
            and attempt.decode == node
            and attempt.prefill is None
            and attempts.second is None
        ):
            return attempt.ledger.take_next(output)
        return None

    def on_output(self, node: Incarnation, output: RequestOutput) -> list[Effect]:
        """Handle an output of a node: tokens, the start, the end or a failure."""
        attempt = self._attempts.find(output.id)
        if attempt is None or not attempt.is_on(node):
            return []
        reason = output.details.finish_reason
        if reason is FinishReason.ERROR:
            self._on_error_output(attempt, node, output)
        elif reason is FinishReason.ABORT:
            self._out.append(attempt.close_leg(node))
            self._attempt_failed(attempt, NodeLost(f"{node} aborted {output.id}"), node)
        else:
            try:
                chunk = attempt.push(node, output)
            except PeerProtocolError as wrong:
                self._attempt_failed(attempt, wrong, node)
                return self._take_effects()
            self._out += attempt.on_tokens(node, is_last=reason is not None)
            if chunk is not None:
                self._emit(attempt, chunk)
        return self._take_effects()

    def on_node_lost(self, node: Incarnation, is_orderly: bool = False) -> list[Effect]:
        """Handle the loss of a node: its stream broke, or it was silent for too long.

        `is_orderly`: the node has ended the stream, as one that leaves does.
        """
        self._attempts.suspects.pop(node, None)
        self._out += self._attempts.on_lost(node)
        lost = NodeLost(f"{node} was lost")
        if is_orderly:
            lost = NodeAway(f"{node} ended the stream")
        for attempt in self._attempts.on(node):
            self._attempt_failed(attempt, lost, node)
        return self._take_effects()

    def on_node_suspected(self, node: Incarnation, is_heard: bool = False) -> list[Effect]:
        """Begin a second attempt elsewhere: a node of this one is silent but not lost yet, or its
        stream works (`is_heard`) and requests do not reach it."""
        if self.is_done:
            return []
        attempts = self._attempts
        attempts.suspects[node] = is_heard
        if attempts.second is not None and attempts.is_held_up(attempts.second):
            self._drop(attempts.second)
        if attempts.second is None and attempts.is_held_up(attempts.main):
            self._choose(attempts.begin_second())
        return self._take_effects()

    def on_node_trusted(self, node: Incarnation) -> list[Effect]:
        """Handle that a node can be chosen: it was heard for the first time, or again.

        A second attempt that computes already goes on until either one sends the next token.
        """
        if self.is_done:
            return []
        self._attempts.suspects.pop(node, None)
        self._candidates.on_heard(node)
        second = self._attempts.second
        if self.state is State.WAITING or self._attempts.is_held_up(self._main):
            self._ask_new_node()
        elif second is not None and second.state is State.RESERVING:
            self._drop(second)
        return self._take_effects()

    def on_node_decodes(self, node: Incarnation) -> list[Effect]:
        """Handle that a prefill node has become one that decodes."""
        if self.is_done:
            return []
        self._candidates.on_moved(node)
        self._ask_new_node()
        return self._take_effects()

    def on_client_gone(self) -> list[Effect]:
        """End the request: its client has left."""
        if not self.is_done:
            self._end(Finish(FinishReason.ABORT))
        return self._take_effects()

    def on_failure(self, error: PdserveError) -> list[Effect]:
        """End the request with `error`: the router stops, or met a bug."""
        if not self.is_done:
            self._fail(error)
        return self._take_effects()

    def on_time(self, now_s: float) -> list[Effect]:
        """Check the deadline."""
        if not self.is_done and now_s >= self._deadline_at_s:
            late = f"the deadline of {self.attempt.choice_id} passed"
            if self.state is State.WAITING:
                late = f"{late} while no node could take it; {self.failure or 'none was known'}"
            self._fail(DeadlineExceeded(late))
        return self._take_effects()

    # Tokens.

    def _emit(self, attempt: Attempt, chunk: TokenChunk) -> None:
        """Pass on tokens. Of two attempts the first that sends the next token goes on alone."""
        self._is_accepted = True
        self._out.append(chunk)
        other = self._attempts.beside(attempt)
        if other is not None:
            self._drop(other)
        if chunk.finish_reason is not None:
            self._end(Finish(chunk.finish_reason))

    def _on_error_output(self, attempt: Attempt, node: Incarnation, output: RequestOutput) -> None:
        # In a handoff either side may report the failure. Without this prefill node the next
        # attempt gets another pair, or the same decode node alone.
        suspect = node if attempt.prefill is None else attempt.prefill
        self._out.append(attempt.close_leg(node))
        error = error_from_code(output.details.error_code, output.details.error_message)
        # `Overloaded`: the node has no room for the request's grammar, after it took the prompt.
        if isinstance(error, (Draining, Overloaded, PoolExhausted)):
            self._attempt_failed(attempt, error, node)
        elif isinstance(error, (NodeLost, HandoffFailed, StaleEpoch)):
            self._attempt_failed(attempt, error, suspect)
        else:
            self._give_up(attempt, error)
