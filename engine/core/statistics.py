"""What a scheduler has done and where it stands, as one immutable value."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from engine.core.blocks.block_pool import BlockCounts
from engine.core.planner_contract import AheadRule, PreemptionReason, StepPlan, StopRule


class PullOutcome(StrEnum):
    """What became of a prefix that another node has cached and this one has not."""

    LANDED = "landed"
    FAILED = "failed"
    MISSED = "missed"
    """The other node did not have it any more, and said so."""
    DECLINED = "declined"
    """Computing it was expected to be quicker."""
    AVOIDED = "avoided"
    """The other node failed to send lately."""
    NO_ROOM = "no_room"


class DiskEvent(StrEnum):
    """What happened to blocks of prefixes on disk."""

    WRITTEN = "written"
    READ = "read"
    REMOVED = "removed"
    """They made room."""
    MISSED = "missed"
    """Blocks of prompts that were looked for there, and in no tier."""
    DECLINED = "declined"
    """Computing them was expected to be quicker, or the disk failed lately."""
    LATE = "late"
    """They did not come in the time that computing takes, so they were computed."""
    VANISHED = "vanished"
    CORRUPT = "corrupt"
    READ_FAILED = "read_failed"
    """A read that the system refused; its blocks are not counted."""
    WRITE_FAILED = "write_failed"


def _counts(kinds: type[StrEnum]) -> dict[str, int]:
    return dict.fromkeys(map(str, kinds), 0)


@dataclass(slots=True)
class StepCounters:
    """Counts since the start, and facts of the last plan; the scheduler alone writes them.

    `num_…_tokens` count planned tokens. `num_growth_blocks` is what the reservation policy kept
    back at the last admission. `num_speculative_steps` counts a step once for each sequence that
    verified a draft in it. `num_prefix_blocks_…` were copied to host memory or back.
    `prefix_blocks_found` are those of prompts that were admitted, by where they were: in the cache,
    or copied back for them from host memory, where some had been read from disk. `disk` counts by
    event. `prefix_blocks_sent` landed on nodes that pulled them, by where they were: those of
    `disk` were read for them.
    `pulls` are by their outcome, and `num_pulled_tokens` came with those that landed, of
    which no prompt waited for `num_fetched_tokens`.
    `prompt_steps_s` is the time of steps that computed any part of a prompt, `decode_steps_s` that
    of all others.
    `preemptions` are by reason, `stops` by the rule that ended admissions, `plans_ahead` by whether
    the plan was made while the step before ran, or what prevented that.
    """

    num_steps: int = 0
    last_step_tokens: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_chunk_tokens: int = 0
    num_growth_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out: int = 0
    num_prefix_blocks_out: int = 0
    num_prefix_blocks_in: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_speculative_steps: int = 0
    num_pulled_tokens: int = 0
    num_fetched_tokens: int = 0
    prompt_steps_s: float = 0.0
    decode_steps_s: float = 0.0
    preemptions: dict[str, int] = field(default_factory=lambda: _counts(PreemptionReason))
    stops: dict[str, int] = field(default_factory=lambda: _counts(StopRule))
    plans_ahead: dict[str, int] = field(default_factory=lambda: _counts(AheadRule))
    prefix_blocks_found: dict[str, int] = field(
        default_factory=lambda: {"pool": 0, "host": 0, "disk": 0}
    )
    prefix_blocks_sent: dict[str, int] = field(
        default_factory=lambda: {"pool": 0, "host": 0, "disk": 0}
    )
    disk: dict[str, int] = field(default_factory=lambda: _counts(DiskEvent))
    pulls: dict[str, int] = field(default_factory=lambda: _counts(PullOutcome))

    @property
    def num_preemptions(self) -> int:
        """Preemptions for any reason."""
        return sum(self.preemptions.values())

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verifying step of a sequence, the model's own included; 0: none yet."""
        if self.num_speculative_steps == 0:
            return 0.0
        return 1 + self.num_accepted / self.num_speculative_steps

    def copy(self) -> StepCounters:
        """Return a copy of the counters, which does not change."""
        # A node does it twice a turn, and `replace` takes three times as long.
        return StepCounters(*_numbers(self), *map(dict.copy, _dicts(self)))

    def on_plan(self, plan: StepPlan) -> None:
        """Count a plan that will be run."""
        self.last_step_tokens = num_tokens = plan.num_tokens
        self.num_steps += num_tokens > 0
        self.num_decode_tokens += plan.num_decode_tokens
        self.num_draft_tokens += plan.num_draft_tokens
        self.num_chunk_tokens += plan.num_chunk_tokens
        self.num_growth_blocks = plan.num_growth_blocks
        self.stops[plan.stopped_by] += 1
        for preemption in plan.preempted:
            self.preemptions[preemption.reason] += 1

    def on_repeated(self, num_tokens: int, num_times: int) -> None:
        """Count a step of `num_tokens` decodes, planned once, that was run `num_times` more."""
        self.num_steps += num_times
        self.num_decode_tokens += num_tokens * num_times
        self.num_growth_blocks = 0
        self.stops[StopRule.NOTHING_WAITS] += num_times
        self.plans_ahead[AheadRule.NO_STEP] += num_times

    def on_ran(self, took_s: float, *, has_prompts: bool) -> None:
        """Count the time of a step, or of a step that was run several times."""
        if has_prompts:
            self.prompt_steps_s += took_s
        else:
            self.decode_steps_s += took_s

    def on_prefix_found(self, *, pool: int, host: int, disk: int) -> None:
        """Count the cached blocks of an admitted prompt, by where they were."""
        self.prefix_blocks_found["pool"] += pool
        self.prefix_blocks_found["host"] += host
        self.prefix_blocks_found["disk"] += disk

    def on_prefix_sent(self, *, pool: int, host: int, disk: int) -> None:
        """Count the blocks of a prefix that another node has pulled, by where they were."""
        self.prefix_blocks_sent["pool"] += pool
        self.prefix_blocks_sent["host"] += host
        self.prefix_blocks_sent["disk"] += disk

    def on_pull(self, outcome: PullOutcome, num_tokens: int, *, is_fetched: bool) -> None:
        """Count a prefix of so many tokens that another node has cached."""
        self.pulls[outcome] += 1
        if outcome is PullOutcome.LANDED:
            self.num_pulled_tokens += num_tokens
            self.num_fetched_tokens += num_tokens * is_fetched

    def on_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Count one sequence's drafts that were verified in a step."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_speculative_steps += 1


_numbers = attrgetter(*(one.name for one in fields(StepCounters) if one.default is not MISSING))
_dicts = attrgetter(*(one.name for one in fields(StepCounters) if one.default is MISSING))
"""The fields that are dicts, which come last."""


class DiskSize(NamedTuple):
    """What a node has in its files, and how many blocks it has seen in those of other nodes."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """A scheduler's counters and its present state, all at one moment."""

    counters: StepCounters
    method: str
    blocks: BlockCounts
    num_host_blocks_used: int
    num_prefix_host_blocks: int
    disk: DiskSize
    new_token_ratio: float
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    highest_num_bypassed: int
    max_num_seqs: int
    max_num_batched_tokens: int
