"""What a scheduler has done and where it stands, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.block_pool import BlockCounts
from engine.core.step_plan import PreemptionReason, StepPlan, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """Counters since the start (`num_…_tokens` count planned tokens), and the present state.

    `num_growth_blocks` is what the reservation policy kept back at the last admission;
    `num_speculative_steps` counts a step once for each sequence that verified a draft in it.
    """

    method: str
    blocks: BlockCounts
    num_host_blocks_used: int
    num_growth_blocks: int
    new_token_ratio: float
    num_running: int
    num_waiting: int
    highest_num_passed: int
    max_num_batched_tokens: int
    last_step_tokens: int
    num_steps: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_chunk_tokens: int
    num_recomputed_tokens: int
    num_swapped_out: int
    num_drafted: int
    num_accepted: int
    num_speculative_steps: int
    preemptions: Mapping[str, int]
    stops: Mapping[str, int]

    @property
    def num_preemptions(self) -> int:
        """Preemptions for whatever reason."""
        return sum(self.preemptions.values())

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verifying step of a sequence, the model's own included; 0: none yet."""
        if self.num_speculative_steps == 0:
            return 0.0
        return 1 + self.num_accepted / self.num_speculative_steps


class StepCounters:
    """The counters behind `SchedulerStatistics`; the scheduler alone writes them."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step_tokens = 0
        self.num_decode_tokens = 0
        self.num_draft_tokens = 0
        self.num_chunk_tokens = 0
        self.num_growth_blocks = 0
        self.highest_num_passed = 0
        self.num_recomputed_tokens = 0
        self.num_swapped_out = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_speculative_steps = 0
        self.preemptions = dict.fromkeys((reason.value for reason in PreemptionReason), 0)
        self.stops = dict.fromkeys((rule.value for rule in StopRule), 0)

    def statistics(
        self,
        *,
        method: str,
        blocks: BlockCounts,
        num_host_blocks_used: int,
        new_token_ratio: float,
        num_running: int,
        num_waiting: int,
        max_num_batched_tokens: int,
    ) -> SchedulerStatistics:
        """The counters now, beside what the scheduler says of its present state."""
        return SchedulerStatistics(
            method=method,
            blocks=blocks,
            num_host_blocks_used=num_host_blocks_used,
            num_growth_blocks=self.num_growth_blocks,
            new_token_ratio=new_token_ratio,
            num_running=num_running,
            num_waiting=num_waiting,
            highest_num_passed=self.highest_num_passed if num_waiting else 0,
            max_num_batched_tokens=max_num_batched_tokens,
            last_step_tokens=self.last_step_tokens,
            num_steps=self.num_steps,
            num_decode_tokens=self.num_decode_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_chunk_tokens=self.num_chunk_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_swapped_out=self.num_swapped_out,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_speculative_steps=self.num_speculative_steps,
            preemptions=dict(self.preemptions),
            stops=dict(self.stops),
        )

    def on_plan(self, plan: StepPlan) -> None:
        """A plan was made and will be run."""
        self.last_step_tokens = plan.num_tokens
        self.num_steps += plan.num_tokens > 0
        self.num_decode_tokens += plan.num_decode_tokens
        self.num_draft_tokens += plan.num_draft_tokens
        self.num_chunk_tokens += plan.num_chunk_tokens
        self.num_growth_blocks = plan.num_growth_blocks
        self.stops[plan.stopped_by.value] += 1
        for preemption in plan.preempted:
            self.preemptions[preemption.reason.value] += 1

    def on_verified(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's drafts were verified in a step."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_speculative_steps += 1
