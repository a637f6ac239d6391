"""The settings of scheduling and of speculation. The field's own names are kept."""

from __future__ import annotations

from dataclasses import dataclass

from common.setting import (
    must_be_a_share,
    must_be_above_zero,
    must_be_at_least,
    must_be_one_of,
    setting,
)
from common.token_budget import DEFAULT_NUM_SPECULATIVE_TOKENS

RESERVATION_POLICIES = ("none", "fixed_blocks", "token_ratio", "global_ratio")
PREEMPTION_POLICIES = ("last_in_first_out", "shortest_output", "priority")
PREEMPTION_MODES = ("recompute", "swap")
REQUEUE_POLICIES = ("arrival", "tail")
SPECULATIVE_METHODS = tuple(DEFAULT_NUM_SPECULATIVE_TOKENS)

MOST_SPECULATIVE_TOKENS = 64
"""No drafter is right that often in a row; a larger number is a slip of the finger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """Who runs next, what is kept back for those who run, and who pays when blocks run out."""

    reservation_policy: str = setting(
        "global_ratio",
        "blocks kept back for outputs: none, fixed_blocks, token_ratio or global_ratio",
    )
    init_new_token_ratio: float = setting(
        0.7, "share of the remaining output that is kept back at first"
    )
    min_new_token_ratio: float = setting(0.1, "token_ratio: the share never decays below this")
    min_new_token_ratio_factor: float = setting(
        0.14, "global_ratio: never decays below this times the initial share"
    )
    new_token_ratio_decay_steps: int = setting(
        600, "decode steps from the initial share to the lowest one (0: no decay)"
    )
    clip_max_new_tokens: int = setting(4096, "most remaining output tokens that count")
    retract_extra_tokens: int = setting(
        1024, "token_ratio: further tokens expected of each sequence after a preemption"
    )
    schedule_conservativeness: float = setting(1.0, "global_ratio: factor on the initial share")
    reserve_output_block_num_for_decode_when_schedule_new_prefill: int = setting(
        16, "fixed_blocks: blocks kept back for each running sequence"
    )
    reserve_decay_output_block_num_for_decode_when_schedule_new_prefill: float = setting(
        0.025, "fixed_blocks: blocks less after each decode step"
    )
    reserve_min_output_block_num_for_decode_when_schedule_new_prefill: int = setting(
        0, "fixed_blocks: never fewer than this"
    )
    preemption_policy: str = setting(
        "last_in_first_out",
        "who loses its blocks first: last_in_first_out, shortest_output or priority",
    )
    preemption_mode: str = setting(
        "recompute", "a preempted sequence resumes by recompute, or by swap from host memory"
    )
    swap_space: int = setting(256 << 20, "host memory for swapped KV blocks", unit="bytes")
    requeue: str = setting(
        "arrival", "a preempted sequence waits by its arrival, or at the tail of the queue"
    )
    retract_decode_steps: int = setting(
        20, "decode steps that a preemption makes room for, for everyone who is left"
    )
    min_progress_tokens: int = setting(
        16, "output tokens a resumed sequence may draw before it is preempted again"
    )
    enable_priority_scheduling: bool = setting(
        False, "requests with a higher priority go first and may preempt lower ones"
    )
    skip_ahead_window: int = setting(
        4, "requests behind a blocked one that may be admitted before it (0: strict order)"
    )
    skip_ahead_limit: int = setting(
        16, "after being passed this often, a blocked request lets nobody pass"
    )
    chunk_granularity: int = setting(
        1, "prefill chunks, but for a prompt's last, are multiples of this many tokens"
    )

    def problems(self) -> list[str]:
        """Every violated rule. What only another policy reads may be anything in its range."""
        return [
            *must_be_one_of("reservation_policy", self.reservation_policy, RESERVATION_POLICIES),
            *self._ratio_problems(),
            *self._fixed_blocks_problems(),
            *must_be_one_of("preemption_policy", self.preemption_policy, PREEMPTION_POLICIES),
            *must_be_one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES),
            *self._swap_problems(),
            *must_be_one_of("requeue", self.requeue, REQUEUE_POLICIES),
            *must_be_at_least("retract_decode_steps", self.retract_decode_steps, 0),
            *must_be_at_least("min_progress_tokens", self.min_progress_tokens, 0),
            *must_be_at_least("skip_ahead_window", self.skip_ahead_window, 0),
            *must_be_at_least("skip_ahead_limit", self.skip_ahead_limit, 0),
            *self._granularity_problems(),
        ]

    def _ratio_problems(self) -> list[str]:
        initial, lowest = self.init_new_token_ratio, self.min_new_token_ratio
        wrong = [
            *must_be_a_share("init_new_token_ratio", initial),
            *must_be_a_share("min_new_token_ratio", lowest),
            *must_be_a_share("min_new_token_ratio_factor", self.min_new_token_ratio_factor),
            *must_be_at_least("new_token_ratio_decay_steps", self.new_token_ratio_decay_steps, 0),
            *must_be_at_least("clip_max_new_tokens", self.clip_max_new_tokens, 1),
            *must_be_at_least("retract_extra_tokens", self.retract_extra_tokens, 0),
            *must_be_above_zero("schedule_conservativeness", self.schedule_conservativeness),
        ]
        if wrong:
            return wrong
        if self.reservation_policy == "token_ratio" and not 0 < lowest <= initial:
            wrong.append(
                f"min_new_token_ratio is {lowest}: wanted above 0, at most "
                f"init_new_token_ratio = {initial}, with reservation_policy = token_ratio"
            )
        if self.reservation_policy == "global_ratio":
            wrong += must_be_above_zero("init_new_token_ratio", initial)
            wrong += must_be_above_zero(
                "min_new_token_ratio_factor", self.min_new_token_ratio_factor
            )
        return wrong

    def _fixed_blocks_problems(self) -> list[str]:
        first = "reserve_output_block_num_for_decode_when_schedule_new_prefill"
        decay = "reserve_decay_output_block_num_for_decode_when_schedule_new_prefill"
        lowest = "reserve_min_output_block_num_for_decode_when_schedule_new_prefill"
        wrong = [
            problem
            for name in (first, decay, lowest)
            for problem in must_be_at_least(name, getattr(self, name), 0)
        ]
        is_used = self.reservation_policy == "fixed_blocks"
        if is_used and not wrong and getattr(self, lowest) > getattr(self, first):
            wrong.append(
                f"{lowest} is {getattr(self, lowest)}: wanted at most "
                f"{first} = {getattr(self, first)}, with reservation_policy = fixed_blocks"
            )
        return wrong

    def _swap_problems(self) -> list[str]:
        if self.preemption_mode == "swap" and self.swap_space == 0:
            return [
                "swap_space is 0 bytes: wanted room for some KV blocks, such as 256MiB, "
                "with preemption_mode = swap"
            ]
        return must_be_at_least("swap_space", self.swap_space, 0)

    def _granularity_problems(self) -> list[str]:
        size = self.chunk_granularity
        if size < 1 or size & (size - 1):
            return [f"chunk_granularity is {size}: wanted a power of two"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Draft tokens: who proposes them, and how many at most."""

    speculative_method: str = setting("none", "who drafts: none, ngram, suffix or mtp")
    num_speculative_tokens: int = setting(
        0, "most drafts per sequence and step (0: what suits the method)"
    )
    speculative_model: str = setting(
        "", "mtp: a safetensors file with the head (default: the one in or for the checkpoint)"
    )

    def problems(self) -> list[str]:
        """Every violated rule. Whether the model can draft is seen when it is loaded."""
        wrong = must_be_one_of("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        if not 0 <= self.num_speculative_tokens <= MOST_SPECULATIVE_TOKENS:
            wrong.append(
                f"num_speculative_tokens is {self.num_speculative_tokens}: "
                f"wanted 0 to {MOST_SPECULATIVE_TOKENS}"
            )
        if self.speculative_model and self.speculative_method != "mtp":
            wrong.append(
                f"speculative_model is {self.speculative_model!r}, which nobody reads with "
                f"speculative_method = {self.speculative_method}: wanted mtp, or no file"
            )
        return wrong
