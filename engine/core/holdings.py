"""What sequences hold, from the queue to the end: seats, blocks and host blocks.

    queue      `waiting`: nothing but host blocks, if it was preempted and copied there
    seated     `running`, or `receiving` while KV comes from another node or from host memory
    ended      `exporting`: its blocks, while a transfer reads them
               `quarantined`: those that another node or a copy may still write

When a sequence moves on, and why, the scheduler decides.
"""

from __future__ import annotations

from common.kv.blocks import blocks_for
from engine.core.blocks.block_pool import BlockPool, BlockUse
from engine.core.planner_contract import Admission, Chunk, PreemptionReason, StepLimits, StepPlan
from engine.core.policies.growth import Lacking
from engine.core.sequences.running import Running
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import NO_SEAT, Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.sequences.waiting_queue import WaitingQueue
from engine.core.statistics import StepCounters
from engine.core.step.step_in_flight import PlannedStep, Preempted
from engine.core.swapping import Swapping

_COMING = (SequenceStatus.WAITING_FOR_KV, SequenceStatus.SWAPPING_IN)


class Holdings:
    """The sequences of one node by what they hold."""

    def __init__(
        self,
        limits: StepLimits,
        pool: BlockPool,
        waiting: WaitingQueue,
        swapping: Swapping,
        counters: StepCounters,
    ) -> None:
        self.pool = pool
        self.waiting = waiting
        self.swapping = swapping
        self.seats = Seats(
            limits.max_num_seqs,
            limits.max_model_len,
            blocks_for(limits.max_model_len, limits.block_size),
        )
        self.running = Running()
        self.receiving: dict[int, Sequence] = {}
        self.exporting: dict[int, Sequence] = {}
        self.quarantined: dict[int, list[int]] = {}
        """Blocks of finished sequences that another node may still write, by sequence id."""
        self._block_size = limits.block_size
        self._counters = counters

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits, runs or receives."""
        return not (self.running or self.receiving or self.waiting)

    def lacking(self) -> list[Lacking]:
        """Return which running sequences need blocks for their last known token, by their index."""
        if not self.running:
            return []
        rows = self.running.rows
        return self.seats.lacking(rows, self.seats.num_known.take(rows), self._block_size)

    # --- from the queue to a seat --------------------------------------------------------------

    def seat(self, step: PlannedStep, sequence: Sequence, admission: Admission) -> bool:
        """Seat a sequence of `waiting`; return whether this step computes tokens of it.

        Its cached blocks must have been claimed.
        """
        num_cached = len(admission.cached_block_ids) * self._block_size
        sequence.take_seat(self.seats)
        self.seats.add_blocks(sequence.seat, admission.cached_block_ids)
        sequence.num_hashed_blocks = len(admission.cached_block_ids)
        sequence.num_computed = num_cached
        sequence.num_bypassed = 0
        if sequence.status is SequenceStatus.WAITING:
            sequence.num_cached_tokens = num_cached
        if sequence.has_remote_kv:
            self._receive(sequence, admission)
            step.reserved.append(sequence)
            return False
        is_copied_in = self.swapping.is_copied_in(sequence, num_cached)
        use = BlockUse.RECEIVING if is_copied_in else BlockUse.RUNNING
        self.seats.add_blocks(sequence.seat, self.pool.allocate(admission.num_new_blocks, use))
        self.swapping.swap_in(step, sequence)
        if is_copied_in:
            sequence.move_to(SequenceStatus.SWAPPING_IN)
            self.receiving[sequence.sequence_id] = sequence
            return False
        if sequence.status is SequenceStatus.PREEMPTED:
            num_lost = sequence.num_known - 1 - sequence.num_computed
            self._counters.num_recomputed_tokens += num_lost
        is_caught_up = sequence.status is SequenceStatus.PREEMPTED and sequence.num_uncomputed == 1
        sequence.move_to(
            SequenceStatus.RUNNING_DECODE if is_caught_up else SequenceStatus.RUNNING_PREFILL
        )
        self.running.add(sequence)
        return True

    def _receive(self, sequence: Sequence, admission: Admission) -> None:
        known_blocks = blocks_for(sequence.num_known, self._block_size)
        num_targets = known_blocks - len(admission.cached_block_ids)
        num_more = admission.num_new_blocks - num_targets
        self.seats.add_blocks(sequence.seat, self.pool.allocate(num_targets, BlockUse.RECEIVING))
        self.seats.add_blocks(sequence.seat, self.pool.allocate(num_more, BlockUse.RESERVED))
        sequence.move_to(SequenceStatus.WAITING_FOR_KV)
        self.receiving[sequence.sequence_id] = sequence

    def extend(self, sequence: Sequence, chunk: Chunk) -> None:
        """Give a running sequence the blocks of its next chunk, and write its drafts."""
        if chunk.num_new_blocks:
            block_ids = self.pool.allocate(chunk.num_new_blocks, BlockUse.RUNNING)
            self.seats.add_blocks(sequence.seat, block_ids)
        if chunk.num_drafts:
            drafts = sequence.draft_token_ids[: chunk.num_drafts]
            self.seats.write_drafts(sequence.seat, drafts)

    def start(self, sequence: Sequence) -> None:
        """Start decoding a seated sequence whose KV has landed."""
        del self.receiving[sequence.sequence_id]
        self.pool.start_running(sequence.block_table)
        sequence.move_to(SequenceStatus.RUNNING_DECODE)
        self.running.add(sequence)

    # --- back to the queue ---------------------------------------------------------------------

    def preempt(self, step: PlannedStep, sequence: Sequence) -> None:
        """Take seat and blocks from a running sequence; its KV is copied out if that is planned."""
        num_swapped_out = self.swapping.swap_out(step, sequence)
        self._counters.num_swapped_out += num_swapped_out
        step.num_lost_tokens += sequence.num_computed
        self.requeue(sequence, num_held=num_swapped_out if self.swapping.is_late else 0)

    def requeue(self, sequence: Sequence, *, num_held: int = 0) -> None:
        """Queue a running sequence again; a copy holds its first `num_held` blocks."""
        self.running.remove(sequence)
        sequence.leave_seat()
        self.pool.release(sequence.give_up_blocks()[num_held:])
        sequence.num_computed = 0
        sequence.num_hashed_blocks = 0
        sequence.draft_token_ids = sequence.proposed_token_ids = sequence.forced_token_ids = ()
        sequence.num_output_at_preemption = sequence.num_output
        sequence.move_to(SequenceStatus.PREEMPTED)
        self.waiting.rejoin(sequence)

    def preempted(
        self, plan: StepPlan, num_lost_tokens: int, ratios: tuple[float, float]
    ) -> Preempted:
        """Return what the preemptions of a plan changed; `ratios` are those before and after."""
        num_for_blocks = sum(one.reason is PreemptionReason.BLOCKS for one in plan.preempted)
        return Preempted(
            num_for_blocks=num_for_blocks,
            num_for_priority=len(plan.preempted) - num_for_blocks,
            num_lost_tokens=num_lost_tokens,
            ratio_before=ratios[0],
            ratio_after=ratios[1],
            blocks=self.pool.counts(),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
        )

    # --- the ends ------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence that ends from its queue or seat; it still holds its blocks.

        Raises `ValueError` for one that is exporting, or has finished.
        """
        if sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
            self.waiting.leave(sequence)
        elif sequence.status in _COMING:
            del self.receiving[sequence.sequence_id]
        elif sequence.status is SequenceStatus.EXPORTING:
            raise ValueError("an exporting sequence must be ended by release, after its transfer")
        elif sequence.status is SequenceStatus.FINISHED:
            raise ValueError(f"sequence {sequence.sequence_id} has finished already")
        else:
            self.running.remove(sequence)
        if sequence.host_block_ids:
            self.swapping.forget(sequence)
        if sequence.seat != NO_SEAT:
            sequence.leave_seat()

    def export(self, sequence: Sequence) -> None:
        """Keep the blocks of a sequence that has left, for a transfer that reads them."""
        sequence.move_to(SequenceStatus.EXPORTING)
        self.exporting[sequence.sequence_id] = sequence

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has left; those still written are quarantined."""
        block_ids = sequence.give_up_blocks()
        if sequence.status in _COMING:
            kept = self.pool.quarantine(block_ids)
            self.quarantined[sequence.sequence_id] = kept
            written = set(kept)
            block_ids = [b for b in block_ids if b not in written]
        self.pool.release(block_ids)
        sequence.move_to(SequenceStatus.FINISHED)

    def end_export(self, sequence: Sequence) -> None:
        """Free the blocks of an exporting sequence. Raises `KeyError` for any other one."""
        del self.exporting[sequence.sequence_id]
        self.free(sequence)

    def end_quarantine(self, sequence: Sequence) -> None:
        """Free a finished sequence's quarantined blocks."""
        self.pool.release(self.quarantined.pop(sequence.sequence_id))
