"""The one writer of sequences and blocks: takes events, asks the planner, applies what it decided.

Reading order: `add` and `plan` (a step begins), `apply` (its results), `land` (KV from another
node), `finish` and `release` (the ends). Outputs and ends are returned as values; telling anybody
is the caller's part.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Items
from collections.abc import Set
from dataclasses import dataclass

from common.blocks import blocks_for, hash_block, root_hash
from common.request import FinishReason, TokenLogprobs
from engine.core.block_pool import BlockPool, BlockUse
from engine.core.plan import SampledToken, ScheduledSequence
from engine.core.planner import (
    Admission,
    Limits,
    SequenceView,
    StepPlan,
    plan_step,
)
from engine.core.sequence import Sequence
from engine.core.status import SequenceStatus
from engine.core.stop_rules import finish_reason_after


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One drawn token: output index `index` of `sequence`, and whether the output ends with it."""

    sequence: Sequence
    index: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What to hand to the runner, and which transfers may begin."""

    batch: list[ScheduledSequence]
    sequences: list[Sequence]
    reserved: list[Sequence]
    num_preempted: int

    @property
    def made_progress(self) -> bool:
        """Whether the next plan may find something that this one did not."""
        return bool(self.batch or self.num_preempted)

    def only(self, entries: Items[int]) -> PlannedStep:
        """The part of the step that computed these places of the batch."""
        batch = [self.batch[entry] for entry in entries]
        return PlannedStep(batch, [self.sequences[entry] for entry in entries], [], 0)


class Scheduler:
    """Seats, blocks and queues of one node."""

    def __init__(
        self,
        *,
        limits: Limits,
        num_blocks: int,
        fingerprint: str,
        eos_token_ids: Set[int],
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.receiving: dict[int, Sequence] = {}
        self.exporting: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._root_hash = root_hash(fingerprint)
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._enable_prefix_caching = enable_prefix_caching

    # --- what the node can take ---------------------------------------------------------------

    @property
    def num_free_seats(self) -> int:
        """Seats that nobody holds."""
        return self.limits.max_num_seqs - len(self.running) - len(self.receiving)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is in the prefix cache now."""
        return len(self._match_prefix(sequence)) * self.limits.block_size

    def can_seat(self, sequence: Sequence) -> bool:
        """Whether `sequence` would be seated by the next plan if it were added now."""
        plan = self._decide([*self.waiting, sequence])
        return any(a.sequence_id == sequence.sequence_id for a in plan.admissions)

    # --- one step -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its arrival."""
        insort(self.waiting, sequence, key=_by_arrival)

    def plan(self) -> PlannedStep:
        """Decide the next step and take what it needs; `apply` must follow."""
        return self._take(self._decide(self.waiting))

    def apply(self, step: PlannedStep, results: Items[SampledToken | None]) -> list[StepOutput]:
        """Record what the runner computed; finished sequences have let go of their blocks.

        One that finishes while it is exported keeps its blocks, see `finish`.
        """
        outputs = []
        for sequence, scheduled, result in zip(step.sequences, step.batch, results, strict=True):
            sequence.num_computed += len(scheduled.token_ids)
            self._publish_full_blocks(sequence)
            if result is not None:
                outputs.append(self._append(sequence, result))
        return outputs

    # --- a handoff ----------------------------------------------------------------------------

    def land(self, sequence: Sequence, first_token_id: int) -> StepOutput:
        """The prompt's KV is here and verified: decode from the first token on, drawn elsewhere."""
        del self.receiving[sequence.sequence_id]
        self.pool.start_running(sequence.block_table)
        sequence.num_computed = sequence.num_prompt
        sequence.has_remote_kv = False
        sequence.move_to(SequenceStatus.RUNNING_DECODE)
        insort(self.running, sequence, key=_by_arrival)
        self._publish_full_blocks(sequence)
        return self._append(sequence, SampledToken(first_token_id))

    # --- the ends -----------------------------------------------------------------------------

    def finish(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Take a sequence out, whatever its status; with `keep_blocks` a transfer still reads them.

        Kept blocks go with `release`, which must follow.
        """
        self._unlist(sequence)
        if keep_blocks and sequence.block_table:
            sequence.move_to(SequenceStatus.EXPORTING)
            self.exporting[sequence.sequence_id] = sequence
        else:
            self._free(sequence)

    def release(self, sequence: Sequence) -> None:
        """No transfer reads the blocks of an exporting sequence any more."""
        del self.exporting[sequence.sequence_id]
        self._free(sequence)

    def check(self) -> None:
        """Raise `AssertionError` unless blocks, seats and statuses agree."""
        self.pool.check()
        seated = len(self.running) + len(self.receiving)
        assert seated <= self.limits.max_num_seqs, "more sequences than seats"
        for sequence in self.running:
            room = len(sequence.block_table) * self.limits.block_size
            assert sequence.num_computed <= room, "computed tokens without a block"
            if sequence.status is SequenceStatus.RUNNING_DECODE:
                assert sequence.num_uncomputed == 1, "decoding, yet not caught up"

    # --- inside -------------------------------------------------------------------------------

    def _decide(self, waiting: Items[Sequence]) -> StepPlan:
        return plan_step(
            running=self.running,
            waiting=waiting,
            num_seats_held=len(self.receiving),
            pool=self.pool,
            match_prefix=self._match_prefix,
            limits=self.limits,
        )

    def _take(self, plan: StepPlan) -> PlannedStep:
        by_id = {s.sequence_id: s for s in self.running}
        for sequence_id in plan.preempted:
            self._preempt(by_id[sequence_id])
        # Cached blocks are claimed for all before anything is allocated: an allocation evicts.
        for admission in plan.admissions:
            self.pool.acquire_cached(admission.cached_block_ids)
        step = PlannedStep([], [], [], len(plan.preempted))
        for chunk in plan.chunks:
            sequence = by_id[chunk.sequence_id]
            if chunk.num_new_blocks:
                sequence.block_table += self.pool.allocate(chunk.num_new_blocks, BlockUse.RUNNING)
            self._schedule(step, sequence, chunk.num_tokens)
        admitted = self.waiting[: len(plan.admissions)]
        del self.waiting[: len(plan.admissions)]
        for sequence, admission in zip(admitted, plan.admissions, strict=True):
            assert sequence.sequence_id == admission.sequence_id
            self._seat(step, sequence, admission)
        return step

    def _seat(self, step: PlannedStep, sequence: Sequence, admission: Admission) -> None:
        num_cached = len(admission.cached_block_ids) * self.limits.block_size
        sequence.block_table = list(admission.cached_block_ids)
        sequence.num_hashed_blocks = len(admission.cached_block_ids)
        sequence.num_computed = num_cached
        if sequence.status is SequenceStatus.WAITING:
            sequence.num_cached_tokens = num_cached
        if sequence.has_remote_kv:
            self._receive(sequence, admission)
            step.reserved.append(sequence)
            return
        sequence.block_table += self.pool.allocate(admission.num_new_blocks, BlockUse.RUNNING)
        sequence.move_to(SequenceStatus.RUNNING_PREFILL)
        insort(self.running, sequence, key=_by_arrival)
        self._schedule(step, sequence, admission.num_tokens)

    def _receive(self, sequence: Sequence, admission: Admission) -> None:
        prompt_blocks = blocks_for(sequence.num_prompt, self.limits.block_size)
        num_targets = prompt_blocks - len(admission.cached_block_ids)
        num_more = admission.num_new_blocks - num_targets
        sequence.block_table += self.pool.allocate(num_targets, BlockUse.RECEIVING)
        sequence.block_table += self.pool.allocate(num_more, BlockUse.RESERVED)
        sequence.move_to(SequenceStatus.WAITING_FOR_KV)
        self.receiving[sequence.sequence_id] = sequence

    def _schedule(self, step: PlannedStep, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        samples = end == sequence.num_known
        step.sequences.append(sequence)
        step.batch.append(
            ScheduledSequence(
                sequence.sequence_id,
                sequence.tokens(start, end),
                start,
                sequence.block_table,
                sequence.sample_input() if samples else None,
            )
        )

    def _append(self, sequence: Sequence, result: SampledToken) -> StepOutput:
        index = len(sequence.output_token_ids)
        sequence.output_token_ids.append(result.token_id)
        reason = finish_reason_after(
            result.token_id,
            num_output=index + 1,
            num_known=sequence.num_known,
            sampling=sequence.request.sampling,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._max_model_len,
        )
        if sequence.is_exported or reason is not None:
            self.finish(sequence, keep_blocks=sequence.is_exported)
        elif sequence.status is SequenceStatus.RUNNING_PREFILL:
            sequence.move_to(SequenceStatus.RUNNING_DECODE)
        return StepOutput(sequence, index, result.token_id, result.logprobs, reason)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_hashed_blocks = 0
        sequence.move_to(SequenceStatus.PREEMPTED)
        self.num_preemptions += 1
        self.add(sequence)

    def _match_prefix(self, sequence: SequenceView) -> list[int]:
        assert isinstance(sequence, Sequence)
        if not self._enable_prefix_caching:
            return []
        # At least one token is computed, or there would be nothing to draw the next one from.
        num_hashes = (sequence.num_known - 1) // self.limits.block_size
        self._extend_hashes(sequence, num_hashes)
        return self.pool.prefix_cache.match(sequence.block_hashes[:num_hashes])

    def _publish_full_blocks(self, sequence: Sequence) -> None:
        if not self._enable_prefix_caching:
            return
        num_full = sequence.num_computed // self.limits.block_size
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_hashed_blocks, num_full):
            self.pool.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_hashed_blocks = max(sequence.num_hashed_blocks, num_full)

    def _extend_hashes(self, sequence: Sequence, count: int) -> None:
        size = self.limits.block_size
        hashes = sequence.block_hashes
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else self._root_hash
            hashes.append(hash_block(parent, sequence.tokens(index * size, (index + 1) * size)))

    def _unlist(self, sequence: Sequence) -> None:
        if sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING_FOR_KV:
            del self.receiving[sequence.sequence_id]
        elif sequence.status is SequenceStatus.EXPORTING:
            raise ValueError("an exporting sequence ends with release, when its transfer has ended")
        else:
            self.running.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.move_to(SequenceStatus.FINISHED)


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival
