"""A random workload on a scheduler and a hash runner, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from common.grammar import Grammar
from common.kv.blocks import blocks_for
from common.prompt_logprobs import PromptLogprobs
from common.request import MAX_STOP_TOKEN_IDS
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep
from engine.core.step.step_results import StepOutput
from tests.support.engine.build import (
    Engine,
    check_books,
    check_idle,
    make_prompt,
    make_request,
    num_late_copies,
)
from tests.support.engine.hash_runner import expected_prompt_logprobs, expected_tokens

STOP_TOKEN_IDS = tuple(range(0, 16 * MAX_STOP_TOKEN_IDS, 16))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, of what kind it is, and when it is aborted, if it is.

    A `remote` one's KV lands `delay` steps after its reservation; an `exported` one's transfer
    ends `delay` steps after its token. With `min_tokens`, many tokens are stop tokens.
    """

    at_step: int
    family: int
    length: int
    max_tokens: int
    seed: int
    kind: str = "local"
    delay: int = 0
    abort_after: int | None = None
    priority: int = 0
    min_tokens: int = 0
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None


@dataclass(slots=True)
class _Live:
    arrival: Arrival
    sequence: Sequence
    waited: int = 0
    is_aborted: bool = False


@dataclass(slots=True)
class Run:
    """One workload on one engine."""

    engine: Engine
    arrivals: list[Arrival]
    live: list[_Live] = field(default_factory=list)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    num_steps: int = 0

    def to_the_end(self) -> list[list[int]]:
        """Every output, in order of `arrivals`; an aborted one is a prefix of its answer."""
        tokens = sum(a.length + a.max_tokens for a in self.arrivals)
        last = max((a.at_step for a in self.arrivals), default=0)
        polls = 1 + self.engine.runner.num_copy_polls
        most = 50 + last + sum(a.delay for a in self.arrivals)
        most += polls * tokens * (1 + len(self.arrivals))
        while self.num_steps <= last or self._is_busy():
            assert self.num_steps < most, "the engine stalls"
            self._one_step()
        check_idle(self.engine.scheduler)
        return [self.engine.outputs.get(live.sequence.sequence_id, []) for live in self.live]

    def _is_busy(self) -> bool:
        scheduler = self.engine.scheduler
        queues = (scheduler.waiting, scheduler.running, scheduler.receiving, scheduler.exporting)
        return any((*queues, scheduler.quarantined, num_late_copies(scheduler)))

    def _one_step(self) -> None:
        for arrival in self.arrivals:
            if arrival.at_step == self.num_steps:
                self._arrive(arrival)
        for live in self.live:
            self._move_kv(live)
        self._abort_due()
        scheduler = self.engine.scheduler
        others = (scheduler.running, scheduler.receiving, scheduler.exporting)
        is_alone = not any((*others, scheduler.quarantined, num_late_copies(scheduler)))
        could_work = is_alone and bool(scheduler.waiting)
        ratio = scheduler.reservation.ratio
        waiting = list(scheduler.waiting)
        step = self.engine.plan()
        is_work = bool(step.batch or step.reserved or step.swap_copies)
        assert not could_work or is_work, "an idle engine admits nobody"
        assert not step.starved, "a pool that holds the longest sequence starves nobody"
        self._check_victims(step, self.engine.were_decoding, ratio)
        self._check_plan(step, waiting)
        self._check_outputs(self.engine.apply(step))
        self.num_steps += 1

    def _arrive(self, arrival: Arrival) -> None:
        request = make_request(
            make_prompt(arrival.length, arrival.family),
            name=f"r{len(self.live)}",
            seed=arrival.seed,
            max_tokens=arrival.max_tokens,
            min_tokens=arrival.min_tokens,
            stop_token_ids=STOP_TOKEN_IDS if arrival.min_tokens else (),
            grammar=arrival.grammar,
            prompt_logprobs=arrival.prompt_logprobs,
            temperature=1.0,
            priority=arrival.priority,
        )
        sequence = self.engine.add(
            request,
            has_remote_kv=arrival.kind == "remote",
            is_exported=arrival.kind == "exported",
        )
        self.live.append(_Live(arrival, sequence))

    def _move_kv(self, live: _Live) -> None:
        scheduler, sequence = self.engine.scheduler, live.sequence
        is_quarantined = sequence.sequence_id in scheduler.quarantined
        if any(swap.sequence is sequence for swap in self.engine.swaps_under_way):
            return  # its quarantine ends with the copy
        if not is_quarantined and sequence.status not in (
            SequenceStatus.WAITING_FOR_KV,
            SequenceStatus.EXPORTING,
        ):
            return
        live.waited += 1
        if live.waited <= live.arrival.delay:
            return
        if is_quarantined:
            scheduler.end_quarantine(sequence)
        elif sequence.status is SequenceStatus.EXPORTING:
            scheduler.release(sequence)
        else:
            self.engine.land(sequence)
        check_books(scheduler)

    def _abort_due(self) -> None:
        scheduler = self.engine.scheduler
        for live in self.live:
            after, sequence = live.arrival.abort_after, live.sequence
            is_due = after is not None and self.num_steps >= live.arrival.at_step + after
            if not is_due or sequence.status is SequenceStatus.FINISHED:
                continue
            live.is_aborted = True
            if sequence.status is SequenceStatus.EXPORTING:
                scheduler.release(sequence)
            else:
                scheduler.finish(sequence)
            check_books(scheduler)

    def _check_plan(self, step: PlannedStep, waiting: Items[Sequence]) -> None:
        scheduler, limits = self.engine.scheduler, self.engine.scheduler.limits
        num_tokens = sum(len(scheduled.token_ids) for scheduled in step.batch)
        assert num_tokens <= limits.max_num_batched_tokens, "the budget is exceeded"
        assert len(step.batch) == len({s.sequence_id for s in step.batch})
        assert num_tokens == scheduler.statistics().counters.last_step_tokens
        for scheduled, sequence in zip(step.batch, step.sequences, strict=True):
            assert scheduled.num_drafts <= limits.num_speculative_tokens
            assert scheduled.num_drafts < max(sequence.max_new_tokens - sequence.num_output, 1)
            end = scheduled.start + len(scheduled.token_ids)
            assert end <= len(scheduled.block_table) * limits.block_size, "a slot without a block"
            assert end <= limits.max_model_len
        # A plan that was made ahead does not know which sequences their tokens would end.
        if scheduler.waiting and not step.num_preempted and not self.engine.was_ahead:
            head = next(iter(scheduler.waiting))
            # The one that waited longest may have come to the front by the admissions of this plan.
            if head is next((one for one in waiting if one in scheduler.waiting), None):
                self._check_head(head, num_tokens)

    def _check_victims(self, step: PlannedStep, decoding: set[int], ratio: float) -> None:
        """Victims were decoding, another goes on or takes their place; the ratio does not fall."""
        scheduler = self.engine.scheduler
        preempted = {
            s.sequence_id for s in scheduler.waiting if s.status is SequenceStatus.PREEMPTED
        }
        victims = preempted & decoding
        assert len(victims) == step.num_preempted, "a victim was not decoding"
        if victims:
            # Who takes their place waits until their blocks are copied out.
            is_copying = step.stopped_by is StopRule.COPYING
            goes_on = decoding - victims or step.sequences or step.reserved or is_copying
            assert goes_on, "no one is left"
            assert scheduler.reservation.ratio >= ratio
            assert not victims & {s.sequence_id for s in step.sequences}, "planned and preempted"

    def _check_head(self, head: Sequence, num_tokens: int) -> None:
        """Without a reservation, a seat is left empty only when the head does not fit."""
        scheduler, limits = self.engine.scheduler, self.engine.scheduler.limits
        has_tokens = head.has_remote_kv or num_tokens < limits.max_num_batched_tokens
        is_free = self.engine.config.reservation_policy == "none"
        if not is_free or head.status is SequenceStatus.PREEMPTED:
            return
        if scheduler.num_free_seats <= 0 or not has_tokens or limits.chunk_granularity > 1:
            return
        if head.sequence_id in scheduler.kept_prefixes.awaiting:
            return
        most = scheduler.num_cached_tokens(head) // limits.block_size
        cached = scheduler.pool.prefix_cache.match(head.block_hashes[:most])
        num_cached = len(cached)
        claimed = sum(scheduler.pool.is_evictable(block) for block in cached)
        if head.num_bypassed:  # by one that begins alike and claimed them after the head was tried
            claimed = num_cached
        known = min(head.num_known + limits.tokens_per_seq, limits.max_model_len)
        needed = blocks_for(known, limits.block_size) - num_cached + claimed
        assert needed > scheduler.pool.num_available, "a seat is free and the head would fit"

    def _check_outputs(self, outputs: Items[StepOutput]) -> None:
        for output in outputs:
            sequence = output.sequence
            tokens = self.engine.outputs[sequence.sequence_id]
            assert output.first_index == len(tokens) - len(output.token_ids)
            if sequence.is_exported:
                assert len(tokens) == 1
            if output.prompt_logprobs is not None:
                assert output.first_index == 0
                assert sequence.sequence_id not in self.prompt_logprobs, "they came twice"
                self.prompt_logprobs[sequence.sequence_id] = output.prompt_logprobs


def check_answers(run: Run, outputs: list[list[int]]) -> None:
    """Each output is the right answer; of an aborted request, its beginning."""
    for live, output in zip(run.live, outputs, strict=True):
        request = live.sequence.request
        right = expected_tokens(request.prompt_token_ids, request.sampling)
        if live.arrival.kind == "exported":
            right = right[:1]
        assert output == (right[: len(output)] if live.is_aborted else right)
        found = run.prompt_logprobs.get(live.sequence.sequence_id)
        assert found == _right_prompt_logprobs(live.arrival, live.sequence, output)


def _right_prompt_logprobs(
    arrival: Arrival, sequence: Sequence, output: list[int]
) -> PromptLogprobs | None:
    """Return what must have come with the first token, from the node that computed the prompt."""
    num_top, prompt = arrival.prompt_logprobs, sequence.prompt_token_ids
    if num_top is None or arrival.kind == "remote" or not output or len(prompt) == 1:
        return None
    return expected_prompt_logprobs(prompt, num_top)
