"""A model cluster around one request flow: every message is held until the test delivers it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.errors import NodeLost, Overloaded, PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import FinishReason, RequestOutput, SamplingParams
from router.core.effects import (
    Accepted,
    Choose,
    Effect,
    Fail,
    Finish,
    LegClosed,
    PlaceRecord,
    PromptComputed,
    PromptKept,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
    Wait,
)
from router.core.generation import TokenChunk
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow
from tests.support.nodes.node_outputs import node_output

PREFILL_NODES = tuple(Incarnation(f"p{i}", 1) for i in range(2))
DECODE_NODES = tuple(Incarnation(f"d{i}", 1) for i in range(2))
DEADLINE_S = 100.0

Leg = tuple[Incarnation, AttemptId]


def token_at(index: int) -> int:
    """The true answer: the same on every node and in every attempt."""
    return 1000 + index


@dataclass
class ModelCluster:
    """Performs effects on model nodes and keeps books of what must hold.

    `answer_length` tokens are the true answer. Outputs wait per node in `outbox`, in order; each
    carries up to `step_size` tokens, of which all but one were drafts, and one more was rejected.
    """

    answer_length: int
    max_tokens: int
    step_size: int = 1
    flow: RequestFlow = field(init=False)
    now_s: float = 0.0
    lost: set[Incarnation] = field(default_factory=set)
    reserves: list[SendReserve] = field(default_factory=list)
    prefills: list[SendPrefill] = field(default_factory=list)
    outbox: dict[Leg, list[RequestOutput]] = field(default_factory=dict)
    delivered: list[tuple[Incarnation, RequestOutput]] = field(default_factory=list)
    asked: set[Leg] = field(default_factory=set)
    aborted: set[Leg] = field(default_factory=set)
    finished: set[Leg] = field(default_factory=set)
    num_open: Counter[Incarnation] = field(default_factory=Counter)
    num_prompts: Counter[Incarnation] = field(default_factory=Counter)
    """Those that count on each node."""
    placed: set[AttemptId] = field(default_factory=set)
    emitted: list[int] = field(default_factory=list)
    outcomes: list[Finish | Fail] = field(default_factory=list)
    decode_of: dict[AttemptId, Incarnation] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    is_waiting: bool = False
    is_accepted: bool = False
    begins: dict[AttemptId, int] = field(default_factory=dict)
    """The index of the first token of attempts that a prefill node was asked for."""

    def __post_init__(self) -> None:
        sampling = SamplingParams(max_tokens=self.max_tokens)
        self.flow = RequestFlow("req", PromptBlocks((1, 2, 3)), sampling, deadline_at_s=DEADLINE_S)
        self.perform(self.flow.start())

    # What the flow wants.

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.outcomes or isinstance(effect, SendAbort), f"{effect} after the end"
            match effect:
                case Choose():
                    self._choose(effect)
                case Wait():
                    self.is_waiting = True
                case SendReserve():
                    self.reserves.append(effect)
                    assert list(effect.request.output_token_ids) == self.emitted
                    leg = (effect.node, effect.request.id)
                    if effect.may_wait and leg in self.finished:
                        self.finished.remove(leg)
                        self.asked.remove(leg)
                    self._open(leg)
                    if effect.prefill is not None:
                        self.num_open[effect.prefill] += 1
                    self.num_prompts[effect.prefill or effect.node] += 1
                    self.decode_of[effect.request.id] = effect.node
                case SendPrefill():
                    self.prefills.append(effect)
                    assert list(effect.request.output_token_ids) == self.emitted
                    self._open((effect.node, effect.request.id))
                    self.num_open[effect.node] -= effect.is_counted
                    self.num_prompts[effect.node] += not effect.is_counted
                case SendAbort():
                    assert (effect.node, effect.attempt) in self.asked
                    self.aborted.add((effect.node, effect.attempt))
                case LegClosed():
                    self.num_open[effect.node] -= 1
                    self.num_prompts[effect.node] -= effect.has_prompt
                    assert 0 <= self.num_prompts[effect.node] <= self.num_open[effect.node]
                case PromptKept():
                    self.num_prompts[effect.node] += 1
                    assert self.num_prompts[effect.node] <= self.num_open[effect.node]
                case PromptComputed():
                    self.num_prompts[effect.node] -= 1
                    assert self.num_prompts[effect.node] >= 0
                case Accepted():
                    assert not self.is_accepted, "said twice"
                    assert not self.emitted, "the tokens said it before"
                    self.is_accepted = True
                case PlaceRecord():
                    self.placed.add(effect.attempt)
                case Unplace():
                    self.placed.remove(effect.attempt)
                case TokenChunk():
                    chunk = effect
                    assert chunk.first_index == len(self.emitted)
                    self.emitted += chunk.token_ids
                    if chunk.counts is not None:
                        _, num_drafted, num_accepted = chunk.counts
                        assert num_drafted >= self.num_drafted, "drafts are counted on"
                        assert num_accepted >= self.num_accepted
                        self.num_drafted, self.num_accepted = num_drafted, num_accepted
                case Finish() | Fail():
                    self.outcomes.append(effect)

    def _open(self, leg: Leg) -> None:
        assert leg not in self.asked, "once per attempt, and once more to let it wait"
        self.asked.add(leg)
        self.num_open[leg[0]] += 1

    def _choose(self, effect: Choose) -> None:
        gone = effect.excluded | self.lost
        prefill = next((node for node in PREFILL_NODES if node not in gone), None)
        decode = effect.decode
        if decode is None:
            if self.max_tokens == 1 and prefill is not None:
                self.perform(self.flow.on_choice(None, prefill, "one token", self.now_s))
                return
            decode = next((node for node in DECODE_NODES if node not in gone), None)
        if decode is None:
            self.perform(self.flow.on_no_choice(Overloaded("nobody", retry_after_s=9.0)))
        else:
            self.perform(self.flow.on_choice(decode, prefill, "first free", self.now_s))

    # What the world does.

    def answer_reserve(self, reserve: SendReserve, refusal: PdserveError | None = None) -> None:
        self.reserves.remove(reserve)
        leg = (reserve.node, reserve.request.id)
        reply: DecodeGrant | PdserveError
        if refusal is not None:
            self.finished.add(leg)
            reply = refusal
        elif reserve.must_prefill_locally:
            num_before = len(reserve.request.output_token_ids)
            indices = range(num_before, self.answer_length)
            self.outbox[leg] = self._outputs(reserve.request.id, indices)
            reply = DecodeGrant(None, 0)
        else:
            reply = DecodeGrant(f"ticket of {leg[1]}", 0)
        was_aborted = leg in self.aborted
        effects = self.flow.on_reserve_reply(leg[0], leg[1], reply, self.now_s)
        if was_aborted and refusal is None:
            assert SendAbort(*leg) in effects, "a late grant is given back"
        self.perform(effects)
        if reserve.must_prefill_locally:
            self._check_accepted(leg, refusal)

    def answer_prefill(self, prefill: SendPrefill, refusal: PdserveError | None = None) -> None:
        self.prefills.remove(prefill)
        leg = (prefill.node, prefill.request.id)
        num_before = len(prefill.request.output_token_ids)
        self.begins[leg[1]] = num_before
        if refusal is not None:
            self.finished.add(leg)
        elif prefill.ticket is None or self.answer_length == num_before + 1:
            self.outbox[leg] = self._outputs(leg[1], range(num_before, num_before + 1))
        else:
            assert prefill.ticket == f"ticket of {leg[1]}"
            first = node_output(
                attempt=leg[1], first_index=num_before, token_ids=(token_at(num_before),)
            )
            self.outbox[leg] = [first]
            decode_leg = (self.decode_of[leg[1]], leg[1])
            started = node_output(attempt=leg[1], is_started=True)
            self.outbox[decode_leg] = [
                started,
                *self._outputs(leg[1], range(num_before + 1, self.answer_length)),
            ]
        self.perform(self.flow.on_prefill_reply(leg[0], leg[1], refusal or PrefillGrant()))
        self._check_accepted(leg, refusal)

    def _check_accepted(self, leg: Leg, refusal: PdserveError | None) -> None:
        if refusal is None and leg not in self.aborted:
            assert self.is_accepted or self.emitted, "it computes the prompt"

    def fail_call(self, call: SendReserve | SendPrefill, error: PdserveError) -> None:
        if isinstance(call, SendReserve):
            self.reserves.remove(call)
        else:
            self.prefills.remove(call)
        self.perform(self.flow.on_call_failed(call.node, call.request.id, error))

    def deliver(self, leg: Leg) -> None:
        output = self.outbox[leg].pop(0)
        if not self.outbox[leg]:
            del self.outbox[leg]
        if output.details.finish_reason is not None:
            self.finished.add(leg)
        self.delivered.append((leg[0], output))
        self._note_takeover(leg[1])
        self._take(leg[0], output)

    def deliver_again(self, index: int) -> None:
        self._take(*self.delivered[index])

    def _take(self, node: Incarnation, output: RequestOutput) -> None:
        """Take an output as a dispatcher does."""
        chunk = self.flow.next_tokens(node, output)
        self.perform(self.flow.on_output(node, output) if chunk is None else [chunk])

    def lose(self, node: Incarnation) -> None:
        self.lost.add(node)
        for leg in [leg for leg in self.outbox if leg[0] == node]:
            del self.outbox[leg]
        self.perform(self.flow.on_node_lost(node))
        calls: list[SendReserve | SendPrefill] = [*self.reserves, *self.prefills]
        for call in calls:
            if call.node == node:
                self.fail_call(call, NodeLost("connection lost"))

    def suspect(self, node: Incarnation, is_heard: bool) -> None:
        """It is silent, or heard and not reached; what it holds is unknown."""
        self.perform(self.flow.on_node_suspected(node, is_heard))

    def trust(self, node: Incarnation) -> None:
        self.perform(self.flow.on_node_trusted(node))

    def come_back(self, node: Incarnation) -> None:
        """A lost node is heard again: it holds nothing."""
        self.lost.remove(node)
        self.perform(self.flow.on_node_trusted(node))

    def wait(self) -> None:
        self.is_waiting = False
        self.perform(self.flow.on_waited())

    def _note_takeover(self, attempt: AttemptId) -> None:
        # A prefill node holds nothing more once decode runs and token 0 is there.
        seen = [output for _, output in self.delivered if output.id == attempt]
        first = (token_at(self.begins.get(attempt, 0)),)
        if any(o.is_started for o in seen) and any(o.token_ids[:1] == first for o in seen):
            decode = self.decode_of[attempt]
            self.finished |= {leg for leg in self.asked if leg[1] == attempt and leg[0] != decode}

    def _outputs(self, attempt: AttemptId, indices: range) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        num_accepted = 0
        for first in range(indices.start, indices.stop, self.step_size):
            step = range(first, min(first + self.step_size, indices.stop))
            is_last = step[-1] == self.answer_length - 1
            is_full = step[-1] == self.max_tokens - 1
            reason = FinishReason.LENGTH if is_full else FinishReason.STOP if is_last else None
            num_accepted += len(step) - 1
            outputs.append(
                node_output(
                    attempt=attempt,
                    first_index=first,
                    token_ids=tuple(token_at(index) for index in step),
                    num_drafted=num_accepted + len(outputs) + 1,
                    num_accepted=num_accepted,
                    finish_reason=reason,
                )
            )
        return outputs

    # What must hold.

    def check(self) -> None:
        assert self.emitted == [token_at(index) for index in range(len(self.emitted))]
        assert len(self.emitted) <= self.answer_length
        assert len(self.outcomes) <= 1
        assert self.flow.is_done == bool(self.outcomes)
        assert self.num_accepted <= self.num_drafted

    def check_end(self) -> None:
        self.check()
        (outcome,) = self.outcomes
        if isinstance(outcome, Finish) and outcome.reason is not FinishReason.ABORT:
            assert len(self.emitted) == self.answer_length
            assert self.num_accepted < self.answer_length, "more drafts accepted than tokens came"
        assert self.asked <= self.aborted | self.finished, "a leg was neither aborted nor over"
        assert not +self.num_open
        assert not +self.num_prompts
        assert not self.placed
