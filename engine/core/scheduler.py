"""The one writer of sequences and blocks: takes events, calls the planner, applies its decision.

Reading order: `add` and `plan` (a step begins), `apply` (its results), `land` (KV from another
node), `finish`, `release` and `end_quarantine` (the ends). The caller reports what they return.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Items
from typing import cast

import numpy as np

from common.request import FinishReason
from common.settings.config import SchedulingConfig
from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.cache_copy import PrefixCopy
from engine.core.blocks.disk_index import DiskIndex
from engine.core.blocks.host_pool import HostPool
from engine.core.disk_prefixes import DiskPrefixes
from engine.core.holdings import Holdings
from engine.core.invariants import check_state
from engine.core.kept_prefixes import KeptPrefixes
from engine.core.planner_contract import (
    PLAIN_DECODE,
    AheadRule,
    Chunk,
    MatchPrefix,
    PlanPolicy,
    StepLimits,
    StepPlan,
)
from engine.core.planning.forecast import Forecast
from engine.core.planning.plan_ahead import PlanAhead
from engine.core.planning.planner import plan_step
from engine.core.policies.reservation import make_reservation
from engine.core.policies.victims import VICTIM_ORDERS
from engine.core.prefix_transfers import PrefixTransfers
from engine.core.runner_contract import DrawnTokens, RunnerResult
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.seats import Ints
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.sequences.waiting_queue import WaitingQueue
from engine.core.speculation.speculation import Speculation
from engine.core.statistics import SchedulerStatistics, StepCounters
from engine.core.step.step_batch import StepBatch, planned_batch
from engine.core.step.step_in_flight import PlannedStep, SwapCopy
from engine.core.step.step_results import StepOutput, StepOutputs, StepResults
from engine.core.step_after import StepAfter
from engine.core.step_again import StepAgain
from engine.core.swapping import Swapping
from engine.core.tried_plan import TriedPlan


class Scheduler:
    """Seats, blocks and queues of one node."""

    def __init__(
        self,
        *,
        limits: StepLimits,
        num_blocks: int,
        fingerprint: str,
        eos_token_ids: Set[int],
        enable_prefix_caching: bool = True,
        config: SchedulingConfig | None = None,
        speculation: Speculation | None = None,
        num_host_blocks: int = 0,
        keeps_prefixes: bool = False,
        disk_index: DiskIndex | None = None,
        swaps_late: bool = False,
        can_go_on: bool = False,
    ) -> None:
        """Make it. With `swaps_late`, KV is copied beside the steps and `end_copy` is called.

        With `keeps_prefixes` host memory takes prefixes too, and a disk with `disk_index`. With
        `can_go_on` the runner may begin a step before the one before it has ended.
        """
        config = config or SchedulingConfig()
        self.limits, self.pool = limits, BlockPool(num_blocks)
        can_swap = config.preemption_mode == "swap"
        self.host_pool = host_pool = HostPool(num_host_blocks if can_swap or keeps_prefixes else 0)
        self.swapping = Swapping(
            host_pool, limits.block_size, is_enabled=can_swap, is_late=swaps_late
        )
        self.waiting = WaitingQueue(
            has_priorities=config.enable_priority_scheduling,
            requeues_at_tail=config.requeue == "tail",
            pass_limit=config.priority_pass_limit,
        )
        self.counters = counters = StepCounters()
        self._held = held = Holdings(limits, self.pool, self.waiting, self.swapping, counters)
        self.seats, self.running, self.receiving = held.seats, held.running, held.receiving
        self.exporting, self.quarantined = held.exporting, held.quarantined
        self.reservation = make_reservation(
            config, block_size=limits.block_size, lookahead=limits.num_speculative_tokens
        )
        self._config, self._speculation = config, speculation
        self._ahead: PlanAhead | None = None
        self._why_not_ahead, self._highest_num_bypassed = AheadRule.NO_STEP, 0
        self._after: StepAfter | None = None
        if can_go_on and not (speculation and speculation.has_proposals):
            self._after = StepAfter(held, limits, speculation, has_priorities=self.has_priorities)
        self._prefixes = PrefixIndex(
            self.pool,
            block_size=limits.block_size,
            fingerprint=fingerprint,
            is_enabled=enable_prefix_caching,
        )
        self._match_prefix = cast(MatchPrefix, self._prefixes.match)
        self.kept_prefixes = kept = KeptPrefixes(
            host_pool, self._prefixes, counters, is_enabled=keeps_prefixes, is_late=swaps_late
        )
        self.prefix_transfers = PrefixTransfers(self._prefixes, kept, counters, self._on_taken)
        self.disk_prefixes = DiskPrefixes(host_pool, self._prefixes, counters, disk_index)
        self._never_copies = not keeps_prefixes and speculation is None and self._after is None
        self._again = StepAgain(held, limits, self._prefixes, counters)
        self._no_batch = planned_batch(self.seats, np.empty(0, np.int64), [], {}, 0)
        self._no_plan, self._no_step = StepPlan(), PlannedStep(self._no_batch)  # never changed
        self._tried, self._eos_token_ids = TriedPlan(held), eos_token_ids
        self._results = StepResults(
            self.seats, self._prefixes, limits, counters, speculation, on_end=self._on_drawn_end
        )

    # --- what the node can take ---------------------------------------------------------------

    @property
    def num_free_seats(self) -> int:
        """Seats that no sequence holds."""
        return self.limits.max_num_seqs - len(self.running) - len(self.receiving)

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens still to be computed, running and waiting; what is cached does not count."""
        rows = self.running.rows
        num_uncomputed = self.seats.num_known[rows] - self.seats.num_computed[rows]
        return self.waiting.num_missing_tokens + int(num_uncomputed.sum())

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of a waiting sequence's tokens whose KV is cached now, or kept."""
        num_cached = len(self._prefixes.match(sequence))
        num_cached += self.kept_prefixes.num_found(sequence, num_cached)
        return num_cached * self.limits.block_size

    def can_seat(self, sequence: Sequence) -> bool:
        """Return whether the next plan would admit `sequence` if it were added now."""
        sequence.set_ends(self._eos_token_ids, self.limits.max_model_len)
        self._draft()
        self.waiting.join(sequence)
        plan = self._decide()
        has_seat = any(a.sequence_id == sequence.sequence_id for a in plan.admissions)
        if has_seat and self._speculation is None and not self.kept_prefixes.is_enabled:
            self._tried.keep(sequence, plan)
        self.waiting.leave(sequence)
        return has_seat

    def statistics(self) -> SchedulerStatistics:
        """Return counters and present state, as one value."""
        return SchedulerStatistics(
            counters=self.counters.copy(),
            method="none" if self._speculation is None else self._speculation.method,
            blocks=self.pool.counts(),
            num_host_blocks_used=self.host_pool.num_used,
            num_prefix_host_blocks=self.host_pool.num_prefixes,
            disk=self.disk_prefixes.size,
            new_token_ratio=self.reservation.ratio,
            num_running=len(self.running) + len(self.receiving),
            num_waiting=len(self.waiting),
            num_queued_tokens=self.num_queued_tokens,
            highest_num_bypassed=self._highest_num_bypassed if self.waiting else 0,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
        )

    # --- one step -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.set_ends(self._eos_token_ids, self.limits.max_model_len)
        position = self.waiting.join(sequence, self.num_cached_tokens(sequence))
        self._tried.on_queued(sequence)
        if self._ahead is not None:
            self._ahead.on_arrival(position, is_last=position == len(self.waiting) - 1)

    def plan(self) -> PlannedStep:
        """Decide the next step and take what it needs; `apply` must follow."""
        if self._never_copies and not (self.running or self.waiting):  # nothing is to be planned
            self._tried.forget()
            self._take_ahead(frozenset(), has_drafts=False)
            self.counters.on_plan(self._no_plan)
            return self._no_step
        self.kept_prefixes.begin_plan()
        by_id, has_drafts = self.running.by_id, self._draft()
        plan, tried = None if self._after is None else self._after.plan(), self._tried.take()
        if plan is not None:
            self.counters.plans_ahead[AheadRule.BEGUN] += 1
        else:
            ahead = self._take_ahead(by_id.keys(), has_drafts=has_drafts)
            plan = ahead or tried or self._decide()
            while self.kept_prefixes.prepare(plan, self.waiting):
                plan = self._decide()
        self.counters.on_plan(plan)
        step, before = self._take(plan, by_id), self.reservation
        self._adapt_reservation(plan)
        if plan.preempted:
            ratios = before.ratio, self.reservation.ratio
            step.preempted = self._held.preempted(plan, step.num_lost_tokens, ratios)
        self.kept_prefixes.end_plan(step)
        if self._after is not None:
            self._after.on_taken(step, has_drafts=has_drafts)
        return step

    def plan_ahead(self, step: PlannedStep) -> None:
        """Decide, while `step` runs, what the next `plan` takes if it still can; take nothing."""
        if step.batch.has_gone_on:
            self._why_not_ahead = AheadRule.NOTHING_LEFT  # if none of its sequences goes on
        elif step.has_drafts:
            self._why_not_ahead = AheadRule.DRAFTS
        elif self.kept_prefixes.holds_back:
            self._why_not_ahead = AheadRule.PREFIX
        else:
            forecast = Forecast(step, self.running, self.seats, self.pool, self.limits.block_size)
            self._ahead = PlanAhead(step, self._decide(forecast), self.waiting, self._policy())

    def apply(self, step: PlannedStep, results: RunnerResult) -> StepOutputs:
        """Record what the runner computed; finished sequences have released their blocks.

        A sequence that finishes while it is exported keeps its blocks, see `finish`.
        """
        self._tried.forget()
        if self._ahead is not None:
            self._ahead.on_results(step)
        if self._after is not None:
            self._after.on_results(step, results)
        self._pass_decode_steps(results.num_steps - results.num_recorded - 1)
        return self._results.apply(step, results)

    def go_on(self, batch: StepBatch, token_ids: Ints, took_s: float) -> bool:
        """Record what a step has drawn that is run several times, and take what it needs to go on.

        `token_ids`: `[sequences, steps]`, none of which ends an answer; `apply` follows, with all
        of them. Return False, with nothing done, where another step would be planned.
        """
        if self.kept_prefixes.is_enabled or not self._again.go_on(batch, token_ids, took_s):
            return False
        self._pass_decode_steps(token_ids.shape[1])
        return True

    # --- a handoff ----------------------------------------------------------------------------

    def land(
        self, sequence: Sequence, first_token_id: int, draft_token_ids: Items[int] = ()
    ) -> StepOutput:
        """Start decoding from the first token, drawn elsewhere, when the prompt's KV landed."""
        sequence.has_remote_kv = False
        self._start(sequence)
        drawn = DrawnTokens((first_token_id,), draft_token_ids=tuple(draft_token_ids))
        return self._results.append(sequence, drawn)

    def end_copy(self, copy: SwapCopy | PrefixCopy, *, is_good: bool) -> None:
        """Release what a late copy held; a sequence that was copied back decodes on.

        If the copy failed, what it should have copied is computed again.
        """
        if isinstance(copy, PrefixCopy):
            self.kept_prefixes.end(copy, is_good=is_good)
            if self._ahead is not None and not copy.is_out:
                self._ahead.on_landing()
            return
        sequence, is_good = copy.sequence, self.swapping.end(copy, is_good=is_good)
        if not is_good and self._ahead is not None:
            # A plan made ahead may count on what should have been copied.
            self._ahead.on_failed_copy()
        if copy.is_out:
            self.pool.release(copy.block_ids)
        elif sequence.status is SequenceStatus.FINISHED:
            self.end_quarantine(sequence)
        else:
            self._start(sequence)
            if not is_good:
                self._held.requeue(sequence)

    def _on_taken(self) -> None:
        if self._ahead is not None:
            self._ahead.on_taken_blocks()

    def _start(self, sequence: Sequence) -> None:
        self._held.start(sequence)
        if self._ahead is not None:
            self._ahead.on_landing()

    # --- the ends -----------------------------------------------------------------------------

    def finish(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """End a sequence of any status; with `keep_blocks` a transfer still reads its blocks.

        The caller must release kept blocks with `release`. Receiving blocks are quarantined, and
        the caller must free them with `end_quarantine`.
        """
        self._held.leave(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if keep_blocks and sequence.num_held_blocks:
            self._held.export(sequence)
        else:
            self._held.free(sequence)
            self._reset_if_idle()

    def release(self, sequence: Sequence) -> None:
        """Free an exporting sequence's blocks, when no transfer reads them any more."""
        self._held.end_export(sequence)
        self._reset_if_idle()

    def end_quarantine(self, sequence: Sequence) -> None:
        """Free a finished sequence's quarantined blocks: no other node can write to them."""
        self._held.end_quarantine(sequence)

    def check(self) -> None:
        """Raise `AssertionError` unless blocks, seats and statuses agree."""
        check_state(self)

    # --- inside: taking what a plan decided ----------------------------------------------------

    def _draft(self) -> bool:
        """Set the drafts of all decoding sequences; return whether there are any."""
        if self._speculation is None:
            return False
        decoding = [s for s in self.running if s.is_decoding]
        drafts = self._speculation.drafts(decoding)
        for sequence, token_ids in zip(decoding, drafts, strict=True):
            sequence.draft_token_ids = token_ids
        return any(drafts)

    def _take_ahead(self, running: Set[int], *, has_drafts: bool) -> StepPlan | None:
        """Return the plan that was made ahead, if it can be taken."""
        ahead, self._ahead = self._ahead, None
        rule, self._why_not_ahead = self._why_not_ahead, AheadRule.NO_STEP
        plan = None
        if ahead is not None:
            plan = ahead.take(running, self.waiting, self._prefixes, has_drafts=has_drafts)
            rule = ahead.rule
            if plan is not None and self.kept_prefixes.prepare(plan, self.waiting):
                plan, rule = None, AheadRule.PREFIX
        self.counters.plans_ahead[rule] += 1
        return plan

    def _decide(self, forecast: Forecast | None = None) -> StepPlan:
        """Decide the next step from the present state, or from what it will be."""
        if not (self.waiting or (self.running if forecast is None else forecast.running)):
            return self._no_plan
        swapping, kept = self.swapping, self.kept_prefixes
        num_copies = swapping.num_under_way + len(kept.under_way)
        num_coming = swapping.num_coming(self.pool) + kept.num_coming if num_copies else 0
        return plan_step(
            running=self.running if forecast is None else forecast.running,
            lacking=(self._held if forecast is None else forecast).lacking(),
            receiving=list(self.receiving.values()),
            waiting=self.waiting,
            num_exporting=len(self.exporting) + len(self.quarantined),
            num_copies=num_copies + len(self.prefix_transfers),
            num_coming=num_coming,
            awaiting=kept.awaiting,
            growth=self.seats.growth if forecast is None else forecast.growth,
            pool=self.pool if forecast is None else forecast.pool,
            match_prefix=self._match_prefix,
            limits=self.limits,
            policy=self._policy(),
        )

    @property
    def has_priorities(self) -> bool:
        """Whether requests with a higher priority go first."""
        return self._config.enable_priority_scheduling

    def _policy(self) -> PlanPolicy:
        return PlanPolicy(
            reservation=self.reservation,
            victim_order=VICTIM_ORDERS[self._config.preemption_policy],
            config=self._config,
            swaps_late=self.swapping.is_late,
        )

    def _take(self, plan: StepPlan, by_id: Mapping[int, Sequence]) -> PlannedStep:
        step = PlannedStep(self._no_batch, num_preempted=len(plan.preempted))
        step.num_tokens, step.stopped_by = plan.num_tokens, plan.stopped_by
        step.starved = [by_id[sequence_id] for sequence_id in plan.starved]
        for preemption in plan.preempted:
            self._held.preempt(step, by_id[preemption.sequence_id])
        # Cached blocks are claimed for all admissions before any allocation, because allocating
        # evicts.
        for admission in plan.admissions:
            self.pool.acquire_cached(admission.cached_block_ids)
        # If all decode they are in the order of arrival.
        num_decodes = plan.num_decode_tokens
        if num_decodes == len(plan.chunks) == len(self.running):
            step.sequences = list(self.running)
        else:
            step.sequences = list(map(by_id.__getitem__, plan.chunks))
        # Of hundreds of decodes without a new block or a draft nothing is done here.
        chunks = {n: c for n, c in enumerate(plan.chunks.values()) if c is not PLAIN_DECODE}
        for entry, chunk in chunks.items():
            self._held.extend(step.sequences[entry], chunk)
        if plan.admissions:
            self._admit(step, plan, chunks)
        if step.sequences:  # an idle node takes a turn for every message
            rows = self.running.rows
            if not num_decodes == len(step.sequences) == len(rows):
                rows = np.array([sequence.seat for sequence in step.sequences], np.int64)
            step.batch = planned_batch(self.seats, rows, step.sequences, chunks, num_decodes)
        num_looked_at = self._config.skip_ahead_window + 1 + len(plan.preempted)
        self._highest_num_bypassed = self.waiting.count_bypasses(plan.bypassed, num_looked_at)
        if self._speculation is not None and self._speculation.has_proposals:
            step.set_proposals(self._speculation.num_proposals)
        return step

    def _admit(self, step: PlannedStep, plan: StepPlan, chunks: dict[int, Chunk]) -> None:
        """Seat the admitted sequences; those that compute are entries of `step`, in `chunks`."""
        admitted = self.waiting.take({a.sequence_id for a in plan.admissions})
        for admission in plan.admissions:
            sequence = admitted[admission.sequence_id]
            self.kept_prefixes.on_admitted(sequence, admission.cached_block_ids)
            if self._held.seat(step, sequence, admission):
                chunks[len(step.sequences)] = Chunk(admission.num_tokens)
                step.sequences.append(sequence)

    def _adapt_reservation(self, plan: StepPlan) -> None:
        if plan.preempted:
            left = [s for s in self.running if s.is_decoding]
            self.reservation = self.reservation.after_preemption(left)
        elif plan.num_decode_tokens:
            self.reservation = self.reservation.after_decode_step()

    def _on_drawn_end(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """End a sequence by what it drew; without a reason its output continues on another node."""
        if reason is not None and not sequence.is_exported:
            self.reservation = self.reservation.after_output(sequence)
        self.finish(sequence, keep_blocks=sequence.is_exported)

    def _pass_decode_steps(self, number: int) -> None:
        for _ in range(number):
            before, self.reservation = self.reservation, self.reservation.after_decode_step()
            if self.reservation is before:
                break  # and so it is after each further one

    def _reset_if_idle(self) -> None:
        if self._held.is_idle:
            self.reservation = self.reservation.when_idle()
