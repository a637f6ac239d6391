"""The settings of scheduling and of speculation. Other engines use the same names for them."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.token_budget import DEFAULT_NUM_SPECULATIVE_TOKENS
from common.settings.setting import POWER_OF_TWO, SHARE, Problem, Section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig(Section):
    """Which request runs next, and which one is preempted."""

    reservation_policy: str = setting(
        "learned",
        "how many blocks are kept back for the output of running sequences",
        one_of=("none", "fixed_blocks", "token_ratio", "global_ratio", "learned"),
    )
    init_new_token_ratio: float = setting(
        0.7,
        "token_ratio, global_ratio, learned: share of remaining output kept back at first",
        between=SHARE,
    )
    min_new_token_ratio: float = setting(
        0.1, "token_ratio: the share never decays below this", between=SHARE
    )
    min_new_token_ratio_factor: float = setting(
        0.14,
        "global_ratio: the share never decays below this part of the initial one",
        between=SHARE,
    )
    new_token_ratio_decay_steps: int = setting(
        600, "decode steps from the initial share to the lowest one", note="0: no decay", at_least=0
    )
    learned_output_quantile: float = setting(
        0.9,
        "learned: quantile of the lengths of past outputs that is the expected length of an output",
        between=SHARE,
    )
    clip_max_new_tokens: int = setting(
        4096, "maximum number of remaining output tokens that count for one sequence", at_least=1
    )
    retract_extra_tokens: int = setting(
        -1,
        "token_ratio: further tokens expected per sequence after a preemption",
        note="-1: 16 blocks",
        at_least=-1,
    )
    schedule_conservativeness: float = setting(
        1.0, "global_ratio: factor on the initial share", above=0
    )
    reserve_output_block_num_for_decode_when_schedule_new_prefill: int = setting(
        16, "fixed_blocks: blocks kept back for each running sequence", at_least=0
    )
    reserve_decay_output_block_num_for_decode_when_schedule_new_prefill: float = setting(
        0.025,
        "fixed_blocks: the number decreases by this after each decode step",
        at_least=0,
    )
    reserve_min_output_block_num_for_decode_when_schedule_new_prefill: int = setting(
        0, "fixed_blocks: the number never decreases below this", at_least=0
    )
    preemption_policy: str = setting(
        "last_in_first_out",
        "which sequence loses its blocks first",
        one_of=("last_in_first_out", "shortest_output", "priority"),
    )
    preemption_mode: str = setting(
        "recompute", "how a preempted sequence regains its KV", one_of=("recompute", "swap")
    )
    swap_space: int = setting(
        256 << 20, "host memory for swapped KV blocks", unit="bytes", at_least=0
    )
    requeue: str = setting(
        "arrival",
        "where a preempted sequence waits",
        note="arrival: in order of arrival; tail: after all others",
        one_of=("arrival", "tail"),
    )
    retract_decode_steps: int = setting(
        20,
        "a preemption makes room for this many decode steps of the remaining sequences",
        at_least=0,
    )
    min_progress_tokens: int = setting(
        16, "output tokens of a resumed sequence before it can be preempted again", at_least=0
    )
    enable_priority_scheduling: bool = setting(
        False, "requests with a higher priority go first and may preempt lower ones"
    )
    priority_pass_limit: int = setting(
        16,
        "admissions that may pass the longest waiting request before it goes first",
        at_least=1,
    )
    shed: bool = setting(
        False, "refuse requests that would end after their deadlines because of the queue"
    )
    skip_ahead_window: int = setting(
        4, "requests that may pass a blocked one in the queue", note="0: strict order", at_least=0
    )
    skip_ahead_limit: int = setting(
        16, "a blocked request that was passed this often lets no other pass", at_least=0
    )
    long_prefill_token_threshold: int = setting(
        128,
        "maximum tokens of one prompt in a step while other prompts wait or are computed",
        note="0: no maximum",
        at_least=0,
    )
    chunk_granularity: int = setting(
        1,
        "every prefill chunk except a prompt's last is a multiple of this many tokens",
        form=POWER_OF_TWO,
    )
    async_scheduling: str = setting(
        "auto",
        "plan the next step while one runs",
        note="auto: on where steps run on a GPU",
        one_of=("auto", "on", "off"),
    )

    def joint_problems(self) -> list[Problem]:
        """Return every broken rule about several settings.

        A setting that the chosen policy does not read can have any value in its range.
        """
        wrong, policy = [], self.reservation_policy
        initial, lowest = self.init_new_token_ratio, self.min_new_token_ratio
        if policy == "token_ratio" and not 0 < lowest <= initial:
            wanted = "above 0, at most the initial share"
            others = ("init_new_token_ratio", "reservation_policy")
            wrong.append(self.conflict("min_new_token_ratio", wanted, *others))
        if policy in ("global_ratio", "learned") and initial == 0:
            wrong.append(self.conflict("init_new_token_ratio", "above 0", "reservation_policy"))
        if policy == "global_ratio" and self.min_new_token_ratio_factor == 0:
            key = "min_new_token_ratio_factor"
            wrong.append(self.conflict(key, "above 0", "reservation_policy"))
        most = "reserve_output_block_num_for_decode_when_schedule_new_prefill"
        least = "reserve_min_output_block_num_for_decode_when_schedule_new_prefill"
        if policy == "fixed_blocks" and getattr(self, least) > getattr(self, most):
            wanted = "at most the initial number"
            wrong.append(self.conflict(least, wanted, most, "reservation_policy"))
        if self.preemption_mode == "swap" and self.swap_space == 0:
            wanted = "room for some KV blocks, such as 256MiB"
            wrong.append(self.conflict("swap_space", wanted, "preemption_mode"))
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Section):
    """How draft tokens are proposed, and how many at most."""

    speculative_method: str = setting(
        "none", "how draft tokens are proposed", one_of=tuple(DEFAULT_NUM_SPECULATIVE_TOKENS)
    )
    # No drafter is right more often in a row: a larger number is a typing error.
    num_speculative_tokens: int = setting(
        0, "maximum drafts per sequence and step", note="0: what suits the method", between=(0, 64)
    )
    speculative_model: str = setting(
        "",
        "mtp: safetensors file with the drafting layer",
        note="default: that of the checkpoint, or for the demo model that of pdserve",
        metavar="FILE",
    )

    def joint_problems(self) -> list[Problem]:
        """Return the broken rules. Whether the model can draft is checked when it is loaded."""
        if not self.speculative_model or self.speculative_method == "mtp":
            return []
        wanted = "no file (only mtp reads one)"
        return [self.conflict("speculative_model", wanted, "speculative_method")]
